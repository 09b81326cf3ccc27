"""Looks at the disks now and then, so that the leader hears when one does less.

Owns what was told last. A disk that does not answer holds up the thread of these looks, and nobody
else. What an error means for a segment is `workers.tiers.guarded_file`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.events import MediumChanged
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future

    from workers.tiers.nvme import NvmeSegment


class DiskWatch:
    """Looks while nothing else asks a disk for durable records."""

    def __init__(
        self,
        segments: Sequence[NvmeSegment],
        executor: Executor,
        tell: Callable[[MediumChanged], None],
    ) -> None:
        """`tell` hears of each change once, in a thread of `executor`."""
        self._told = {segment.id: ServiceState.SERVING for segment in segments}
        self._segments = segments
        self._executor = executor
        self._tell = tell
        self._pending: Future[None] | None = None

    def look_soon(self) -> None:
        """Have the disks looked at, unless that is about to be done. For one thread."""
        if self._segments and (self._pending is None or self._pending.done()):
            self._pending = self._executor.submit(self._look)

    def _look(self) -> None:
        for segment in self._segments:
            segment.check_name()
            service, reason = segment.service, segment.reason
            if service is not self._told[segment.id]:
                self._told[segment.id] = service
                self._tell(MediumChanged(segment.id, service, reason))
