"""Comparing a worker's records with what this master believes; then the segment may serve.

By digest a chunk, row by row only where digests differ. In a segment that has not been registered
since this master began, all is FREE, and the values that earlier masters stored of its chunks stand
beside it; where a lost segment was cleaned, those of what it held do. A chunk there:

| worker lists, store says | nothing             | another digest or class    | the same digest |
|--------------------------|---------------------|----------------------------|-----------------|
| no such chunk            | -                   | value is deleted           | value deleted   |
| a chunk                  | rows are asked for; | rows are asked for; those  | value is taken  |
|                          | they live anew      | of a stored generation go  | in as it is     |
|                          |                     | on with their stored lives |                 |

So nothing that no worker confirms is ever served. What then happens to an extent that is listed, or
known here:

| worker says, master says | FREE      | RESERVED       | SEALED     | RETIRED | QUARANTINED |
|--------------------------|-----------|----------------|------------|---------|-------------|
| nothing                  | -         | stays open (1) | lost       | FREE    | fence       |
| RESERVED                 | fence     | stays open (1) | lost, free | free    | fence       |
| SEALED, same generation  | adopt (2) | sealed (3)     | stays      | free    | fence       |
| SEALED, other generation | adopt (2) | plan fails     | lost, free | free    | fence       |
| REMOVED                  | fence     | plan fails     | lost, free | free    | fence       |

(1) Unless the incarnation is a new one: the pull died with the old one, so the plan fails.
(2) Proven by the record and fitting the namespace's layout, not covered by a tombstone (I29), and
    the tree has no copy of this part in this segment; otherwise it is fenced as QUARANTINED.
(3) The report was lost; the record is as good as the report.
"fence" and "free" are orders, given once the segment is live, for the higher of both generations,
and never before leases that another master or registration granted have ended (I9).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import AccessDenied, BadValue, CorruptPage, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.record import RECORD_BYTES, Record, RecordState, unpack_record
from kvstore.replica import ExtentEvent, ExtentState
from kvstore.segment import size_class_of
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    ChunkDigest,
    InventoryEnd,
    InventoryRows,
    InventoryWanted,
    OfferInventory,
)
from master.adoption import adopt, adopt_value
from master.chunks import Span
from master.extent_allocator import FREE
from master.losses import drop_copy, note_dropped
from master.orders import OrderKind
from master.packed import split_keys, word
from master.placing import segments_changed
from master.puts import fail_pages, seal_pages
from master.segments import Segment, SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.chunks import Chunk
    from master.core import Core
    from master.sessions import Caller

SLOTS_PER_STEP: Final = 256


class SealedSlots(Enum):
    """What a chunk's digest says of the slots that are SEALED here."""

    ARE_PROVEN = auto()
    ARE_GONE = auto()


class Comparison(msgspec.Struct, eq=False):
    """An inventory under way; it belongs to one registration of the segment."""

    registration: int
    wanted: dict[int, None] | None = None
    """Chunk starts whose rows are still to come; None until the offer has been compared."""


def offer_inventory(core: Core, caller: Caller, message: OfferInventory) -> None:
    """Compare digests; answer InventoryWanted: the chunks whose rows are needed."""
    segment = _joining(core, caller, message.segment, message.incarnation)
    listed = {chunk.chunk_start: chunk for chunk in message.chunks}
    if len(listed) != len(message.chunks) or len(listed) > segment.geometry.frames:
        raise BadValue("chunks", len(message.chunks), "each once")
    core.comparisons[segment.id] = Comparison(segment.registration)
    core.start(_while_registered(segment, _compare_digests(core, caller, segment, listed)))


