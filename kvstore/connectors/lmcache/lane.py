"""Tasks of one kind beside those who ask for them: run in turn, and told of by a descriptor.

Owns the descriptor and the results that nobody has taken yet. Whoever polls the descriptor learns
that some task has ended, and then asks for its result, once.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvstore.connectors.one_thread import OneThread

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG: Final = logging.getLogger("kvharbor")
T = TypeVar("T")


class Lane(Generic[T]):
    """One thread's tasks. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Open the descriptor; the thread starts with the first task."""
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._name = name
        self._thread = OneThread(name)
        self._mutex = threading.Lock()
        self._given = 0
        self._results: dict[int, T] = {}
        self._is_closed = False

    def submit(self, work: Callable[[], T], otherwise: T) -> int:
        """Have it done; the task's number. `otherwise` is its result where the work raises."""
        with self._mutex:
            number = self._given
            self._given += 1
        if not self._thread.run(lambda: self._carry_out(number, work, otherwise)):
            self._tell(number, otherwise)
        return number

    def take(self, number: int) -> T | None:
        """The result of a task that has ended; None before, and afterwards."""
        with self._mutex:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All results that were not taken."""
        with self._mutex:
            results, self._results = self._results, {}
            return results

    def close(self, timeout_s: float) -> None:
        """End what was asked for, as far as there is time; then close the descriptor.

        Safe to repeat. What ends later is told to nobody.
        """
        if not self._thread.close(timeout_s):
            _LOG.warning("kvharbor: %s did not end within %s s", self._name, timeout_s)
        with self._mutex:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                os.close(self.descriptor)

    def _carry_out(self, number: int, work: Callable[[], T], otherwise: T) -> None:
        try:
            result = work()
        except Exception:  # V5: a fault of ours must not end the thread
            _LOG.exception("kvharbor: %s", self._name)
            result = otherwise
        self._tell(number, result)

    def _tell(self, number: int, result: T) -> None:
        with self._mutex:
            if not self._is_closed:
                self._results[number] = result
                os.eventfd_write(self.descriptor, 1)
