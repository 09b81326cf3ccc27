"""The writer's own host first, as long as that is not much fuller than others; else two choices.

What is written where it was made crosses no network but when it is read, and a page is made once
and mostly read once elsewhere. A host that writes more than its share fills its own segments, and
then those of others: before it evicts what it wrote while there is room elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.placement.protocol import PlacementPolicy
from policies.placement.two_choices import U64, TwoChoicesParameters, better_first, drawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.placement.protocol import Candidate


class LocalFirstParameters(TwoChoicesParameters, frozen=True):
    """Parameters of `local_first`."""

    fuller_max: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """How much more of it may be in use than of another segment, as a share of the capacity."""


class LocalFirst(PlacementPolicy):
    """Near segments first; the better one of two among them, and among all."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = LocalFirstParameters()

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Near ones first."""
        ordered = better_first(candidates, self.parameters.load_grain_bytes)
        return sorted(ordered, key=lambda c: not c.is_near)

    def firsts(
        self, candidates: Sequence[Candidate], count: int, sample: int
    ) -> Sequence[Candidate]:
        """The near one, or the other one where that has far more room."""
        ordered = better_first(candidates, self.parameters.load_grain_bytes)
        others = drawn(ordered, count, sample)
        near = [candidate for candidate in ordered if candidate.is_near]
        if not near:
            return others
        pairs = zip(drawn(near, count, ~sample & U64), others, strict=True)
        return [self._chosen(mine, other) for mine, other in pairs]

    def _chosen(self, mine: Candidate, other: Candidate) -> Candidate:
        is_fuller = other.free_share - mine.free_share > self.parameters.fuller_max
        return other if is_fuller else mine
