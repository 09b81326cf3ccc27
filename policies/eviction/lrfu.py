"""LRFU in log form: recency and frequency in one number that never needs ageing.

Lee et al., "LRFU: a spectrum of policies" (IEEE ToC 2001), with the combined count C kept as
heat = H * log2(C) + the time at which C was taken. A count taken at t weighs 2**(-(now - t)/H)
now, so the numbers of different runs compare without being brought up to date.

The same form takes hints: if uses become rarer by half every H seconds, pages of a chain that is
used again with probability p instead of the usual one stand as high as others that were used
H * log2(p / usual) later, and those whose hits are worth twice as much as if used H later. That is
the bias; it lasts until the next use.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from policies.eviction.ghosts import GhostParameters, Ghosts
from policies.eviction.protocol import (
    SAME_REQUEST_S,
    EvictionPolicy,
    is_new_use,
    page_count,
)

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.eviction.protocol import Entry

PROBABILITY_MIN: Final = 0.01
"""What a closed session counts as, and the least that a hint can say."""


class LrfuParameters(GhostParameters, frozen=True):
    """Parameters of `lrfu`."""

    half_life_s: Annotated[float, Meta(ge=1, le=86_400)] = 240.0
    """Time in which a use loses half its weight: about twice the median time between two uses.

    Half or double costs at most a point of hits where pages are not scarce. To follow the median
    of the gaps seen costs a point in small pools: gaps longer than the memory of what left are
    never seen. Where four times as much passes between uses as in conversations, set it; `rent`
    needs no such number.
    """
    usual_probability: Annotated[float, Meta(ge=0.01, le=0.99)] = 0.4
    """Probability that a chain without a hint is used again; hints count against it."""
    tool_hold_max_s: Annotated[float, Meta(ge=0, le=3600)] = 300.0
    """Longest time that a pending tool call holds pages."""


class Lrfu(EvictionPolicy):
    """Exponentially aged counts of uses, with ghosts and hints."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = LrfuParameters()
        self._ghosts = Ghosts()

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        """One use, on top of what is remembered of them."""
        ghost = self._ghosts.take(keys)
        if ghost is None:
            entry.heat = entry.touched_s = now_s
            entry.touches = 1
        else:
            entry.heat, entry.touches, entry.touched_s = ghost.heat, ghost.touches, ghost.touched_s
            self._use(entry, now_s)
        entry.bias = self._bias(hints) or 0.0
        return page_count(keys) if ghost is None else ghost.pages

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """One use more; an access without a hint in the same request leaves its hint standing."""
        bias = self._bias(hints)
        if bias is not None or now_s - entry.touched_s >= SAME_REQUEST_S:
            entry.bias = bias or 0.0
        self._use(entry, now_s)

    def hinted(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """No use; a tool call is waited for from now on, not from the last use on."""
        bias = self._bias(hints, now_s - entry.touched_s)
        entry.bias = entry.bias if bias is None else bias

    def score(self, entry: Entry, now_s: float) -> float:
        """The same at any time."""
        return entry.heat + entry.bias

    def reuse_probability(self, entry: Entry, now_s: float) -> float | None:
        """What the last hint said; held pages are certain to be used."""
        if entry.bias == 0.0:
            return None
        # The bias may be one of a longer half-life, whose power would be no number any more.
        doublings = entry.bias / self.parameters.half_life_s
        return float(2.0 ** min(0.0, doublings + log2(self.parameters.usual_probability)))

    def evicted(self, entry: Entry, keys: bytes, now_s: float) -> None:
        """Remember the numbers, at the cost of the oldest ones."""
        self._ghosts.keep(keys, entry)

    def resize(self, pages: int) -> None:
        """Remember a multiple of what the pool holds."""
        self._ghosts.resize(pages * self.parameters.ghost_factor)

    def _use(self, entry: Entry, now_s: float) -> None:
        """C' = 1 + C * 2**((t - now)/H), in log form; exact for any gap between the two."""
        if not is_new_use(entry, now_s):
            return
        half_life_s, heat = self.parameters.half_life_s, entry.heat
        gap = (now_s - heat) / half_life_s
        if gap >= 0:
            entry.heat = now_s + half_life_s * log2(1.0 + 2.0**-gap)
        else:
            entry.heat = heat + half_life_s * log2(1.0 + 2.0**gap)

    def _bias(self, hints: Hints, unused_s: float = 0.0) -> float | None:
        """Seconds by which hints move a run forward or back; None when they say nothing.

        It was last used so long before they were given.
        """
        parameters, chance = self.parameters, hints.reuse_probability
        held_s = 0.0
        if hints.session_closed:
            chance = PROBABILITY_MIN
        elif hints.tool_call_s is not None:
            held_s = unused_s + min(hints.tool_call_s, parameters.tool_hold_max_s)
            chance = 1.0 if chance is None else chance
        if chance is None:
            if not hints.priority:
                return None
            chance = parameters.usual_probability
        odds = max(chance, PROBABILITY_MIN) / parameters.usual_probability
        return held_s + parameters.half_life_s * (hints.priority + log2(odds))
