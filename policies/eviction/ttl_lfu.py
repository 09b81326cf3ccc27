"""Least frequently used within a TTL: what was not used for a while goes first, oldest first.

Then come pages by their count of uses, which survives eviction; equal counts by the time of the
last use. A short TTL orders small pools well and empties large ones too early: with room for all
that comes back, `lrfu` keeps more. Takes no hints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from policies.eviction.ghosts import GhostParameters, Ghosts
from policies.eviction.protocol import EvictionPolicy, is_new_use, page_count

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.eviction.protocol import Entry

LEVEL_S: Final = 1e8
"""What one use more is worth: longer than any two times of a clock lie apart."""


class TtlLfuParameters(GhostParameters, frozen=True):
    """Parameters of `ttl-lfu`."""

    ttl_s: Annotated[float, Meta(ge=1, le=604_800)] = 300.0
    """Time after its last use from which a page goes before all others."""


class TtlLfu(EvictionPolicy):
    """Counts of uses with ghosts, below a TTL."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = TtlLfuParameters()
        self._ghosts = Ghosts()

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        """One use, on top of those that are remembered."""
        ghost = self._ghosts.take(keys)
        entry.bias = 0.0
        entry.touches = 1 if ghost is None else ghost.touches + 1
        entry.heat = entry.touched_s = now_s
        return page_count(keys) if ghost is None else ghost.pages

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """One use more; the TTL starts anew at every access."""
        is_new_use(entry, now_s)
        entry.heat = now_s

    def score(self, entry: Entry, now_s: float) -> float:
        """Uses first, then the time of the last access; no uses once the TTL is over."""
        is_fresh = now_s - entry.heat < self.parameters.ttl_s
        return entry.touches * LEVEL_S * is_fresh + entry.heat

    def evicted(self, entry: Entry, keys: bytes, now_s: float) -> None:
        """Remember the count."""
        self._ghosts.keep(keys, entry)

    def resize(self, pages: int) -> None:
        """Remember a multiple of what the pool holds."""
        self._ghosts.resize(pages * self.parameters.ghost_factor)
