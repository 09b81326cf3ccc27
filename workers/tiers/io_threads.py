"""The few threads that wait for a disk, each with block-aligned memory of its own.

Owns the bound on what a disk is asked at once: callers wait for a thread, and nothing else waits
for them. Must not know what is read or written.
"""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

from kvstore.errors import OutOfSpace
from workers.tiers.disk import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    Job = Callable[[], None]

AHEAD: Final = 2
"""Jobs of one caller that are given out, for each thread: one runs, one is ready."""


class IoThreads:
    """Runs jobs of any number of callers, `threads` at a time, callers in turns."""

    def __init__(self, threads: int, name: str) -> None:
        """Threads start as they are needed."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._given_max = AHEAD * threads
        self._local = threading.local()

    def run(self, jobs: Iterable[Job]) -> None:
        """Carry all jobs out; when this returns or raises, none of them runs any more.

        Each job is asked of `jobs` in the calling thread, while earlier ones run. The first
        exception of either is raised, and later jobs are not begun.
        """
        running: set[Future[None]] = set()
        try:
            for job in jobs:
                running.add(self._executor.submit(job))
                if len(running) == self._given_max:
                    running = _left(running)
            while running:
                running = _left(running)
        finally:
            wait(running)

    def aligned(self, size_bytes: int) -> memoryview:
        """Block-aligned memory of the calling thread, the same again at its next call.

        OutOfSpace where the system has no memory for it.
        """
        held: mmap.mmap | None = getattr(self._local, "memory", None)
        if held is None or len(held) < size_bytes:
            blocks = -(-size_bytes // BLOCK_BYTES)
            try:
                held = self._local.memory = mmap.mmap(-1, blocks * BLOCK_BYTES)
            except OSError as error:
                raise OutOfSpace(f"no memory for {size_bytes} bytes to bounce through") from error
        return memoryview(held)[:size_bytes]

    def close(self) -> None:
        """Wait for what runs, and end the threads."""
        self._executor.shutdown()


def _left(running: set[Future[None]]) -> set[Future[None]]:
    """Those that still run when the next has ended; raises what that has raised."""
    done, left = wait(running, return_when=FIRST_COMPLETED)
    for each in done:
        each.result()
    return left
