"""The shortest answer first, which makes the mean wait the least; the place as `least_loaded` does.

An answer counts as the time for which others may overtake it, and that is bounded: who becomes
ready later than that is behind it. So the order depends on when a request was ready and on its
length alone, never on when one asks, and nobody starves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.parameters import Parameters
from policies.routing.estimates import least_loaded
from policies.routing.protocol import DecodePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import DecodeOffer, Wish


class ShortestFirstParameters(Parameters, frozen=True):
    """Parameters of `shortest_first`."""

    tokens_per_s: Annotated[float, Meta(gt=0, le=1e9)] = 100.0
    """An answer that is longer by so many tokens may be overtaken for a second more."""
    overtaken_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """For no longer than that, however long it is; 0: in the order of readiness."""


class ShortestFirst(DecodePolicy):
    """By expected output."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = ShortestFirstParameters()

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """By when they were ready, and what their answers add to that."""
        del now_s
        return sorted(range(len(wishes)), key=lambda at: self._turn_s(wishes[at]))

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """As `least_loaded`."""
        del now_s
        return least_loaded(wish, offers)

    def _turn_s(self, wish: Wish) -> float:
        wait_s = wish.new_tokens / self.parameters.tokens_per_s
        return wish.ready_s + min(wait_s, self.parameters.overtaken_s)
