"""How late a read may be before it is hedged, and how many reads may be."""

from __future__ import annotations

import pytest

from kvstore.client.hedge_delay import (
    BURST_MAX,
    DELAY_MAX_S,
    DELAY_MIN_S,
    LOOK_EVERY,
    MEDIANS_MAX,
    SAMPLES,
    SAMPLES_MIN,
    SHARE_MAX,
    HedgeBudget,
    HedgeDelay,
)


def delay(*took_s: float) -> HedgeDelay:
    made = HedgeDelay()
    for seconds in took_s:
        made.note(seconds)
    return made


def test_nobody_knows_what_is_late_before_enough_samples() -> None:
    assert delay(*[0.01] * (SAMPLES_MIN - 1)).delay_s is None
    assert delay(*[0.01] * SAMPLES_MIN).delay_s == 0.01


def test_late_is_what_one_in_a_hundred_is() -> None:
    assert delay(*[0.01] * 62, 0.02, 0.05).delay_s == 0.05
    rare = [0.01] * (SAMPLES - 2) + [0.03, 0.05]
    assert delay(*rare).delay_s == 0.01  # fewer than one in a hundred


def test_a_worker_that_is_often_slow_does_not_hide_that_it_is() -> None:
    often = [0.01] * 48 + [0.4] * 16
    assert delay(*often).delay_s == pytest.approx(MEDIANS_MAX * 0.01)


@pytest.mark.parametrize(("took_s", "want_s"), [(0.0, DELAY_MIN_S), (10.0, DELAY_MAX_S)])
def test_the_delay_is_bounded(took_s: float, want_s: float) -> None:
    assert delay(*[took_s] * SAMPLES_MIN).delay_s == want_s


def test_old_samples_are_forgotten() -> None:
    made = delay(*[0.1] * SAMPLES)
    for _ in range(SAMPLES):
        made.note(0.01)
    assert made.delay_s == 0.01


def test_samples_are_looked_at_now_and_then() -> None:
    made = delay(*[0.01] * SAMPLES_MIN)
    for _ in range(LOOK_EVERY - 1):
        made.note(0.02)
    assert made.delay_s == 0.01
    made.note(0.02)
    assert made.delay_s == 0.02


@pytest.mark.parametrize("reads", [1000, 4000])
def test_no_more_than_the_share_of_the_reads_is_hedged(reads: int) -> None:
    budget, hedges = HedgeBudget(), 0
    for _ in range(reads):
        budget.earn()
        hedges += budget.spend()
    assert hedges == pytest.approx(reads * SHARE_MAX + 1, abs=1)


def test_hedges_that_nobody_needed_are_there_for_a_bad_moment_and_no_more() -> None:
    budget = HedgeBudget()
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == BURST_MAX
