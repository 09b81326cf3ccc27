"""Aged frequency: what its numbers mean, how they order, and what hints move."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.hints import NO_HINTS, Hints
from kvstore.ids import KEY_BYTES
from policies.eviction.lrfu import Lrfu, LrfuParameters
from policies.eviction.protocol import SAME_USE_S
from policies.parameters import amended
from tests.unit.policy_entries import Pages, chain, evict, put

gaps = st.lists(st.floats(SAME_USE_S, 1e4), max_size=20)


def used(policy: Lrfu, *times: float) -> Pages:
    """Pages put at the first of these times and used at the others."""
    entry = put(policy, times[0])
    for at in times[1:]:
        policy.touched(entry, at, NO_HINTS)
    return entry


@given(gaps)
def test_the_score_is_the_log_of_aged_counts(gaps: list[float]) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    policy = Lrfu()
    entry = used(policy, *times)
    count = sum(2.0 ** ((at - times[-1]) / 240.0) for at in times)
    score = policy.score(entry, times[-1])
    assert score == pytest.approx(times[-1] + 240.0 * log2(count), abs=1e-3)
    assert entry.touches == len(times)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_an_access_never_lowers_a_score(heat: float, now: float) -> None:
    policy, entry = Lrfu(), Pages(chain("any"))
    entry.heat = heat
    policy.touched(entry, now, NO_HINTS)
    assert policy.score(entry, now) >= heat
    assert now < SAME_USE_S or policy.score(entry, now) >= now


def test_one_recent_use_loses_to_many_less_recent_ones() -> None:
    policy = Lrfu()
    often = used(policy, *(SAME_USE_S * i for i in range(10)))
    assert policy.score(often, 500.0) > policy.score(used(policy, 300.0), 500.0)
    later = used(policy, 90.0 + 240.0 * log2(10) + 1.0)
    assert policy.score(later, 900.0) > policy.score(often, 900.0)


def test_accesses_at_once_are_one_use() -> None:
    policy = Lrfu()
    entry = used(policy, 0.0, 0.1, 0.5, 0.9)
    assert (entry.touches, policy.score(entry, 1.0)) == (1, 0.0)
    policy.touched(entry, 1.0, NO_HINTS)
    assert entry.touches == 2


def test_hot_pages_count_however_often_they_are_used() -> None:
    policy = Lrfu()
    entry = used(policy, *(0.03 * i for i in range(400)))
    assert entry.touches == 12


def test_what_left_is_remembered_once() -> None:
    policy = Lrfu()
    hot = used(policy, 0.0, 20.0, 40.0)
    evict(policy, hot, 50.0)
    again, other = put(policy, 60.0), put(policy, 60.0)
    assert policy.score(again, 60.0) > policy.score(other, 60.0) == 60.0
    assert (again.touches, other.touches) == (4, 1)


def test_new_pages_behind_those_that_come_back_have_no_past() -> None:
    policy = Lrfu()
    evict(policy, put(policy, 0.0, "chat", pages=5), 50.0)
    keys = chain("chat", 9)
    entry = Pages(keys)
    assert policy.entered(entry, keys, 60.0, NO_HINTS) == 5
    assert entry.touches == 2
    assert policy.entered(entry, keys[5 * KEY_BYTES :], 60.0, NO_HINTS) == 4
    assert entry.touches == 1


def test_the_half_life_can_change_at_any_time() -> None:
    policy = Lrfu()
    policy.parameters = LrfuParameters(half_life_s=20.0)
    assert policy.score(used(policy, 0.0, 20.0), 20.0) == pytest.approx(20.0 + 20.0 * log2(1.5))


def test_no_ghosts_beyond_their_factor_of_the_pool() -> None:
    policy = Lrfu()
    policy.parameters = LrfuParameters(ghost_factor=2.0)
    policy.resize(1000)
    entries = [put(policy, 0.0, str(i)) for i in range(2001)]
    for entry in entries:
        evict(policy, entry, 1.0)
    assert put(policy, 20.0, "0").touches == 1
    assert put(policy, 20.0, "1").touches == 2


@pytest.mark.parametrize(
    ("hints", "bias"),
    [
        (Hints(), 0.0),
        (Hints(turn=3), 0.0),
        (Hints(reuse_probability=0.4), 0.0),
        (Hints(reuse_probability=0.8), 240.0),
        (Hints(reuse_probability=0.1), -480.0),
        (Hints(reuse_probability=0.0), 240.0 * log2(0.01 / 0.4)),
        (Hints(session_closed=True, reuse_probability=0.9), 240.0 * log2(0.01 / 0.4)),
        (Hints(tool_call_s=30.0), 30.0 + 240.0 * log2(1 / 0.4)),
        (Hints(tool_call_s=30.0, reuse_probability=0.8), 270.0),
        (Hints(tool_call_s=9000.0, reuse_probability=0.4), 300.0),
        (Hints(priority=2), 480.0),
        (Hints(priority=-1, reuse_probability=0.8), 0.0),
    ],
)
def test_hints_move_pages_by_a_time(hints: Hints, bias: float) -> None:
    policy = Lrfu()
    entry = put(policy, 100.0, hints=hints)
    assert policy.score(entry, 100.0) == pytest.approx(100.0 + bias)
    touched = put(policy, 0.0)
    policy.touched(touched, 1.0, hints)
    assert touched.bias == pytest.approx(bias)


def test_a_hint_without_a_use_moves_pages_by_the_same_time() -> None:
    policy = Lrfu()
    entry = put(policy, 0.0, hints=Hints(reuse_probability=0.8))
    policy.hinted(entry, 50.0, Hints(turn=4))
    assert (entry.bias, entry.touched_s, entry.touches) == (240.0, 0.0, 1)
    policy.hinted(entry, 50.0, Hints(tool_call_s=30.0, reuse_probability=0.4))
    assert (entry.bias, entry.touched_s, entry.touches) == (80.0, 0.0, 1)


def test_a_hint_lasts_until_the_next_request() -> None:
    policy = Lrfu()
    entry = put(policy, 0.0, hints=Hints(session_closed=True))
    policy.touched(entry, 5.0, NO_HINTS)  # the decode worker of the same request
    assert entry.bias < 0.0
    policy.touched(entry, 50.0, NO_HINTS)
    assert entry.bias == 0.0


def test_admission_hears_what_the_last_hint_said() -> None:
    policy = Lrfu()
    assert policy.reuse_probability(put(policy, 0.0), 5.0) is None
    for chance in (0.05, 0.8, 1.0):
        hinted = put(policy, 0.0, hints=Hints(reuse_probability=chance))
        assert policy.reuse_probability(hinted, 5.0) == pytest.approx(chance)
    held = put(policy, 0.0, hints=Hints(tool_call_s=60.0))
    assert policy.reuse_probability(held, 5.0) == 1.0


@pytest.mark.parametrize(
    "parameters",
    [{"half_life_s": 1.0, "tool_hold_max_s": 3600.0}, {"half_life_s": 86_400.0}],
    ids=["held for long", "half-life made shorter since"],
)
def test_a_bias_of_many_half_lives_is_certainty(parameters: dict[str, float]) -> None:
    policy = Lrfu()
    policy.parameters = amended(policy.parameters, parameters)
    held = put(policy, 0.0, hints=Hints(tool_call_s=3600.0))
    policy.parameters = amended(policy.parameters, {"half_life_s": 1.0})
    assert policy.reuse_probability(held, 5.0) == 1.0
