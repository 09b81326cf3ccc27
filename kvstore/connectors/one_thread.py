"""One thread that runs jobs one after another beside an engine's own; made when first needed."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class OneThread:
    """Jobs must not raise, and must end by themselves. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Start nothing yet: the engine may still fork."""
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._mutex = threading.Lock()

    def run(self, job: Callable[[], None]) -> bool:
        """Have it run after those before it; False once closed."""
        with self._mutex:  # a job that is put behind the end would never run
            if self._is_closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.put(job)
            return True

    def close(self, timeout_s: float) -> bool:
        """Run what was asked for, take no more; whether it was done in time. Safe to repeat."""
        with self._mutex:
            self._is_closed = True
            thread = self._thread
        if thread is None:
            return True
        self._jobs.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
