"""First tokens in time: who has the least time left first, and a worker that is soon enough.

Under overload, serving by deadlines alone makes all late: each is served when its own has just
passed. Whoever is late anyway therefore lets those pass that still can be in time, but only for a
while: behind those whose deadline is `late_s` later than its own, nobody starves.

Of the workers that are soon enough, `kv_aware` chooses: whoever is in time gains nothing by being
sooner, and takes the least from the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.routing.estimates import first, steps_s, transfers_s
from policies.routing.kv_aware import KvAwareParameters, times_s
from policies.routing.protocol import DecodePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import DecodeOffer, Wish


class DeadlineAwareParameters(KvAwareParameters, frozen=True):
    """Parameters of `deadline_aware`."""

    late_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """So much later counts the deadline of one that is late; 0: by deadlines alone."""
    link_bytes_per_s: Annotated[float, Meta(ge=1, le=1e12)] = 1e9
    """At which KV is expected to be pulled, before a worker is chosen."""


class DeadlineAware(DecodePolicy):
    """By slack."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = DeadlineAwareParameters()

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """By when the transfer would have to begin."""
        return sorted(range(len(wishes)), key=lambda at: self._turn_s(wishes[at], now_s))

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """If none is soon enough, the soonest."""
        left_s = wish.deadline_s - now_s
        transfers = zip(transfers_s(wish, offers), steps_s(offers), strict=True)
        firsts = [transfer + step for transfer, step in transfers]
        times = times_s(wish, offers, self.parameters)
        ranks = (
            (False, time) if first_s <= left_s else (True, first_s)
            for first_s, time in zip(firsts, times, strict=True)
        )
        return first(ranks, offers)

    def _turn_s(self, wish: Wish, now_s: float) -> float:
        start_s = wish.deadline_s - wish.bytes_total / self.parameters.link_bytes_per_s
        return start_s if now_s <= start_s else start_s + self.parameters.late_s
