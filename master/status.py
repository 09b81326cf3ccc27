"""The pool at one moment, for people and programs. Reads everything, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.replica import ExtentState
from kvstore.wire.messages.reads import GetStatus, SegmentStatus, Status, WorkerStatus

if TYPE_CHECKING:
    from master.core import Core
    from master.membership import Worker
    from master.segments import Segment
    from master.sessions import Caller


def get_status(core: Core, caller: Caller, _message: GetStatus) -> None:
    """Answer Status."""
    core.reply(caller, status(core))


def status(core: Core) -> Status:
    """Counts and sizes of everything."""
    trees = [known.tree for known in core.namespaces]
    return Status(
        core.tunables.cluster,
        core.epoch,
        core.now - core.started_s,
        sum(tree.pages for tree in trees),
        sum(tree.runs for tree in trees),
        len(trees),
        len(core.sessions),
        len(core.plans),
        tuple(_worker(core, worker) for worker in core.workers.values()),
        tuple(_segment(segment) for segment in core.segments.values()),
        dict(core.counters),
    )


def _worker(core: Core, worker: Worker) -> WorkerStatus:
    addresses = tuple(f"{address.transport}:{address.where}" for address in worker.addresses)
    heard_ago_s = core.now - worker.heard_s
    return WorkerStatus(worker.id, worker.host, worker.state.value, heard_ago_s, addresses)


def _segment(segment: Segment) -> SegmentStatus:
    allocator = segment.allocator
    return SegmentStatus(
        segment.id,
        segment.worker,
        segment.ref.tier,
        segment.geometry.payload_bytes,
        allocator.free_bytes,
        allocator.bytes_in[ExtentState.RESERVED],
        allocator.bytes_in[ExtentState.SEALED],
        allocator.bytes_in[ExtentState.RETIRED],
        allocator.bytes_in[ExtentState.QUARANTINED],
        segment.medium.value,
        segment.reason,
    )
