"""Reed-Solomon stripes of pages that nobody has used for a while.

4+2 survives any two hosts, as three replicas do, at half their bytes. What it costs: a page whose
holder is gone is read from four others, and a dead page leaves its parity to the living ones. So
only pages that have been idle for as long as most reuse takes, and are going to stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.erasure.protocol import Code, ErasurePolicy
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.erasure.protocol import Resting


class ReedSolomonParameters(Parameters, frozen=True):
    """k data and m parity shards, each on another host; seconds."""

    k: Annotated[int, Meta(ge=1, le=16)] = 4
    """16 at most: lookups name the shards of every page that is decoded, in one message."""
    m: Annotated[int, Meta(ge=1, le=4)] = 2
    cold_after_s: Annotated[float, Meta(ge=0)] = 300.0
    """Since the last use: the pages of a conversation that goes on are read again sooner."""
    left_s: Annotated[float, Meta(ge=0)] = 300.0
    """A page that expires sooner is not worth the parity."""


class ReedSolomon(ErasurePolicy):
    """Pages that rest so long, and are going to."""

    def __init__(self) -> None:
        """4+2 of what was idle for five minutes."""
        self.parameters: ReedSolomonParameters = ReedSolomonParameters()

    @property
    def code(self) -> Code:
        """As it is set."""
        return Code(self.parameters.k, self.parameters.m)

    def takes(self, page: Resting) -> bool:
        """By its last use and its end."""
        wanted = self.parameters
        return page.idle_s >= wanted.cold_after_s and page.left_s >= wanted.left_s
