"""The better one of two that are drawn by chance, as large segments are more often.

Mitzenmacher, "The power of two choices in randomized load balancing" (IEEE TPDS 2001): nearly as
even as the best of all, although what is known of them is old by some puts; and one that comes
empty wins each draw that it is in and no more, which is at most twice its share of the capacity.
The better one is where less is about to be written, or as much and more is free.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from policies.parameters import Parameters
from policies.placement.protocol import PlacementPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from policies.placement.protocol import Candidate


U64: Final = (1 << 64) - 1
_LOW: Final = (1 << 32) - 1


class TwoChoicesParameters(Parameters, frozen=True):
    """Parameters of `two_choices`."""

    load_grain_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 64 << 20
    """Segments are as busy as each other while what is about to be written there counts as many of
    it: some 10 ms of a worker's time."""


class TwoChoices(PlacementPolicy):
    """Each put goes to the better one of two."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = TwoChoicesParameters()

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The least busy first, of those the emptiest."""
        return better_first(candidates, self.parameters.load_grain_bytes)

    def firsts(
        self, candidates: Sequence[Candidate], count: int, sample: int
    ) -> Sequence[Candidate]:
        """The better one of two, for each."""
        return drawn(self.ranked(candidates), count, sample)


def better_first(candidates: Sequence[Candidate], grain_bytes: int) -> list[Candidate]:
    """The least busy first, of those the emptiest; by name, so that the order is one."""
    return sorted(candidates, key=lambda c: (c.load_bytes // grain_bytes, -c.free_share, c.segment))


def drawn(ranked: Sequence[Candidate], count: int, sample: int) -> list[Candidate]:
    """The better one of two that are drawn, their capacity as weight, so many times."""
    bounds = list(accumulate(candidate.capacity_bytes for candidate in ranked))
    total = bounds[-1]
    found: list[Candidate] = []
    for number in _numbers(sample, count):
        one = bisect_right(bounds, (number >> 32) * total >> 32)
        other = bisect_right(bounds, (number & _LOW) * total >> 32)
        found.append(ranked[min(one, other)])
    return found


def _numbers(sample: int, count: int) -> Iterator[int]:
    """That many of 64 bits, by SplitMix64 (Steele et al., OOPSLA 2014), which has no bad seeds."""
    for number in range(1, count + 1):
        mixed = (sample + number * 0x9E3779B97F4A7C15) & U64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & U64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & U64
        yield mixed ^ mixed >> 31
