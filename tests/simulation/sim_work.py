"""A simulated worker at work on its extents: frees, removals, checks and the scrubber's looks.

Does what the threads of `workers.service` do about these actions, each as steps in virtual time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from kvstore.wire.messages.common import Outcome
from tests.simulation.disk import DiskStore
from tests.simulation.memory import SegmentMemory
from workers import events
from workers.verification import verify, verify_on_disk

if TYPE_CHECKING:
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.store import SegmentStore
    from tests.simulation.tasks import Steps
    from workers.events import Stretch
    from workers.tiers.nvme import NvmeSegment

    Work = events.WriteFree | events.WriteRemoved | events.VerifyPayloads


def work(worker: SimWorker, action: Work) -> Steps[None]:
    """Carry one out, and tell the worker's core."""
    extents = action.extents
    memory, size_class = worker.memories[extents.segment], extents.size_class
    outcomes = bytearray()
    yield worker.copy_delay_s()
    for stretch in extents.stretches:
        places = range(stretch.offset, stretch.offset + stretch.count * size_class, size_class)
        if isinstance(memory, DiskStore):
            outcomes += _on_disk(worker, action, memory, stretch)
            continue
        assert isinstance(memory, SegmentMemory), memory
        match action:
            case events.WriteFree():
                memory.records.write_free(stretch, size_class)
                outcomes += bytes(_is_held(worker, memory, at, size_class) for at in places)
            case events.WriteRemoved():
                memory.records.write_removed(stretch, size_class)
                outcomes += bytes(stretch.count)
            case events.VerifyPayloads():
                outcomes += bytes(_verified(memory, at, size_class) for at in places)
    yield worker.copy_delay_s()
    worker.feed(events.WorkEnded(action.work, bytes(outcomes)))


def scrub(worker: SimWorker, action: events.ScrubExtents) -> Steps[None]:
    """Look at one extent after the other, while anything may happen to them."""
    extents, outcomes = action.extents, bytearray()
    memory, size_class = worker.memories[extents.segment], extents.size_class
    for stretch in extents.stretches:
        for i in range(stretch.count):
            yield worker.copy_delay_s()
            outcomes.append(_verified(memory, stretch.offset + i * size_class, size_class))
    yield worker.copy_delay_s()
    worker.world.counts["pages scrubbed"] += len(outcomes)
    worker.feed(events.Scrubbed(action.look, bytes(outcomes)))


def _verified(memory: SegmentStore, offset: int, size_class: int) -> Outcome:
    if isinstance(memory, DiskStore):
        return verify_on_disk(cast("NvmeSegment", memory), offset, size_class)
    assert isinstance(memory, SegmentMemory), memory
    return verify(memory, offset, size_class)


def _on_disk(worker: SimWorker, action: Work, store: DiskStore, stretch: Stretch) -> bytes:
    """The same on a disk, where records are changed durably and nobody holds a lock."""
    size_class = action.extents.size_class
    if isinstance(action, events.VerifyPayloads):
        assert worker.staging is not None
        worker.staging.doubt(action.extents)
        places = (stretch.offset + i * size_class for i in range(stretch.count))
        return bytes(_verified(store, at, size_class) for at in places)
    write = store.records.write_removed
    if isinstance(action, events.WriteFree):
        write = store.records.write_free
    outcome = store.change(partial(write, stretch, size_class))
    return bytes((outcome,)) * stretch.count


def _is_held(worker: SimWorker, memory: SegmentMemory, offset: int, size_class: int) -> Outcome:
    held = memory.is_read_in_place(offset, size_class)
    if held:
        worker.world.counts["held by a reader"] += 1
    return Outcome.BUSY if held else Outcome.OK
