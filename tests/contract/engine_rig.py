"""A worker's whole shell, as in worker_rig, with a device and transfer engines. Not a test."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.transfer.mooncake_process import EngineSettings
from tests.contract.scripted_leader import Leader
from tests.contract.worker_rig import Rig
from tests.unit.worker_segments import memory_folder
from workers.engine_child import EngineChild, EngineSegment
from workers.engine_source import EngineDesk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.clock import Clock
    from kvstore.transfer.device import Device


class EngineRig(Rig):
    """One worker of one life that offers the transport `mooncake`."""

    engine: EngineChild

    def engine_desk(self, clock: Clock) -> EngineDesk:
        """Engines for the memory and the device."""
        memory = self.segment
        served = [EngineSegment(memory.id, memory.ownership, memory.geometry)]
        self.engine = EngineChild(EngineSettings(), served, [self.hbm])
        return EngineDesk(self.engine, [memory, self.hbm], clock)

    def stop(self) -> None:
        """End the engines before the memory that they serve."""
        self.engine.close()
        super().stop()


@contextmanager
def engine_pool(device: Device) -> Iterator[EngineRig]:
    """A leader and a worker that serves, in a folder of their own."""
    with memory_folder() as folder:
        leader = Leader()
        try:
            rig = EngineRig(folder, leader, device=device)
            try:
                leader.await_served()
                yield rig
            finally:
                rig.stop()
        finally:
            leader.stop()
