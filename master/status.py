"""The pool at one moment, for people and programs. Reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import TYPE_CHECKING

from kvstore.replica import ExtentState, Tier
from kvstore.standing import IN_DOUBT, Standing
from kvstore.wire.messages.reads import (
    GetStatus,
    PinTotals,
    ReplicaTotals,
    SegmentStatus,
    Status,
    StoredChunks,
    StripeTotals,
    TierStatus,
    WorkerStatus,
)
from master import heat, replica_counts, ticket_requests
from master.membership import state_name
from master.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.membership import Worker
    from master.pins import Pins
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
        tuple(_tiers(core)),
        dict(core.counters),
        _pins(core.pins),
        core.tunables.master,
        IN_DOUBT if core.is_in_doubt else Standing.LEADING.value,
        core.tunables.where,
        _stored(core),
        _stripes(core),
        _replicas(core),
        ticket_requests.totals(core),
    )


def _stored(core: Core) -> StoredChunks:
    saving = core.saving
    chunks = sum(map(len, saving.stored.values()))
    return StoredChunks(chunks, saving.dirty, saving.behind_s(core.now))


def _stripes(core: Core) -> StripeTotals:
    stripes = core.stripes
    lacks = stripes.lacks if core.erasure.policy.code is not None else ""
    return StripeTotals(len(stripes), stripes.parity_bytes, len(stripes.pending), lacks)


def _replicas(core: Core) -> ReplicaTotals:
    queue, census = core.replication.queue, core.replication.census
    counts = census.by_namespace.values()
    got = sum((count.got for count in counts), Counter[int]())
    ready, hot = queue.ready, heat.totals(core)
    return ReplicaTotals(
        replica_counts.column(got),
        sum(count.lacking for count in counts),
        sum(count.without_host for count in counts),
        sum(count.thinned for count in counts),
        core.now - census.counted_s if isfinite(census.counted_s) else -1.0,
        replica_counts.column(ready),
        len(queue) - ready.total(),
        hot.runs,
        hot.replicas,
    )


def _pins(pins: Pins) -> PinTotals:
    return PinTotals(len(pins), pins.pages, pins.soft_bytes, pins.hard_bytes.total())


def _tiers(core: Core) -> Iterator[TierStatus]:
    counters = core.counters
    segments = [s for s in core.segments.values() if s.state is not SegmentState.LOST]
    for tier in Tier:
        spaces = [segment.allocator for segment in segments if segment.tier is tier]
        if spaces:
            yield TierStatus(
                tier.value,
                len(spaces),
                sum(space.capacity_bytes for space in spaces),
                sum(space.used_bytes for space in spaces),
                sum(space.sealed for space in spaces),
                counters[f"hits_{tier}"],
                counters[f"copies_evicted_{tier}"],
                counters[f"moved_pages_{tier}"],
                counters[f"moved_bytes_{tier}"],
                counters[f"stored_bytes_{tier}"],
            )


def _worker(core: Core, worker: Worker) -> WorkerStatus:
    addresses = tuple(f"{address.transport}:{address.where}" for address in worker.addresses)
    heard_ago_s = core.now - worker.heard_s
    where = worker.rack, worker.zone
    return WorkerStatus(worker.id, worker.host, state_name(worker), heard_ago_s, addresses, *where)


def _segment(segment: Segment) -> SegmentStatus:
    allocator = segment.allocator
    return SegmentStatus(
        segment.id,
        segment.worker,
        segment.ref.tier,
        allocator.capacity_bytes,
        allocator.free_bytes,
        allocator.bytes_in[ExtentState.RESERVED],
        allocator.bytes_in[ExtentState.SEALED],
        allocator.bytes_in[ExtentState.RETIRED],
        allocator.bytes_in[ExtentState.QUARANTINED],
        segment.medium.value,
        segment.reason,
    )
