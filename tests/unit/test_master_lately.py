"""How fast something went lately."""

from __future__ import annotations

import pytest

from master.lately import WINDOW_S, Lately


def test_nothing_is_no_speed() -> None:
    assert Lately().bytes_per_s(10.0) == 0.0


def test_at_first_it_is_the_mean_since_the_beginning() -> None:
    lately = Lately()
    lately.add(600, 100.0)
    assert lately.bytes_per_s(100.0) == 600.0
    lately.add(600, 102.0)
    assert lately.bytes_per_s(103.0) == 400.0


def test_then_it_is_that_of_the_last_windows() -> None:
    lately = Lately()
    for tenth in range(1000):
        lately.add(10 if tenth < 500 else 80, tenth / 10)
    assert lately.bytes_per_s(100.0) == pytest.approx(800.0, rel=0.02)


def test_it_changes_little_where_one_window_ends_and_another_begins() -> None:
    lately = Lately()
    for tenth in range(300):
        lately.add(10, tenth / 10)
        if tenth > 10:
            assert lately.bytes_per_s(tenth / 10) == pytest.approx(100.0, rel=0.1)


def test_what_stands_still_falls_to_nothing() -> None:
    lately = Lately()
    for second in range(20):
        lately.add(100, float(second))
    assert lately.bytes_per_s(20.0 + 100 * WINDOW_S) < 1.0


def test_a_window_that_begins_with_nothing_does_not_hide_the_one_before() -> None:
    lately = Lately()
    lately.add(500, 0.0)
    lately.add(0, WINDOW_S)
    assert lately.bytes_per_s(WINDOW_S) == 100.0
