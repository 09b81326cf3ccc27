"""Pages from a disk, staged in memory for readers of this host: loaded once, verified, lent.

Owns the staging segment, its slots and the order of a load: slot locked, record FREE, bytes,
checksum, record SEALED, unlocked (I4). The segment is known to this worker and its readers only:
no master plans there, and it has no name that a next start could find. Must not know connections.
"""

from __future__ import annotations

import logging
import threading
from array import array
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore import limits
from kvstore.codec import Codec
from kvstore.errors import BadValue, CorruptPage, Unavailable
from kvstore.ids import KEY_BYTES, Generation, PageKey
from kvstore.record import is_sealed_as, pack_record, unpack_record
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.transfers import Staged
from workers.serve_reads import asked_pages
from workers.staging_slots import PageId, Slot, Slots, SlotState
from workers.tiers.part_io import Extent, PartRead, PartToRead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.ids import Incarnation
    from kvstore.wire.messages.transfers import ReleaseStaged, StageExtents
    from workers.events import ExtentGroup, Stretch
    from workers.extent_table import SegmentTable
    from workers.record_table import RecordTable
    from workers.tiers.dram import DramSegment

LOG: Final = logging.getLogger(__name__)


class Source(Protocol):
    """A segment on a disk; see `workers.tiers.nvme.NvmeSegment`."""

    @property
    def incarnation(self) -> Incarnation:
        """This life of it."""
        ...

    @property
    def records(self) -> RecordTable:
        """Its record tables; Unavailable where the disk has failed."""
        ...

    def read(self, parts: Sequence[PartToRead]) -> list[PartRead]:
        """Bring parts, verified."""
        ...


class StagingCounts(msgspec.Struct):
    """What was asked for since the start, in pages."""

    loaded: int = 0
    """Read from a disk."""
    found: int = 0
    """Staged already."""
    busy: int = 0
    """Without room: their readers ask again or go elsewhere."""
    failed: int = 0
    """Not there, damaged, or on a disk that failed."""


class _Stage(msgspec.Struct):
    """One StageExtents on its way, columns unpacked; pages are indices into them."""

    session: int
    source: Source
    size_class: int
    part_bytes: int
    ids: list[PageId]
    extents: list[Extent | None]
    """None where no extent begins."""
    outcomes: bytearray
    slots: dict[int, Slot] = msgspec.field(default_factory=dict)
    """Slots that this session was told of, or will be."""
    loads: list[int] = msgspec.field(default_factory=list)
    """Pages that are to be loaded here; the other slots are somebody else's work."""


