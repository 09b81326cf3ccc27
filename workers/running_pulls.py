"""The pulls that run in this process, so that any thread can end one by its number."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.disk_pull import DiskPull
    from workers.ingest import ExtentPull

    RunningPull = ExtentPull | DiskPull


class RunningPulls:
    """Thread-safe. A cancel may overtake the start that it is meant for."""

    def __init__(self) -> None:
        """None runs."""
        self._mutex = threading.Lock()
        self._pulls: dict[int, RunningPull] = {}
        self._cancelled: set[int] = set()

    def begin(self, number: int, pull: RunningPull) -> None:
        """A pull is about to run; it is cancelled at once if that was asked for already."""
        with self._mutex:
            self._pulls[number] = pull
            if number in self._cancelled:
                pull.cancel()

    def cancel(self, number: int) -> None:
        """End a pull soon. Its number stays noted until `end`."""
        with self._mutex:
            self._cancelled.add(number)
            pull = self._pulls.get(number)
            if pull is not None:
                pull.cancel()

    def end(self, number: int) -> None:
        """A pull is over, or never began."""
        with self._mutex:
            self._pulls.pop(number, None)
            self._cancelled.discard(number)

    def cancel_all(self) -> None:
        """End everything that runs: the worker is stopping."""
        with self._mutex:
            for pull in self._pulls.values():
                pull.cancel()
