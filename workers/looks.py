"""What a worker says of itself at one moment, read off its parts while they work.

Counts may be of moments a little apart. What they are called elsewhere is `workers.metrics`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.record import RecordState
from workers.metrics import DiskLook, Look, ScrubLook, SegmentLook, StagingLook
from workers.tiers.nvme import NvmeSegment

if TYPE_CHECKING:
    from workers.listeners import Listeners
    from workers.service import Service
    from workers.staging import Staging
    from workers.tiers.tier import Segment


def look(service: Service, listeners: Listeners, cluster: str, worker: str) -> Look:
    """What the worker says of itself over HTTP."""
    state, counts = service.state, service.counts
    return Look(
        worker=worker,
        cluster=cluster,
        epoch=state.epoch,
        serving=state.is_serving,
        fenced=state.is_fenced(service.clock.now_s()),
        sessions=listeners.sessions,
        pulls_running=len(state.pulls.running),
        requests_waiting=len(state.pulls.waiting),
        held_extents=len(state.holdings.held),
        seals_unreported=len(state.pulls.unreported),
        bytes_pulled=counts.bytes_pulled,
        bytes_sent=counts.bytes_sent,
        pages_pulled=dict(counts.pages),
        moves=dict(counts.moves),
        copies=dict(counts.copies),
        bytes_copied_in=dict(counts.bytes_copied_in),
        bytes_copied_out=counts.bytes_copied_out,
        segments=tuple(_segment_look(service, segment) for segment in service.segments.values()),
        staging=None if service.staging is None else _staging_look(service.staging),
    )


def _segment_look(service: Service, segment: Segment) -> SegmentLook:
    chunks = list(service.state.holdings.segments[segment.id].chunks.values())
    by_state = {state: sum(chunk.states.count(state) for chunk in chunks) for state in RecordState}
    return SegmentLook(
        segment=segment.id,
        tier=segment.tier,
        incarnation=segment.incarnation,
        capacity_bytes=segment.geometry.payload_bytes,
        reserved=by_state[RecordState.RESERVED],
        sealed=by_state[RecordState.SEALED],
        removed=by_state[RecordState.REMOVED],
        scrub=_scrub_look(service, segment.id),
        disk=_disk_look(segment) if isinstance(segment, NvmeSegment) else None,
    )


def _scrub_look(service: Service, segment: str) -> ScrubLook:
    found = service.state.rounds.by_segment[segment]
    unverified_s = found.unverified_s(service.clock.now_s())
    return ScrubLook(found.ended, found.extents, found.bytes, found.damaged, unverified_s)


def _disk_look(segment: NvmeSegment) -> DiskLook:
    counts = segment.counts
    return DiskLook(
        segment.service, segment.reason, segment.is_direct, segment.errors, counts.parts_written,
        counts.bytes_written, counts.payload_bytes_written, counts.parts_read, counts.bytes_read,
        dict(counts.misses),
    )  # fmt: skip


def _staging_look(staging: Staging) -> StagingLook:
    counts, capacity = staging.counts, staging.segment.geometry.payload_bytes
    return StagingLook(capacity, counts.loaded, counts.found, counts.busy, counts.failed)
