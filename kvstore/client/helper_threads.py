"""A few threads that run one job after the other; made when needed, gone when the store closes."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class HelperThreads:
    """At most so many threads. Jobs must end by themselves.

    One that raises, which is a bug, ends its thread; the next job gets another.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        """Start none yet."""
        self._threads_max = threads_max
        self._name = name
        self._closed = False
        self.start_anew()

    def start_anew(self) -> None:
        """At the start, and in a forked child, which has none of its parent's threads."""
        self._mutex = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def run(self, job: Callable[[], None]) -> bool:
        """Have a thread run it now; False where none can be had, or the store is closed."""
        with self._mutex:
            if self._closed:
                return False
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # how Python says that the system gives no more threads
                    return False
                self._threads.append(thread)
            else:
                return False
            self._jobs.put(job)
            return True

    def close(self) -> None:
        """End the threads, each after its job. Safe to repeat."""
        with self._mutex:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                with self._mutex:
                    if not self._closed:
                        self._threads.remove(threading.current_thread())
                raise
            with self._mutex:
                self._idle += 1