def _compare_digests(
    core: Core, caller: Caller, segment: Segment, listed: dict[int, ChunkDigest]
) -> Iterator[None]:
    """A job: settle what the digests prove, ask for the rest."""
    comparison = core.comparisons[segment.id]
    for chunk in list(segment.allocator.chunk_list):
        theirs = listed.get(chunk.start)
        if theirs is None or theirs.size_class != chunk.size_class:
            yield from _settle_unlisted(core, segment, chunk, SealedSlots.ARE_GONE)
        elif theirs.digest == chunk.sealed_digest():
            del listed[chunk.start]
            yield from _settle_unlisted(core, segment, chunk, SealedSlots.ARE_PROVEN)
        yield
    for start in sorted(listed):
        yield from _adopt_stored(core, segment, listed, start)
    comparison.wanted = dict.fromkeys(sorted(listed))
    core.reply(caller, InventoryWanted(tuple(comparison.wanted)))


def _adopt_stored(
    core: Core, segment: Segment, listed: dict[int, ChunkDigest], start: int
) -> Iterator[None]:
    """Take in a chunk as it is stored, if that is what the worker lists."""
    theirs, stored = listed[start], core.restored.digest(segment.id, start)
    if stored != (theirs.size_class, theirs.digest) or not _has_place(segment, theirs):
        return
    value = core.restored.get(segment.id, start)
    assert value is not None, start
    yield from adopt_value(core, segment, start, value)
    core.restored.drop(segment.id, start)
    del listed[start]


def _has_place(segment: Segment, theirs: ChunkDigest) -> bool:
    """Whether a chunk of this class may lie there, and nothing is known to do so."""
    frames = _frames_at(segment, theirs.chunk_start, theirs.size_class)
    if not frames:
        return False
    piece_bytes = frames * segment.geometry.frame_bytes
    inside = 0 <= theirs.chunk_start <= segment.geometry.payload_bytes - piece_bytes
    return inside and not segment.allocator.chunks_within(theirs.chunk_start, piece_bytes)


def _frames_at(segment: Segment, chunk_start: int, size_class: int) -> int:
    """How many frames a chunk of this class has, 0 where none may begin."""
    frames = segment.geometry.chunk_frames(size_class) if size_class > 0 else 0
    if not frames or chunk_start % (frames * segment.geometry.frame_bytes):
        return 0
    return frames


def _while_registered(segment: Segment, job: Iterator[None]) -> Iterator[None]:
    """The job, until the registration that it belongs to ends."""
    registration = segment.registration
    for _ in job:
        yield
        if segment.registration != registration:
            return


def _settle_unlisted(
    core: Core, segment: Segment, chunk: Chunk, sealed: SealedSlots
) -> Iterator[None]:
    """Settle the extents of a chunk that the worker does not list."""
    steps = 0
    for slot, state in enumerate(bytes(chunk.states)):
        if state == FREE or (state == ExtentState.SEALED and sealed is SealedSlots.ARE_PROVEN):
            continue
        _settle(core, segment, chunk, slot, None)
        steps += 1
        if steps % SLOTS_PER_STEP == 0:
            yield


def inventory_rows(core: Core, caller: Caller, message: InventoryRows) -> None:
    """Compare one chunk's records with ours; answer Done."""
    segment = _joining(core, caller, message.segment, message.incarnation)
    if message.chunk_start not in _wanted(core, segment):
        core.reply(caller, Done())  # repeated
        return
    if len(message.rows) % RECORD_BYTES:
        raise BadValue("rows", len(message.rows), f"a multiple of {RECORD_BYTES} bytes")
    frames = _frames_at(segment, message.chunk_start, message.size_class)
    if not frames:
        raise BadValue("chunk_start", message.chunk_start, "aligned for its size class")
    piece_bytes = frames * segment.geometry.frame_bytes
    for chunk in segment.allocator.chunks_within(message.chunk_start, piece_bytes):
        # What the worker does not list there was settled by its offer; what is left still has to
        # be fenced, and no worker changes the class of a chunk before that. It may not serve.
        if (chunk.start, chunk.size_class) != (message.chunk_start, message.size_class):
            raise BadValue(
                "size_class", message.size_class, f"{chunk.size_class}, as planned there"
            )
    core.start(_while_registered(segment, _compare_rows(core, caller, segment, message)))


