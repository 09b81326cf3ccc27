"""What a work raises is heard: nobody waits for its result."""

from __future__ import annotations

import threading

from workers.guarded_threads import GuardedThreads


def test_a_bug_is_heard_and_other_works_go_on() -> None:
    heard: list[BaseException] = []
    threads = GuardedThreads(1, "guarded", heard.append)
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise IndexError(number)
        done.append(number)

    for number in range(3):
        threads.begin(work, number)
    threads.close()
    assert [(type(each), each.args) for each in heard] == [(IndexError, (1,))]
    assert done == [0, 2]


def test_what_never_begins_is_no_bug() -> None:
    heard: list[BaseException] = []
    threads = GuardedThreads(1, "guarded", heard.append)
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    threads.begin(work)
    never = threads.begin(work)
    assert begun.wait(60)
    never.cancel()
    gate.set()
    threads.close()
    assert never.cancelled()
    assert heard == []
