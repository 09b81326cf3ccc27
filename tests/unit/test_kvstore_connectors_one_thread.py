"""One thread beside the engine's: jobs in order, none after the end, no thread before the first."""

from __future__ import annotations

import threading
from functools import partial

from kvstore.connectors.one_thread import OneThread

LONG_S = 30.0


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


def test_a_job_that_does_not_end_does_not_hold_up_the_end() -> None:
    thread, let_go = OneThread("test"), threading.Event()
    thread.run(lambda: _wait(let_go))
    assert not thread.close(0.01)
    let_go.set()


def _wait(event: threading.Event) -> None:
    event.wait(LONG_S)
