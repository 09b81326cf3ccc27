"""The threads that wait for a disk: how many at once, in whose turn, and what a failure leaves."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import OutOfSpace
from workers.tiers.disk import BLOCK_BYTES
from workers.tiers.io_threads import IoThreads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.tiers.io_threads import Job

THREADS = 2
WAIT_S = 20.0


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    made = IoThreads(THREADS, "disk-of-a-test")
    yield made
    made.close()


def test_all_jobs_are_done_when_the_call_returns(threads: IoThreads) -> None:
    done: list[int] = []
    threads.run(partial(done.append, i) for i in range(50))
    assert sorted(done) == list(range(50))
    threads.run([])


def test_no_more_run_at_once_than_there_are_threads(threads: IoThreads) -> None:
    both, running, most = threading.Barrier(THREADS), set[int](), list[int]()

    def job() -> None:
        running.add(threading.get_ident())
        most.append(len(running))
        both.wait(WAIT_S)
        running.discard(threading.get_ident())
        both.wait(WAIT_S)

    threads.run([job] * 4 * THREADS)
    assert max(most) == THREADS


def test_a_failure_ends_the_call_when_nothing_of_it_runs_any_more(threads: IoThreads) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def slow() -> None:
        begun.set()
        goes_on.wait(WAIT_S)
        ended.append("slow")

    def failing() -> None:
        begun.wait(WAIT_S)
        goes_on.set()
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        threads.run([slow, failing, *[lambda: ended.append("later")] * 50])
    assert "slow" in ended
    assert len(ended) < 50


def test_jobs_are_asked_for_in_the_calling_thread_while_others_run(threads: IoThreads) -> None:
    asked, askers, came = threading.Event(), list[int](), list[bool]()

    def jobs() -> Iterator[Job]:
        askers.append(threading.get_ident())
        yield lambda: came.append(asked.wait(WAIT_S))
        askers.append(threading.get_ident())
        asked.set()

    threads.run(jobs())
    assert askers == [threading.get_ident()] * 2
    assert came == [True]


def test_a_failure_between_jobs_ends_the_call_when_none_runs_any_more(threads: IoThreads) -> None:
    goes_on, ended = threading.Event(), list[bool]()

    def jobs() -> Iterator[Job]:
        yield lambda: ended.append(goes_on.wait(WAIT_S))
        goes_on.set()
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        threads.run(jobs())
    assert ended == [True]


def test_a_short_call_does_not_wait_for_all_of_a_long_one(threads: IoThreads) -> None:
    begun, short_is_done = threading.Event(), threading.Event()
    done: list[str] = []

    def long_job() -> None:
        begun.set()
        done.append("long")

    def last_job() -> None:
        assert short_is_done.wait(WAIT_S)

    caller = threading.Thread(target=threads.run, args=([*[long_job] * 20, last_job],))
    caller.start()
    begun.wait(WAIT_S)
    threads.run([lambda: done.append("short")])
    short_is_done.set()
    caller.join(WAIT_S)
    assert done.count("long") == 20
    assert "short" in done


def test_aligned_memory_is_a_threads_own(threads: IoThreads) -> None:
    mine = threads.aligned(100)
    assert len(mine) == 100
    assert threads.aligned(BLOCK_BYTES).obj is mine.obj
    assert len(threads.aligned(BLOCK_BYTES + 1)) == BLOCK_BYTES + 1
    others: list[object] = []
    threads.run([lambda: others.append(threads.aligned(100).obj)])
    assert others[0] is not threads.aligned(100).obj


def test_memory_that_is_not_to_be_had_is_out_of_space(threads: IoThreads) -> None:
    with pytest.raises(OutOfSpace, match="no memory for"):
        threads.aligned(1 << 60)
