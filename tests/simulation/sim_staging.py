"""Pages of a simulated worker's disks, staged in memory: the worker's own code, in virtual time.

A load is one step here, and asked for without waiting; what readers meet is the reuse of slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from kvstore.wire.messages.hello import Done
from tests.simulation.disk import DiskStore
from tests.simulation.store import EXCLUSIVE
from workers.staging import Staging

if TYPE_CHECKING:
    from kvstore.wire.messages.transfers import ReleaseStaged, StageExtents
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.tasks import Steps
    from workers.events import ExtentGroup, Stretch
    from workers.tiers.dram import DramSegment


class _Locks:
    """The owner's side of the locks of a simulated segment (see `workers.locks`)."""

    def __init__(self, owner: str, memory: SegmentMemory) -> None:
        self._owner = owner
        self._memory = memory

    def try_lock(self, stretch: Stretch, size_class: int) -> bytes:
        """Lock the stretch, which is one extent."""
        return bytes((self._memory.try_exclusive(self._owner, stretch.offset, size_class),))

    def unlock(self, stretch: Stretch, size_class: int) -> None:
        """Give it back to readers."""
        self._memory.unlock(EXCLUSIVE, self._owner, stretch.offset, size_class)


class _Segment:
    """A simulated segment as the staging code uses one."""

    def __init__(self, owner: str, memory: SegmentMemory) -> None:
        self.id = memory.segment
        self.incarnation = memory.incarnation
        self.geometry = memory.geometry
        self.records = memory.records
        self.payload = memory.payload
        self.locks = _Locks(owner, memory)


class SimStaging:
    """The staging segment of one life of a worker."""

    def __init__(self, worker: SimWorker, memory: SegmentMemory) -> None:
        """Begin with nothing staged."""
        assert worker.core is not None
        memory.begin_empty()
        disks = {name: m for name, m in worker.memories.items() if isinstance(m, DiskStore)}
        self._worker = worker
        self._staging = Staging(
            cast("DramSegment", _Segment(worker.name, memory)), disks,
            worker.core.holdings.segments, worker.world,
        )  # fmt: skip

    def stage(
        self, endpoint: Endpoint, number: int, session: int, message: StageExtents
    ) -> Steps[None]:
        """Answer with what there is room for."""
        yield self._worker.copy_delay_s()
        staged = self._staging.stage(session, replace(message, timeout_s=0.0))
        self._worker.world.counts["pages staged"] += staged.outcomes.count(0)
        yield self._worker.copy_delay_s()
        endpoint.answer(number, staged)

    def release(
        self, endpoint: Endpoint, number: int, session: int, message: ReleaseStaged
    ) -> None:
        """A reader is done with these slots."""
        self._staging.release(session, message)
        endpoint.answer(number, Done())

    def doubt(self, extents: ExtentGroup) -> None:
        """A reader could not verify one of these."""
        self._staging.doubt(extents)

    def forget(self, session: int) -> None:
        """A reader is gone."""
        self._staging.forget(session)
