"""The emptiest worker, by its batch or its KV tokens, whichever is scarcer; bytes do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.routing.estimates import in_turn, least_loaded
from policies.routing.protocol import DecodePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import DecodeOffer, Wish


class LeastLoaded(DecodePolicy):
    """The least load, in the order of readiness: nobody overtakes."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """As they became ready."""
        del now_s
        return in_turn(wishes)

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """Of equal ones the nearest."""
        del now_s
        return least_loaded(wish, offers)
