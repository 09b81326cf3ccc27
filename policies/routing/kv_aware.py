"""Where the request is through soonest: the KV's way there, and the steps of its answer.

Both in seconds, so that no weight between bytes and load has to be guessed. Steps are expected to
take longer as a worker fills up: `step_s` is of its last beat, and what it was given since shows in
its load alone. Only so many steps count, as the load will be another one by then, and a request
that is to be answered at length does not cross the network for a little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.parameters import Parameters
from policies.routing.estimates import first, in_turn, load_with, steps_s, transfers_s
from policies.routing.protocol import DecodePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import DecodeOffer, Wish


class KvAwareParameters(Parameters, frozen=True):
    """Parameters of `kv_aware`."""

    fill_cost: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """By so much of itself a step is longer at a full worker than at an empty one."""
    steps_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """Of the answer, that count."""


class KvAware(DecodePolicy):
    """The least time, in the order of readiness: nobody overtakes."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = KvAwareParameters()

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """As they became ready."""
        del now_s
        return in_turn(wishes)

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """The one with the least time; of equal ones the less loaded."""
        del now_s
        loads = (load_with(wish, offer) for offer in offers)
        return first(zip(times_s(wish, offers, self.parameters), loads, strict=True), offers)


def times_s(
    wish: Wish, offers: Sequence[DecodeOffer], parameters: KvAwareParameters
) -> list[float]:
    """Until each would be through with as much of the answer as counts."""
    steps = min(wish.new_tokens, parameters.steps_max)
    return [
        transfer + steps * step * (1 + parameters.fill_cost * load_with(wish, offer))
        for transfer, step, offer in zip(
            transfers_s(wish, offers), steps_s(offers), offers, strict=True
        )
    ]
