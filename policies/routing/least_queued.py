"""Where the fewest tokens wait to be computed, whatever the host has: the reference to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.routing.estimates import distance, first
from policies.routing.protocol import PrefillPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import PrefillOffer, Wish


class LeastQueued(PrefillPolicy):
    """The shortest queue; of equal ones the nearest."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def choose(self, wish: Wish, offers: Sequence[PrefillOffer]) -> int | None:
        """Among those with the adapter, if one is needed."""
        ranks = (
            (offer.queued_tokens, distance(wish, offer))
            if offer.has_adapter or not wish.needs_adapter
            else None
            for offer in offers
        )
        return first(ranks, offers)
