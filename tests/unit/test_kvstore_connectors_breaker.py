"""The circuit breaker: one failure opens it, one try closes it, and nothing else does."""

from __future__ import annotations

import itertools

from kvstore.connectors.breaker import (
    LATE_MAX,
    NEXT,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    Breaker,
    Circuit,
    Happening,
)

UNASKED = {(Circuit.CLOSED, Happening.DUE), (Circuit.TRYING, Happening.DUE)}


def test_the_table_covers_what_can_happen() -> None:
    assert set(itertools.product(Circuit, Happening)) - set(NEXT) == UNASKED


def test_one_failure_stops_calls_until_the_pause_has_passed() -> None:
    breaker = Breaker()
    assert breaker.lets_through(0.0)
    breaker.failed(0.0)
    assert not breaker.lets_through(PAUSE_MIN_S - 0.01)
    assert breaker.lets_through(PAUSE_MIN_S)


def test_one_call_tries_and_the_others_wait_for_what_becomes_of_it() -> None:
    breaker = Breaker()
    breaker.failed(0.0)
    assert breaker.lets_through(PAUSE_MIN_S)
    assert not breaker.lets_through(PAUSE_MIN_S)
    breaker.succeeded(PAUSE_MIN_S)
    assert breaker.is_closed()


def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_success() -> None:
    breaker, now_s, pauses = Breaker(), 0.0, []
    breaker.failed(now_s)
    for _ in range(7):
        begun_s = now_s
        while not breaker.lets_through(now_s):
            now_s += PAUSE_MIN_S
        pauses.append(now_s - begun_s)
        breaker.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_MAX_S, PAUSE_MAX_S]
    now_s += PAUSE_MAX_S
    assert breaker.lets_through(now_s)
    breaker.succeeded(now_s)
    breaker.failed(now_s)
    assert breaker.lets_through(now_s + PAUSE_MIN_S)


def test_a_call_from_before_does_not_close_it() -> None:
    breaker = Breaker()
    breaker.failed(0.0)
    breaker.succeeded(0.1)
    assert not breaker.lets_through(0.2)


def test_several_failures_of_calls_under_way_are_one_opening() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.opened == 1
    assert breaker.lets_through(PAUSE_MIN_S)


def test_late_answers_in_a_row_count_as_a_failure() -> None:
    breaker = Breaker()
    for _ in range(LATE_MAX - 1):
        breaker.late(0.0)
    breaker.in_time(0.0)
    for _ in range(LATE_MAX - 1):
        breaker.late(0.0)
        breaker.succeeded(0.0)  # nobody waited for it
    assert breaker.is_closed()
    breaker.late(0.0)
    assert not breaker.is_closed()
