"""The emptiest segment first, by share of its capacity: load follows size, without a history.

What comes empty gets all of the load until it is as full as the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.placement.protocol import PlacementPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.placement.protocol import Candidate


class MostFree(PlacementPolicy):
    """Largest free share first; equal ones by name, so that the order is one."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first; all of them."""
        return sorted(candidates, key=lambda c: (-c.free_share, c.segment))

    def firsts(
        self, candidates: Sequence[Candidate], count: int, sample: int
    ) -> Sequence[Candidate]:
        """All go to the emptiest."""
        del sample
        return [self.ranked(candidates)[0]] * count
