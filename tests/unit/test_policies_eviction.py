"""Aged frequency: what its one number means, and how it orders."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from policies import registry
from policies.eviction.aged_frequency import AgedFrequency

times = st.lists(st.floats(0, 1e5), min_size=1, max_size=20).map(sorted)


@given(times)
def test_the_score_is_the_log_of_aged_counts(accesses: list[float]) -> None:
    policy = AgedFrequency(half_life_s=240.0)
    score = policy.entered(b"key", accesses[0])
    for at in accesses[1:]:
        score = policy.touched(score, at)
    now = accesses[-1]
    count = sum(2.0 ** ((at - now) / 240.0) for at in accesses)
    assert score == pytest.approx(now + 240.0 * log2(count), abs=1e-3)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_an_access_never_lowers_a_score(score: float, now: float) -> None:
    after = AgedFrequency().touched(score, now)
    assert after >= score
    assert after >= now


def test_one_recent_access_loses_to_many_less_recent_ones() -> None:
    policy = AgedFrequency(half_life_s=240.0)
    often = policy.entered(b"often", 0.0)
    for at in range(1, 10):
        often = policy.touched(often, float(at))
    once = policy.entered(b"once", 120.0)
    assert often > once
    much_later = policy.entered(b"later", 9.0 + 240.0 * log2(10) + 1.0)
    assert much_later > often


def test_what_left_is_remembered_once() -> None:
    policy = AgedFrequency()
    hot = policy.entered(b"a", 0.0)
    for at in range(5):
        hot = policy.touched(hot, float(at))
    policy.evicted(b"a", hot)
    assert policy.entered(b"a", 10.0) == policy.touched(hot, 10.0)
    assert policy.entered(b"a", 10.0) == 10.0


def test_memory_of_what_left_is_bounded_and_forgets_the_oldest() -> None:
    policy = AgedFrequency(ghosts_max=100)
    for number in range(1000):
        policy.evicted(number.to_bytes(4, "little"), 1000.0 + number)
        assert policy.ghosts <= 100
    assert policy.entered((999).to_bytes(4, "little"), 0.0) > 0.0
    assert policy.entered((0).to_bytes(4, "little"), 0.0) == 0.0


def test_policies_are_found_by_name() -> None:
    assert isinstance(registry.eviction("lrfu"), AgedFrequency)
    assert registry.eviction("lrfu") is not registry.eviction("lrfu")
    with pytest.raises(ConfigError, match=r"eviction.*lrfu"):
        registry.eviction("lru")