def _compare_rows(
    core: Core, caller: Caller, segment: Segment, message: InventoryRows
) -> Iterator[None]:
    """A job: settle every extent that either side lists, then adopt what is new."""
    records: dict[int, Record] = {}
    for number, at in enumerate(range(0, len(message.rows), RECORD_BYTES)):
        record = _unpacked(core, segment, message, message.rows[at : at + RECORD_BYTES])
        if record is not None:
            records[record.offset] = record
        if number % SLOTS_PER_STEP == SLOTS_PER_STEP - 1:
            yield
    chunk = segment.allocator.chunks.get(message.chunk_start)
    if chunk is not None and chunk.size_class == message.size_class:
        for slot, state in enumerate(bytes(chunk.states)):
            if state != FREE:
                _settle(core, segment, chunk, slot, records.pop(chunk.offset(slot), None))
            if slot % SLOTS_PER_STEP == SLOTS_PER_STEP - 1:
                yield
    asked = core.restored.asked(segment, message.chunk_start, message.size_class)
    yield from adopt(core, segment, list(records.values()), asked)
    core.restored.drop(segment.id, message.chunk_start)
    _wanted(core, segment).pop(message.chunk_start, None)
    core.reply(caller, Done())


def _unpacked(core: Core, segment: Segment, message: InventoryRows, row: bytes) -> Record | None:
    """The record, None (and counted) when it is not whole or not of this chunk."""
    try:
        record = unpack_record(row)
        if record is None or record.state is RecordState.FREE:
            return None
        segment.geometry.check_extent(record.offset, record.size_class)
        if size_class_of(record.size_class) != record.size_class:
            raise BadValue("size_class", record.size_class, "a size class")
    except (CorruptPage, BadValue):
        core.counters["records_corrupt"] += 1
        return None
    start = segment.geometry.chunk_start(record.offset, record.size_class)
    if (start, record.size_class) != (message.chunk_start, message.size_class):
        core.counters["records_corrupt"] += 1
        return None
    return record


def _settle(core: Core, segment: Segment, chunk: Chunk, slot: int, record: Record | None) -> None:
    """One extent that is not FREE here, by the table above."""
    state = chunk.states[slot]
    generation = chunk.generations[slot]
    same = (
        record is not None
        and record.state is RecordState.SEALED
        and (record.generation, record.key) == (generation, chunk.key(slot))
    )
    if state == ExtentState.RESERVED:
        _settle_reserved(core, chunk, slot, record if same else None, record)
    elif state == ExtentState.SEALED and not same:
        leased_until_s = drop_copy(core, segment, Span(chunk, slot, 1))
        note_dropped(core, chunk, slot)
        segment.free_not_before_s = max(segment.free_not_before_s, leased_until_s)
        segment.allocator.apply(Span(chunk, slot, 1), ExtentEvent.RETIRED)
        core.counters["pages_lost"] += 1
        state = ExtentState.RETIRED
    if state == ExtentState.RETIRED and record is None:
        segment.allocator.apply(Span(chunk, slot, 1), ExtentEvent.FREED)
    elif record is not None and not same:
        chunk.generations[slot] = max(generation, record.generation)


def _settle_reserved(
    core: Core, chunk: Chunk, slot: int, proof: Record | None, record: Record | None
) -> None:
    plan = core.plans[chunk.generations[slot]]
    page = plan.page_of(chunk.key(slot))
    if (
        proof is not None
        and (proof.part, proof.payload_bytes) == (plan.part, plan.part_bytes)
        and plan.has_checksums(page, word(proof.checksum))
    ):
        seal_pages(core, plan, page, 1, word(proof.checksum))
    elif record is not None and record.state is not RecordState.RESERVED:
        fail_pages(core, plan, page, 1)