class Staging:
    """The staging segment of one worker. Thread-safe: every session calls in its own thread."""

    def __init__(
        self,
        segment: DramSegment,
        sources: Mapping[str, Source],
        tables: Mapping[str, SegmentTable],
        clock: Clock,
    ) -> None:
        """Stage pages of `sources` in `segment`, which stays the caller's to close.

        Of the state machine's `tables` only the classes of their extents are looked at: a record
        is found by a right one alone.
        """
        self.segment: Final = segment
        self.counts: Final = StagingCounts()
        self._sources = sources
        self._tables = tables
        self._clock = clock
        self._slots = Slots(segment.id, segment.geometry)
        self._changed = threading.Condition()
        """Guards slots and counts; notified when a page has come or a slot may be free."""
        self._closing = False

    def stage(self, session: int, message: StageExtents) -> Staged:
        """Bring what there is room for; waits only while there is room for nothing.

        Two sessions that want one page share one load. BadValue for columns that do not fit, or a
        segment that is not on a disk of ours.
        """
        stage = self._opened(session, message)
        with self._changed:
            self._claim_in_time(stage, self._clock.now_s() + message.timeout_s)
        self._load(stage)
        self._join(stage)
        return self._told(stage)

    def release(self, session: int, message: ReleaseStaged) -> None:
        """A session has read or locked what it was told of. Strange entries change nothing."""
        if len(message.offsets) != len(message.generations) or len(message.offsets) % 8:
            want = f"{len(message.offsets)} bytes, 8 an entry, as for offsets"
            raise BadValue("generations", len(message.generations), want)
        rows = zip(array("Q", message.offsets), array("Q", message.generations), strict=True)
        with self._changed:
            for offset, generation in rows:
                self._slots.release(session, offset, generation)
            self._changed.notify_all()

    def doubt(self, extents: ExtentGroup) -> None:
        """Load these anew for their next readers: one could not verify what it was shown.

        What lies on the disk may be right and its staged copy not.
        """
        source = self._sources.get(extents.segment)
        if source is None:
            return
        for stretch in extents.stretches:
            for i in range(stretch.count):
                page = _page_at(source, extents.segment, stretch, i, extents.size_class)
                if page is not None:
                    with self._changed:
                        self._slots.doubt(page)

    def forget(self, session: int) -> None:
        """A session is over."""
        with self._changed:
            self._slots.forget(session)
            self._changed.notify_all()

    def end_waits(self) -> None:
        """Let nobody wait for room any more: the worker is stopping."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # --- claiming ---------------------------------------------------------------------------

    def _opened(self, session: int, message: StageExtents) -> _Stage:
        asked = asked_pages(message)
        size, most = message.part_bytes, self.segment.geometry.chunk_bytes
        if not 0 < size <= most:
            raise BadValue("part_bytes", size, f"1 to {most}")
        if not 0 <= message.timeout_s <= limits.CALL_TIMEOUT_MAX_S:
            want = f"0 to {limits.CALL_TIMEOUT_MAX_S} seconds"
            raise BadValue("timeout_s", message.timeout_s, want)
        source = self._sources.get(message.segment)
        if source is None:
            raise BadValue("segment", message.segment, f"one of {sorted(self._sources)}")
        keys = [message.keys[i : i + KEY_BYTES] for i in range(0, len(message.keys), KEY_BYTES)]
        ids = [
            PageId(message.segment, key, message.part, generation)
            for key, generation in zip(keys, asked.generations, strict=True)
        ]
        extents: list[Extent | None] = [None] * len(ids)
        if source.incarnation == message.incarnation:  # I11
            extents = [self._extent(message.segment, offset) for offset in asked.offsets]
        outcomes = bytes(Outcome.STALE if each is None else Outcome.BUSY for each in extents)
        return _Stage(session, source, size_class_of(size), size, ids, extents, bytearray(outcomes))

    def _extent(self, segment: str, offset: int) -> Extent | None:
        found = self._tables[segment].slot_at(offset)
        return None if found is None else Extent(offset, found[0].size_class)

    def _claim_in_time(self, stage: _Stage, until_s: float) -> None:
        """Claim what there is room for, some of it by `until_s`."""
        wanted = [page for page, extent in enumerate(stage.extents) if extent is not None]
        while wanted:
            now_s = self._clock.now_s()
            self._claim(stage, wanted, now_s)
            # Whoever holds slots must not wait for more: all might, and nobody would release any.
            if self._slots.holds(stage.session) or now_s >= until_s or self._closing:
                return
            next_s = self._slots.next_end_s()
            self._changed.wait(min(until_s, until_s if next_s is None else next_s) - now_s)

    def _claim(self, stage: _Stage, wanted: list[int], now_s: float) -> None:
        is_full = False
        for page in wanted:
            found = self._find(stage, page)
            if found is not None:
                self._slots.use(found, stage.session, now_s)
            elif not is_full:
                found = self._free_slot(stage.size_class, now_s)
                is_full = found is None
                if found is not None:
                    self._slots.begin(found, stage.ids[page], stage.session)
                    stage.loads.append(page)
            if found is not None:
                stage.slots[page] = found

    def _find(self, stage: _Stage, page: int) -> Slot | None:
        """Where the page is staged or on its way. What its record does not prove is loaded anew:
        memory fails, too, and each reader would take it for a slot that went to another page."""
        which = stage.ids[page]
        slot = self._slots.find(which)
        if slot is not None and slot.state is SlotState.STAGED:
            row = self.segment.records.read(slot.offset, stage.size_class)
            life = self.segment.incarnation
            if not is_sealed_as(row, which.key, which.part, slot.generation, life):
                self._slots.doubt(which)
                return None
        return slot

    def _free_slot(self, size_class: int, now_s: float) -> Slot | None:
        """A slot that nobody uses, exclusively locked: no view has it, and none can get it."""
        while (candidate := self._slots.candidate(size_class, now_s)) is not None:
            slot = candidate.slot
            for group in candidate.cut_up:
                for stretch in group.stretches:
                    self.segment.records.write_free(stretch, group.size_class)
            try:
                if any(self.segment.locks.try_lock(slot.stretch, size_class)):
                    return slot
            except OSError:
                LOG.exception("%s: cannot be locked", self.segment.id)
            self._slots.viewed(slot, now_s)
        return None

    # --- loading ----------------------------------------------------------------------------

    def _load(self, stage: _Stage) -> None:
        """Bring what was claimed here; however this ends, nobody waits for it afterwards."""
        found = [PartRead(Outcome.TRANSPORT)] * len(stage.loads)
        try:
            if stage.loads:
                found = stage.source.read([self._part(stage, page) for page in stage.loads])
                self._seal(stage, found)
        except OSError as error:
            LOG.warning("%s: no memory for records: %s", self.segment.id, error)
            found = [PartRead(Outcome.BUSY)] * len(stage.loads)
        finally:
            with self._changed:
                now_s = self._clock.now_s()
                for page, part in zip(stage.loads, found, strict=True):
                    slot = stage.slots[page]
                    stage.outcomes[page] = part.outcome
                    self.segment.locks.unlock(slot.stretch, stage.size_class)
                    if part.outcome is Outcome.OK:
                        self._slots.staged(slot, now_s)
                    else:
                        self._slots.failed(slot)
                self._changed.notify_all()

    def _part(self, stage: _Stage, page: int) -> PartToRead:
        """The order to fill a slot, whose record says nothing from here on."""
        slot, extent, which = stage.slots[page], stage.extents[page], stage.ids[page]
        assert extent is not None, page
        self.segment.records.require(slot.stretch, stage.size_class)
        self.segment.records.write_free(slot.stretch, stage.size_class)
        into = self.segment.payload[slot.offset : slot.offset + stage.part_bytes]
        key, generation = PageKey(which.key), Generation(which.generation)
        return PartToRead(extent, key, which.part, generation, into)

    def _seal(self, stage: _Stage, found: Sequence[PartRead]) -> None:
        for page, part in zip(stage.loads, found, strict=True):
            if part.record is not None:
                slot = stage.slots[page]
                record = msgspec.structs.replace(
                    part.record,
                    generation=Generation(slot.generation),
                    incarnation=self.segment.incarnation,
                    offset=slot.offset,
                    size_class=stage.size_class,
                    stored_bytes=stage.part_bytes,
                    codec=Codec.NONE,
                )
                self.segment.records.write_rows(slot.stretch, pack_record(record))

    # --- telling ----------------------------------------------------------------------------

    def _join(self, stage: _Stage) -> None:
        """Wait for pages that others load, and see that they are still to be had at all."""
        loads = set(stage.loads)
        for page, slot in stage.slots.items():
            if page not in loads:
                self._await_loaded(slot)
                stage.outcomes[page] = self._look(stage, page)

    def _await_loaded(self, slot: Slot) -> None:
        with self._changed:
            self._changed.wait_for(lambda: slot.state is not SlotState.LOADING)

    def _look(self, stage: _Stage, page: int) -> Outcome:
        """OK while the page lies on the disk as it did when it was staged: it may be removed."""
        extent, which = stage.extents[page], stage.ids[page]
        assert extent is not None, page
        try:
            row = stage.source.records.read(extent.offset, extent.size_class)
        except Unavailable:
            return Outcome.TRANSPORT
        life = stage.source.incarnation
        is_sealed = is_sealed_as(row, which.key, which.part, which.generation, life)
        return Outcome.OK if is_sealed else Outcome.STALE

    def _told(self, stage: _Stage) -> Staged:
        """The answer. Who is told of a page has its full time from now on."""
        offsets, generations = (array("Q", bytes(8 * len(stage.ids))) for _ in range(2))
        with self._changed:
            now_s = self._clock.now_s()
            for page, slot in stage.slots.items():
                offsets[page], generations[page] = slot.offset, slot.generation
                if stage.outcomes[page]:
                    self._slots.release(stage.session, slot.offset, slot.generation)
                elif slot.state is SlotState.STAGED and slot.page == stage.ids[page]:
                    self._slots.use(slot, stage.session, now_s)
                else:  # its load failed, or all this took longer than a slot is kept
                    stage.outcomes[page] = Outcome.BUSY
            self._note(stage)
        columns = offsets.tobytes(), generations.tobytes()
        segment = self.segment
        return Staged(bytes(stage.outcomes), segment.id, segment.incarnation, *columns)

    def _note(self, stage: _Stage) -> None:
        counts, outcomes = self.counts, stage.outcomes
        loaded = sum(outcomes[page] == Outcome.OK for page in stage.loads)
        counts.loaded += loaded
        counts.found += outcomes.count(Outcome.OK) - loaded
        counts.busy += outcomes.count(Outcome.BUSY)
        counts.failed += len(outcomes) - outcomes.count(Outcome.OK) - outcomes.count(Outcome.BUSY)


def _page_at(source: Source, name: str, stretch: Stretch, i: int, size_class: int) -> PageId | None:
    """The page that is sealed in extent `i` of a stretch, as far as that can be told."""
    try:
        row = source.records.read(stretch.offset + i * size_class, size_class)
        record = unpack_record(bytes(row))
    except (CorruptPage, Unavailable):
        return None
    return None if record is None else PageId(name, record.key, record.part, record.generation)
