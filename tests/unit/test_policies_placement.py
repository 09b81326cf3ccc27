"""The emptiest first, and always the same order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from policies import registry
from policies.placement.most_free import MostFree
from policies.placement.protocol import Candidate


def candidate(name: str, capacity: int, free: int) -> Candidate:
    """A segment that takes puts."""
    return Candidate(name, "host", "dram", capacity, free)


def test_share_counts_and_not_size() -> None:
    candidates = [candidate("big", 1000, 300), candidate("small", 10, 9), candidate("full", 5, 0)]
    ranked = MostFree().ranked(candidates)
    assert [each.segment for each in ranked] == ["small", "big", "full"]


@given(
    st.permutations(
        [candidate(name, 100, free) for name, free in zip("abcd", (5, 5, 9, 0), strict=True)]
    )
)
def test_the_order_does_not_depend_on_the_order(candidates: list[Candidate]) -> None:
    assert [each.segment for each in MostFree().ranked(candidates)] == ["c", "a", "b", "d"]


def test_policies_are_found_by_name() -> None:
    assert isinstance(registry.placement("most_free"), MostFree)
    with pytest.raises(BadValue, match=r"placement.*most_free"):
        registry.placement("nearest")
