"""What a placement policy decides: the order in which segments are tried for a new copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.parameters import Parameters


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A segment that takes pages now."""

    segment: str
    host: str
    tier: str
    capacity_bytes: int
    free_bytes: int
    load_bytes: int = 0
    """Planned and not written yet."""
    is_near: bool = False
    """Of the host that writes, or that the copy is for."""

    @property
    def free_share(self) -> float:
        """Of its capacity."""
        return self.free_bytes / self.capacity_bytes


class PlacementPolicy(Protocol):
    """Ranks candidates. Pure: the same candidates and sample give the same order."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first; all of them."""
        ...

    def firsts(
        self, candidates: Sequence[Candidate], count: int, sample: int
    ) -> Sequence[Candidate]:
        """Where each of the next `count` puts goes first, though none of them has been counted yet;
        where that has no room, it goes on as they are ranked. There is a candidate; `sample` is any
        number of 64 bits, another one each time.
        """
        ...
