"""Hand over what is worth it: a hand-over costs round trips whatever is handed over.

What it saves are the steps of others that a prompt holds up, which grow with the tokens to be
computed: below so many of them they are shorter than the hand-over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.parameters import Parameters
from policies.routing.protocol import Alone, ColocationPolicy

if TYPE_CHECKING:
    from policies.routing.protocol import Case


class BreakEvenParameters(Parameters, frozen=True):
    """Parameters of `break_even`."""

    tokens: Annotated[int, Meta(ge=0, le=1 << 30)] = 256
    """To be computed of a prompt, from which on it is handed over; 0: all are."""
    failures: Annotated[int, Meta(ge=1, le=100)] = 2
    """Workers that have not handed a request over, after which no further hand-over is tried."""


class BreakEven(ColocationPolicy):
    """Short prompts, requests that nobody could take over, and those that have nobody to."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = BreakEvenParameters()

    def alone(self, case: Case) -> Alone | None:
        """The first reason that holds."""
        if not case.others:
            return Alone.NO_OTHERS
        if case.failed_hand_overs >= self.parameters.failures:
            return Alone.FAILED
        return Alone.BREAK_EVEN if case.fresh_tokens < self.parameters.tokens else None
