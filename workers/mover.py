"""Pulls that the leader asks for: pages copied from one segment of this worker to another.

Owns the few threads that carry them out, so that neither clients' threads nor the control link ever
wait for a move, and moves take no more of the machine than these threads. Decides nothing.
"""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.wire.messages.puts import ExtentSource
from workers.disk_pull import DiskSource
from workers.extent_sources import HbmSource, MemorySource
from workers.tiers.hbm import HbmSegment
from workers.tiers.nvme import NvmeSegment

if TYPE_CHECKING:
    from workers.events import StartPull
    from workers.ingest import Source
    from workers.service import Service


class Mover:
    """Carries moves out, `threads` at a time, in the order in which they were begun."""

    def __init__(self, service: Service, threads: int) -> None:
        """Threads start as they are needed."""
        self._service = service
        self._threads = ThreadPoolExecutor(threads, "worker-mover")
        self._closing = threading.Event()

    def begin(self, start: StartPull) -> None:
        """Carry a move out soon. For any thread; waits for nothing."""
        self._threads.submit(self._run, start)

    def close(self) -> None:
        """End what runs; what has not begun never does."""
        self._closing.set()
        self._service.pulls.cancel_all()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, start: StartPull) -> None:
        if self._closing.is_set():
            self._service.pulls.cancel(start.pull)
        self._service.dispatch(self._service.carry_out(start, self._source(start)))

    def _source(self, start: StartPull) -> Source:
        source = start.message.source
        assert isinstance(source, ExtentSource), "the state machine lets no other through"
        segment = self._service.segments[source.segment]
        if isinstance(segment, NvmeSegment):
            return DiskSource(segment, start)
        if isinstance(segment, HbmSegment):
            return HbmSource(segment, start)
        return MemorySource(segment, array("Q", source.offsets))
