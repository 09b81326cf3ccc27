"""What a placement policy decides: the order in which segments are tried for a new copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.parameters import Parameters


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A segment that takes puts now."""

    segment: str
    host: str
    tier: str
    capacity_bytes: int
    free_bytes: int


class PlacementPolicy(Protocol):
    """Ranks candidates. Pure: the same candidates give the same order."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first; all of them."""
        ...
