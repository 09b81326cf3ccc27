"""Looks at the disks now and then, so that the leader hears when one does less.

Owns what was told last. A disk that does not answer holds up the thread of its own looks, and
nobody else. What an error means for a segment is `workers.tiers.guarded_file`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.events import MediumChanged
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from workers.guarded_threads import GuardedThreads
    from workers.tiers.nvme import NvmeSegment


class DiskWatch:
    """Looks at each disk while nothing else asks it for durable records."""

    def __init__(
        self,
        threads: Mapping[NvmeSegment, GuardedThreads],
        tell: Callable[[MediumChanged], None],
    ) -> None:
        """`tell` hears of each change once, in the disk's thread."""
        self._told = dict.fromkeys(threads, ServiceState.SERVING)
        self._threads = threads
        self._tell = tell
        self._pending: dict[NvmeSegment, Future[None]] = {}

    def look_soon(self) -> None:
        """Have each disk looked at, unless that is about to be done. For one thread."""
        for segment, thread in self._threads.items():
            pending = self._pending.get(segment)
            if pending is None or pending.done():
                self._pending[segment] = thread.begin(self._look, segment)

    def _look(self, segment: NvmeSegment) -> None:
        segment.check_name()
        service, reason = segment.service, segment.reason
        if service is not self._told[segment]:
            self._told[segment] = service
            self._tell(MediumChanged(segment.id, service, reason))
