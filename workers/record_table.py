"""The record tables of one mapped segment: written, read, and taken over at a start.

Owns the bytes of the record area. A FREE record is all zeros, so that a chunk which was cut anew
finds no trace of the old. Who may write what and when is `workers.state`'s to decide.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue, CorruptPage
from kvstore.ids import ROOT_PARENT, Generation, Incarnation
from kvstore.record import RECORD_BYTES, Record, RecordState, pack_record, unpack_record
from kvstore.segment import HEADER_BYTES, size_class_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.record import RecordBatch
    from kvstore.segment import Geometry
    from workers.events import Listed, Stretch

ZEROS: Final = bytes(RECORD_BYTES)


class Found(msgspec.Struct):
    """What a start found in a segment's record tables."""

    adopted: list[Record]
    """Proven SEALED, in the segment's new life; they do not overlap."""
    unfinished: int = 0
    """RESERVED: their pull did not end."""
    removed: int = 0
    damaged: int = 0
    """With a wrong checksum, at a wrong place, or in each other's way."""


class RecordTable:
    """Records by slot. `view` is the whole mapped file; offsets are of the payload area."""

    def __init__(self, fd: int, view: memoryview, geometry: Geometry) -> None:
        """Use a mapped segment file and its descriptor, which both stay the caller's."""
        self._fd = fd
        self._view = view
        self._geometry = geometry
        self._frame_bytes = geometry.frame_bytes
        self._table_bytes = geometry.records_per_frame * RECORD_BYTES
        self._allocated: set[tuple[int, int]] = set()
        """(chunk start, class) of record tables whose memory is certain to be there."""

    def read(self, offset: int, size_class: int) -> memoryview:
        """The RECORD_BYTES of one extent's record, as they are at this moment."""
        at = self._geometry.record_offset(offset, size_class)
        return self._view[at : at + RECORD_BYTES]

    def require(self, stretch: Stretch, size_class: int) -> None:
        """Have memory for a chunk's table. OSError (ENOSPC) where there is none.

        Without this a full /dev/shm would kill the process at the first write.
        """
        if (stretch.chunk_start, size_class) not in self._allocated:
            at, length = self._geometry.table_range(stretch.chunk_start, size_class)
            os.posix_fallocate(self._fd, at, length)
            self._allocated.add((stretch.chunk_start, size_class))

    def _place(self, stretch: Stretch) -> int:
        """File offset of the stretch's first record; what Geometry.record_offset says."""
        table = stretch.chunk_start // self._frame_bytes * self._table_bytes
        return HEADER_BYTES + table + stretch.slot * RECORD_BYTES

    def write(self, stretch: Stretch, batch: RecordBatch, start: int, stop: int) -> None:
        """Write records [start, stop) of a batch to the first slots of the stretch."""
        at = self._place(stretch)
        self._view[at : at + (stop - start) * RECORD_BYTES] = batch.packed(start, stop)

    def write_free(self, stretch: Stretch, size_class: int) -> None:
        """Make a stretch's records FREE. Needs no memory: a hole is FREE already."""
        at = self._place(stretch)
        length = stretch.count * RECORD_BYTES
        try:
            self.require(stretch, size_class)
        except OSError:
            # Memory has run out, and a write through the mapping to a hole would kill us.
            for place in range(at, at + length, RECORD_BYTES):
                if os.pread(self._fd, RECORD_BYTES, place) != ZEROS:
                    os.pwrite(self._fd, ZEROS, place)
        else:
            self._view[at : at + length] = bytes(length)

    def write_removed(self, stretch: Stretch, size_class: int) -> None:
        """Make a stretch's records REMOVED; a damaged one becomes FREE, which serves as well."""
        for i in range(stretch.count):
            offset = stretch.offset + i * size_class
            place = self.read(offset, size_class)
            try:
                record = unpack_record(place)
            except CorruptPage:
                record = None
            removed = RecordState.REMOVED
            place[:] = (
                ZEROS
                if record is None
                else pack_record(msgspec.structs.replace(record, state=removed))
            )

    def rows(self, chunk_start: int, size_class: int, listed: Iterable[Listed]) -> bytes:
        """One row for each listed extent, RECORD_BYTES each: an inventory leaves nothing out.

        An extent whose record is not whole any more, or not written yet, is listed without a key
        and never as SEALED: nobody can serve it, but its place must not be taken for free.
        """
        return b"".join(self._row(chunk_start, size_class, each) for each in listed)

    def _row(self, chunk_start: int, size_class: int, listed: Listed) -> bytes:
        offset = chunk_start + listed.slot * size_class
        row = bytes(self.read(offset, size_class))
        try:
            record = unpack_record(row)
        except CorruptPage:
            record = None
        if record is not None and record.generation == listed.generation:
            return row
        is_coming = listed.state == RecordState.RESERVED
        stand_in = Record(
            RecordState.RESERVED if is_coming else RecordState.REMOVED, ROOT_PARENT, 0,
            Generation(listed.generation), Incarnation(0), size_class, 0, offset, size_class, 0,
            ROOT_PARENT, 0,
        )  # fmt: skip
        return pack_record(stand_in)

    def take_over(self, known: Incarnation, new: Incarnation) -> Found:
        """Bring every record into the life `new`, or make it FREE; `known` is the last life.

        Proof for re-adoption is the record's own checksum, its place and state SEALED; payloads
        are verified by readers. Safe to repeat after a kill in the middle.
        """
        found = Found([])
        proven: dict[tuple[int, int], list[Record]] = {}
        for at, record in self._records():
            if record is None or not self._is_in_place(record, at) or record.incarnation > known:
                found.damaged += 1
            elif record.state is RecordState.SEALED:
                start = self._geometry.chunk_start(record.offset, record.size_class)
                proven.setdefault((start, record.size_class), []).append(record)
            elif record.state is RecordState.RESERVED:
                found.unfinished += 1
            else:
                found.removed += 1
        for records in self._not_overlapping(proven, found):
            found.adopted += [msgspec.structs.replace(each, incarnation=new) for each in records]
        self._rewrite(found.adopted)
        return found

    def _records(self) -> Iterator[tuple[int, Record | None]]:
        """(file offset, record or None for a damaged one) of all that are not FREE."""
        for start in self._tables_in_use():
            length = self._geometry.records_per_frame * RECORD_BYTES
            table = os.pread(self._fd, length, start)
            for slot, row in enumerate(_rows(table)):
                if row == ZEROS:
                    continue
                try:
                    record = unpack_record(row)
                except CorruptPage:
                    record = None
                yield start + slot * RECORD_BYTES, record

    def _tables_in_use(self) -> Iterator[int]:
        """File offsets of the frames' record tables that were ever written; the rest are holes."""
        length = self._geometry.records_per_frame * RECORD_BYTES
        end = HEADER_BYTES + self._geometry.frames * length
        at = HEADER_BYTES
        while at < end:
            try:
                data = max(at, os.lseek(self._fd, at, os.SEEK_DATA))
            except OSError:  # ENXIO: nothing but holes from here on
                return
            if data >= end:
                return
            start = data - (data - HEADER_BYTES) % length
            yield start
            at = start + length

    def _is_in_place(self, record: Record, at: int) -> bool:
        """Whether the record lies where it says, and can be of an extent of this segment."""
        size_class = record.size_class
        if size_class <= 0 or size_class_of(record.payload_bytes) != size_class:
            return False
        try:
            self._geometry.check_extent(record.offset, size_class)
        except BadValue:
            return False
        return self._geometry.record_offset(record.offset, size_class) == at

    def _not_overlapping(
        self, proven: dict[tuple[int, int], list[Record]], found: Found
    ) -> Iterator[list[Record]]:
        """Chunks of records; of two that share frames, the one with the newest record."""
        taken: set[int] = set()
        newest = sorted(
            proven.items(), key=lambda item: max(r.generation for r in item[1]), reverse=True
        )
        for (start, size_class), records in newest:
            first = start // self._geometry.frame_bytes
            frames = set(range(first, first + self._geometry.chunk_frames(size_class)))
            if frames & taken:
                found.damaged += len(records)
                continue
            taken |= frames
            yield records

    def _rewrite(self, adopted: Iterable[Record]) -> None:
        """Leave these records, in their new life, and nothing else in any table."""
        kept = {self._geometry.record_offset(r.offset, r.size_class): r for r in adopted}
        for start in list(self._tables_in_use()):
            length = self._geometry.records_per_frame * RECORD_BYTES
            for slot, row in enumerate(_rows(os.pread(self._fd, length, start))):
                at = start + slot * RECORD_BYTES
                record = kept.get(at)
                if record is not None:
                    self._view[at : at + RECORD_BYTES] = pack_record(record)
                elif row != ZEROS:
                    self._view[at : at + RECORD_BYTES] = ZEROS


def _rows(table: bytes) -> Iterator[bytes]:
    return (table[at : at + RECORD_BYTES] for at in range(0, len(table), RECORD_BYTES))
