"""Requests that begin alike go together, as long as that does not make one worker much fuller.

They share the KV of what they have in common, in memory and in each step's reading of it. A prefix
that more ask for than one worker should serve spreads to the next one, and then these two grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.parameters import Parameters
from policies.routing.estimates import distance, first, in_turn, load_with
from policies.routing.protocol import DecodePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import DecodeOffer, Wish


class SamePrefixParameters(Parameters, frozen=True):
    """Parameters of `same_prefix`."""

    fuller_max: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """By how much fuller than the emptiest a worker may be for it, as a share of what it holds."""


class SamePrefix(DecodePolicy):
    """Most alike of those that are not much fuller, in the order of readiness."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = SamePrefixParameters()

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """As they became ready: nobody overtakes."""
        del now_s
        return in_turn(wishes)

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """Of those with equally many the least loaded, then the nearest."""
        del now_s
        loads = [load_with(wish, offer) for offer in offers]
        bound = min(loads, default=0.0) + self.parameters.fuller_max
        ranks = (
            (-offer.same_prefix, load, distance(wish, offer)) if load <= bound else None
            for load, offer in zip(loads, offers, strict=True)
        )
        return first(ranks, offers)
