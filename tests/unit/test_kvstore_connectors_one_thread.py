"""One thread beside the engine's: jobs in order, none after the end, no thread before the first."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.connectors.one_thread import OneThread

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 30.0
ROUNDS = 600
ASKERS = 2


def test_jobs_run_in_order_and_closing_waits_for_them() -> None:
    thread = OneThread("test")
    done: list[int] = []
    for number in range(3):
        assert thread.run(partial(done.append, number))
    assert thread.close(LONG_S)
    assert done == [0, 1, 2]
    assert not thread.run(lambda: done.append(3))
    assert thread.close(LONG_S)


def test_there_is_no_thread_before_the_first_job() -> None:
    before = threading.active_count()
    thread = OneThread("test")
    assert threading.active_count() == before
    assert thread.close(LONG_S)


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
def test_what_was_taken_is_run_whoever_asks_and_closes_at_that_moment() -> None:
    """A job that came behind the end was promised and never run: whoever waited for it hung."""
    for _ in range(ROUNDS):
        thread, begin = OneThread("test"), threading.Barrier(ASKERS + 1)
        taken: list[bool] = []
        ran: list[int] = []
        ask = partial(_ask, thread, begin, taken, ran)
        askers = [threading.Thread(target=ask) for _ in range(ASKERS)]
        for asker in askers:
            asker.start()
        begin.wait(LONG_S)
        assert thread.close(LONG_S)
        for asker in askers:
            asker.join(LONG_S)
        assert (len(ran), len(set(ran)) <= 1) == (len(taken), True), "one thread, and all jobs"


def _ask(thread: OneThread, begin: threading.Barrier, taken: list[bool], ran: list[int]) -> None:
    """Until it is closed."""
    begin.wait(LONG_S)
    while thread.run(lambda: ran.append(threading.get_ident())):
        taken.append(True)


def test_a_job_that_does_not_end_does_not_hold_up_the_end_and_each_close_says_so() -> None:
    thread, let_go = OneThread("test"), threading.Event()
    thread.run(lambda: _wait(let_go))
    assert not thread.close(0)
    assert not thread.close(0)
    let_go.set()
    assert thread.close(LONG_S)


def _wait(event: threading.Event) -> None:
    event.wait(LONG_S)
