"""Threads for work that handles whatever it meets: what it raises all the same is a bug of ours.

A bug that ends one thread, or one task, leaves a worker that looks alive and does not do its work.
So it ends the process, as one in the master does: what was sealed is adopted again at the start.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


class GuardedThreads:
    """A few threads whose results nobody waits for, and whose exceptions somebody hears."""

    def __init__(self, threads: int, name: str, broken: Callable[[BaseException], None]) -> None:
        """`broken` is told what a work raised, in its thread. Threads start as they are needed."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._broken = broken

    def begin(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Have a work done soon. For any thread; waits for nothing."""
        future = self._executor.submit(work, *arguments)
        future.add_done_callback(self._look)
        return future

    def close(self, *, cancel: bool = False) -> None:
        """Wait for what was begun; with `cancel`, what has not started by now never does."""
        self._executor.shutdown(cancel_futures=cancel)

    def _look(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._broken(error)
