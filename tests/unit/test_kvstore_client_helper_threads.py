"""Threads that run jobs one after the other: how many there are, and what a bad job costs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.client.helper_threads import HelperThreads

if TYPE_CHECKING:
    import pytest

PATIENCE_S = 60.0


class Bug(Exception):
    """What nobody expects."""


def run_one(threads: HelperThreads) -> bool:
    """Whether a job was taken, and done."""
    done = threading.Event()
    return threads.run(done.set) and done.wait(PATIENCE_S)


def test_a_job_that_raises_is_heard_and_takes_no_thread_away_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[object] = []
    raised = threading.Semaphore(0)

    def hear(told: threading.ExceptHookArgs) -> None:
        heard.append(told.exc_type)
        raised.release()

    def fail() -> None:
        raise Bug

    monkeypatch.setattr(threading, "excepthook", hear)
    threads = HelperThreads(1, "helper")
    for _ in range(3):
        assert threads.run(fail)
        assert raised.acquire(timeout=PATIENCE_S)
    assert run_one(threads)
    threads.close()
    assert heard == [Bug] * 3


def test_where_the_system_gives_no_thread_the_job_is_refused_and_the_next_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(self: threading.Thread) -> None:
        del self
        raise RuntimeError("can't start new thread")

    threads = HelperThreads(1, "helper")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert not run_one(threads)
    assert run_one(threads)
    threads.close()