def inventory_end(core: Core, caller: Caller, message: InventoryEnd) -> None:
    """The segment is compared: it may serve; what is left to fence and free is ordered."""
    segment = core.segments.get(message.segment)
    if segment is not None and segment.state is SegmentState.LIVE:
        core.reply(caller, Done())  # repeated
        return
    segment = _joining(core, caller, message.segment, message.incarnation)
    missing = len(_wanted(core, segment))
    if missing:
        raise Unavailable(f"segment {segment.id}: rows of {missing} chunks are missing")
    del core.comparisons[segment.id]
    core.orders.drop(segment)
    segment.state, segment.readable = SegmentState.LIVE, True
    sealed_bytes = segment.allocator.bytes_in[ExtentState.SEALED]
    core.note(f"segment {segment.id} is live: {sealed_bytes} bytes sealed")
    core.restored.forget(segment.id)
    core.saving.compared(segment)
    core.version += 1
    segments_changed(core)
    for each in core.workers[segment.worker].segments.values():
        if each.state is SegmentState.LIVE:
            core.press(each)  # its own excess, and the others': a drive may come last
    _order_leftovers(core, segment)
    if core.tunables.rebalance:
        core.relocations.want_balance(core.now)
    core.wanted_bytes.clear()  # was counted without this segment: who still wants it asks again
    core.waiting.wake_for_room()
    core.reply(caller, Done())


def _order_leftovers(core: Core, segment: Segment) -> None:
    """Fence and free what is neither free nor in use; of what was removed, only that is left.

    All of a large segment may be: so stretch by stretch, and page by page only what was removed.
    """
    removed = core.tombstones.pages(segment.id)
    left: dict[bytes, set[int]] = {}
    kinds = ((ExtentState.QUARANTINED, OrderKind.FENCE), (ExtentState.RETIRED, OrderKind.FREE))
    for chunk in segment.allocator.chunk_list:
        if chunk.closed and not segment.draining:
            segment.allocator.reopen(chunk)  # what was to empty it did not outlive the absence
        for state, kind in kinds:
            order = core.orders.new(kind, segment, chunk.size_class)
            for first, stop in chunk.stretches_in(state):
                order.offsets.extend(
                    range(chunk.offset(first), chunk.offset(stop), chunk.size_class)
                )
                order.generations.extend(chunk.generations[first:stop])
                if removed:
                    keys = split_keys(bytes(chunk.keys[first * KEY_BYTES : stop * KEY_BYTES]))
                    for slot in [i for i, key in enumerate(keys, first) if key in removed]:
                        left.setdefault(chunk.key(slot), set()).add(chunk.generations[slot])
            if len(order):
                core.orders.give_at(order, max(core.now, segment.free_not_before_s))
    core.tombstones.keep_only(segment.id, left)


def _joining(core: Core, caller: Caller, name: str, incarnation: int) -> Segment:
    """The segment that the caller may offer; Unavailable when it must register again."""
    caller.session.must_be_worker()
    segment = core.segments.get(name)
    if segment is None or segment.session is None:
        raise Unavailable(f"segment {name} is not registered")
    if segment.session != caller.session.id:
        raise AccessDenied(f"segment {name} was registered on another connection")
    if segment.incarnation != incarnation:
        raise BadValue("incarnation", incarnation, f"{segment.incarnation}, as registered")
    if segment.state is not SegmentState.JOINING:
        raise Unavailable(f"segment {name} is {segment.state.value}: register again to compare")
    return segment


def _wanted(core: Core, segment: Segment) -> dict[int, None]:
    """Chunks whose rows are still to come, once the whole offer has been compared."""
    comparison = core.comparisons.get(segment.id)
    if comparison is None or comparison.registration != segment.registration:
        raise Unavailable(f"segment {segment.id}: offer the inventory first")
    if comparison.wanted is None:
        raise Unavailable(f"segment {segment.id}: what was offered is still being compared")
    return comparison.wanted
