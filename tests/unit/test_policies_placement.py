"""Where copies go: always in one order, by room and load, near the writer where that is asked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from policies import registry
from policies.placement.local_first import LocalFirst, LocalFirstParameters
from policies.placement.most_free import MostFree
from policies.placement.protocol import Candidate
from policies.placement.two_choices import TwoChoices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.placement.protocol import PlacementPolicy

GRAIN = 64 << 20
NAMES = ("local_first", "most_free", "two_choices")
DRAWS = 20_000


def candidate(
    name: str, capacity: int, free: int, load: int = 0, *, is_near: bool = False
) -> Candidate:
    """A segment that takes puts."""
    return Candidate(name, "host", "dram", capacity, free, load, is_near)


def names(ranked: Sequence[Candidate]) -> list[str]:
    """What they are called."""
    return [each.segment for each in ranked]


def shares(policy: PlacementPolicy, candidates: list[Candidate]) -> dict[str, float]:
    """Of many puts, those that go there first."""
    found = policy.firsts(candidates, DRAWS, 1)
    return {name: count / DRAWS for name, count in Counter(names(found)).items()}


def test_share_counts_and_not_size() -> None:
    candidates = [candidate("big", 1000, 300), candidate("small", 10, 9), candidate("full", 5, 0)]
    assert names(MostFree().ranked(candidates)) == ["small", "big", "full"]
    assert shares(MostFree(), candidates) == {"small": 1.0}


@given(
    st.sampled_from(NAMES),
    st.permutations(
        [candidate(name, 100, free) for name, free in zip("abcd", (5, 5, 9, 0), strict=True)]
    ),
)
def test_the_order_does_not_depend_on_the_order(name: str, candidates: list[Candidate]) -> None:
    policy = registry.placement(name)
    assert names(policy.ranked(candidates)) == ["c", "a", "b", "d"]
    drawn = policy.firsts(candidates, 9, 1)
    assert drawn == policy.firsts(sorted(candidates, key=lambda c: c.segment), 9, 1)
    assert len(drawn) == 9


@pytest.mark.parametrize("name", ["two_choices", "local_first"])
def test_one_that_comes_empty_gets_no_more_than_twice_its_share(name: str) -> None:
    full = [candidate(f"w{number}", 100, 5 + number) for number in range(10)]
    empty = candidate("new", 100, 100)
    share = shares(registry.placement(name), [*full, empty])["new"]
    assert 1.7 / 11 < share < 2 / 11
    assert shares(MostFree(), [*full, empty])["new"] == 1.0


def test_larger_segments_are_drawn_more_often() -> None:
    equal = [candidate("large", 300, 150), candidate("small", 100, 50), candidate("tiny", 4, 2)]
    found = shares(TwoChoices(), equal)
    # All are equally good, and then the first by name: it is in 1 - (1 - 300/404)**2 of the draws.
    assert found["large"] == pytest.approx(0.93, abs=0.01)
    assert found.get("tiny", 0.0) < 0.01


def test_where_much_is_about_to_be_written_nothing_goes() -> None:
    busy = candidate("busy", 100, 90, 3 * GRAIN)
    calm = candidate("calm", 100, 10, GRAIN - 1)
    assert names(TwoChoices().ranked([busy, calm])) == ["calm", "busy"]
    assert shares(TwoChoices(), [busy, calm])["calm"] == pytest.approx(0.75, abs=0.02)
    policy = registry.placement("two_choices", {"load_grain_bytes": 4 * GRAIN})
    assert names(policy.ranked([busy, calm])) == ["busy", "calm"]


def test_the_writers_host_comes_first_unless_it_is_much_fuller() -> None:
    others = [candidate("a", 100, 60), candidate("b", 100, 55)]
    near = candidate("mine", 100, 45, is_near=True)
    assert names(LocalFirst().ranked([*others, near])) == ["mine", "a", "b"]
    assert shares(LocalFirst(), [*others, near]) == {"mine": 1.0}
    policy = registry.placement("local_first", {"fuller_max": 0.12})
    found = shares(policy, [*others, near])
    # Where the emptier one of the others is one of the two that are drawn.
    assert found["a"] == pytest.approx(5 / 9, abs=0.02)
    assert "b" not in found
    fuller = candidate("mine", 100, 20, is_near=True)
    assert shares(LocalFirst(), [*others, fuller])["mine"] == pytest.approx(1 / 9, abs=0.02)


def test_among_several_near_ones_the_better_one_of_two() -> None:
    near = [candidate(name, 100, free, is_near=True) for name, free in (("x", 50), ("y", 40))]
    found = shares(LocalFirst(), [*near, candidate("a", 100, 60)])
    assert found == {"x": pytest.approx(0.75, abs=0.02), "y": pytest.approx(0.25, abs=0.02)}


def test_a_writer_without_a_worker_of_its_own_chooses_of_two() -> None:
    candidates = [candidate("a", 100, 60), candidate("b", 100, 55)]
    drawn = LocalFirst().firsts(candidates, 64, 3)
    assert drawn == TwoChoices().firsts(candidates, 64, 3)


def test_policies_are_found_by_name() -> None:
    assert set(registry.PLACEMENT) == set(NAMES)
    assert isinstance(registry.placement("most_free"), MostFree)
    with pytest.raises(BadValue, match="placement: got 'nearest', want one of local_first, most"):
        registry.placement("nearest")
    with pytest.raises(BadValue, match="fuller_max: got 2, want a number <= 1"):
        registry.placement("local_first", {"fuller_max": 2})
    assert LocalFirst().parameters == LocalFirstParameters()
