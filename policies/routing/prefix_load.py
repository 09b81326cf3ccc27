"""Where the prompt is computed soonest: what waits there, what is new, and the prefix's way there.

A worker whose host has the prefix wins by the time that it takes to bring it elsewhere, not more:
a short queue elsewhere is worth a transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.routing.estimates import UNMEASURED_TOKENS_PER_S, distance, filled, first, links
from policies.routing.protocol import PrefillPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import PrefillOffer, Wish


class PrefixLoad(PrefillPolicy):
    """The least time until the prompt is computed; of equal ones the nearest."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def choose(self, wish: Wish, offers: Sequence[PrefillOffer]) -> int | None:
        """Among those with the adapter, if one is needed."""
        ranks = (
            (time, distance(wish, offer)) if offer.has_adapter or not wish.needs_adapter else None
            for time, offer in zip(times_s(wish, offers), offers, strict=True)
        )
        return first(ranks, offers)


def times_s(wish: Wish, offers: Sequence[PrefillOffer]) -> list[float]:
    """Until each would have computed the prompt."""
    speeds = filled([o.tokens_per_s for o in offers], max, UNMEASURED_TOKENS_PER_S)
    token_bytes = wish.bytes_total / wish.tokens
    fresh_tokens = wish.tokens - wish.prefix_tokens
    return [
        (offer.queued_tokens + fresh_tokens) / speed
        + max(0, wish.prefix_tokens - offer.prefix_tokens) * token_bytes / link
        for offer, speed, link in zip(offers, speeds, links(offers), strict=True)
    ]
