"""The record tables of one segment: written, read, and taken over at a start.

Owns the bytes of the record area, on whatever medium. A FREE record is all zeros, so that a chunk
which was cut anew finds no trace of the old. Who may write what and when is `workers.state`'s to
decide.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore.codec import Codec
from kvstore.errors import BadValue, CorruptPage
from kvstore.ids import ROOT_PARENT, Generation, Incarnation
from kvstore.record import (
    RECORD_BYTES,
    Record,
    RecordState,
    in_new_life,
    pack_record,
    unpack_record,
)
from kvstore.segment import HEADER_BYTES, size_class_of
from workers.adopted import Adopted

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Mapping

    from kvstore.record import RecordBatch
    from kvstore.segment import Geometry
    from workers.adopted import AdoptedExtent
    from workers.events import Listed, Stretch

ZEROS: Final = bytes(RECORD_BYTES)
SCAN_BYTES: Final = 64 * RECORD_BYTES
"""Looked through at once: whole records in whole blocks of 4 KiB."""
Chunk = tuple[int, int]
"""Start and size class."""


class Found(msgspec.Struct):
    """What a start found in a segment's record tables."""

    adopted: Adopted
    """Proven SEALED, in the segment's new life."""
    unfinished: int = 0
    """RESERVED: their pull did not end."""
    removed: int = 0
    damaged: int = 0
    """With a wrong checksum, at a wrong place, or in each other's way."""


class RecordArea(Protocol):
    """The bytes of a segment file before its payload, by file offset; what holds them may fail."""

    def look(self, at: int, length: int) -> memoryview:
        """Bytes as they are at this moment; where memory holds them, without a copy."""
        ...

    def load(self, at: int, length: int) -> bytes:
        """A copy. Takes no room where nothing was written."""
        ...

    def store(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Write where there is room, because it was allocated or is not zeros."""
        ...

    def allocate(self, at: int, length: int) -> None:
        """Have room from now on. OSError (ENOSPC) where there is none."""
        ...

    def next_data(self, at: int) -> int | None:
        """The first place from `at` on that may hold something else than zeros, or None."""
        ...


class RecordTable:
    """Records by slot, whatever medium holds them. Offsets are of the payload area."""

    def __init__(self, area: RecordArea, geometry: Geometry) -> None:
        """Keep the records of a segment of this geometry in `area`."""
        self._area = area
        self._geometry = geometry
        self._frame_bytes = geometry.frame_bytes
        self._table_bytes = geometry.records_per_frame * RECORD_BYTES
        self._allocated: set[tuple[int, int]] = set()
        """(chunk start, class) of record tables whose room is certain to be there."""

    def read(self, offset: int, size_class: int) -> memoryview:
        """The RECORD_BYTES of one extent's record, as they are at this moment."""
        return self._area.look(self._geometry.record_offset(offset, size_class), RECORD_BYTES)

    def read_stretch(self, stretch: Stretch) -> memoryview:
        """The records of a stretch, RECORD_BYTES each."""
        return self._area.look(self._place(stretch), stretch.count * RECORD_BYTES)

    def require(self, stretch: Stretch, size_class: int) -> None:
        """Have room for a chunk's table. OSError (ENOSPC) where there is none."""
        if (stretch.chunk_start, size_class) not in self._allocated:
            self._area.allocate(*self._geometry.table_range(stretch.chunk_start, size_class))
            self._allocated.add((stretch.chunk_start, size_class))

    def _place(self, stretch: Stretch) -> int:
        """File offset of the stretch's first record; what Geometry.record_offset says."""
        table = stretch.chunk_start // self._frame_bytes * self._table_bytes
        return HEADER_BYTES + table + stretch.slot * RECORD_BYTES

    def write(self, stretch: Stretch, batch: RecordBatch, start: int, stop: int) -> None:
        """Write records [start, stop) of a batch to the first slots of the stretch."""
        self.write_rows(stretch, batch.packed(start, stop))

    def write_rows(self, stretch: Stretch, rows: bytes | memoryview) -> None:
        """Write packed records to the first slots of the stretch, for which there is room."""
        self._area.store(self._place(stretch), rows)

    def write_free(self, stretch: Stretch, size_class: int) -> None:
        """Make a stretch's records FREE. Needs no room: a hole is FREE already."""
        at = self._place(stretch)
        length = stretch.count * RECORD_BYTES
        try:
            self.require(stretch, size_class)
        except OSError:
            for place in range(at, at + length, RECORD_BYTES):
                if self._area.load(place, RECORD_BYTES) != ZEROS:
                    self._area.store(place, ZEROS)
        else:
            self._area.store(at, bytes(length))

    def write_removed(self, stretch: Stretch, size_class: int) -> None:
        """Make a stretch's records REMOVED; a damaged one becomes FREE, which serves as well."""
        for i in range(stretch.count):
            place = self._geometry.record_offset(stretch.offset + i * size_class, size_class)
            row = self._area.load(place, RECORD_BYTES)
            if row == ZEROS:
                continue
            record = _whole(row)
            removed = RecordState.REMOVED
            self._area.store(
                place,
                ZEROS
                if record is None
                else pack_record(msgspec.structs.replace(record, state=removed)),
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
        record = _whole(row)
        if record is not None and record.generation == listed.generation:
            return row
        is_coming = listed.state == RecordState.RESERVED
        stand_in = Record(
            RecordState.RESERVED if is_coming else RecordState.REMOVED, ROOT_PARENT, 0,
            Generation(listed.generation), Incarnation(0), size_class, 0, offset, size_class, 0,
            ROOT_PARENT, 0,
        )  # fmt: skip
        return pack_record(stand_in)

    def take_over(self, known: Incarnation | None, new: Incarnation) -> Found:
        """Bring every record into the life `new`, or make it FREE.

        `known` is the last life, None for a new file, which holds none. Proof for re-adoption is
        the record's own checksum, its place and state SEALED; payloads are verified by readers.
        Safe to repeat after a kill in the middle.
        """
        found = Found(Adopted())
        if known is None:
            return found
        newest: dict[Chunk, int] = {}
        for at, row in self._rows_in_use():
            record = _whole(row)
            if record is None or not self._is_in_place(record, at) or record.incarnation > known:
                found.damaged += 1
            elif record.state is RecordState.SEALED:
                found.adopted.add(at, record)
                chunk = self._chunk_of(record)
                newest[chunk] = max(newest.get(chunk, 0), record.generation)
            elif record.state is RecordState.RESERVED:
                found.unfinished += 1
            else:
                found.removed += 1
        kept = self._not_overlapping(newest)
        if len(kept) < len(newest):
            found.damaged += found.adopted.drop(lambda each: self._chunk_of(each) not in kept)
        self._rewrite(found.adopted.places, new)
        return found

    def _rewrite(self, kept: array[int], new: Incarnation) -> None:
        """Leave the records at these file offsets, in their new life, and nothing else.

        The tables are read a second time: a disk may have more records than memory would hold.
        """
        start, rows, first = HEADER_BYTES, bytearray(), 0
        for at, row in self._rows_in_use():
            if at != start + len(rows) or len(rows) >= SCAN_BYTES:
                self._area.store(start, rows)  # neighbours only: a hole may have no room
                start, rows = at, bytearray()
            first = bisect_left(kept, at, first)
            is_kept = first < len(kept) and kept[first] == at
            rows += (in_new_life(row, new) if is_kept else None) or ZEROS
        self._area.store(start, rows)

    def _chunk_of(self, placed: Record | AdoptedExtent) -> Chunk:
        start = self._geometry.chunk_start(placed.offset, placed.size_class)
        return start, placed.size_class

    def _rows_in_use(self) -> Iterator[tuple[int, bytes]]:
        """(file offset, bytes) of every record that is not FREE."""
        end = HEADER_BYTES + self._geometry.frames * self._table_bytes
        at = HEADER_BYTES
        while at < end:
            data = self._area.next_data(at)
            if data is None or data >= end:
                return
            at = data - (data - HEADER_BYTES) % SCAN_BYTES
            rows = self._area.load(at, min(SCAN_BYTES, end - at))
            for start in range(0, len(rows), RECORD_BYTES):
                row = rows[start : start + RECORD_BYTES]
                if row != ZEROS:
                    yield at + start, row
            at += SCAN_BYTES

    def _is_in_place(self, record: Record, at: int) -> bool:
        """Whether the record lies where it says, and can be of an extent of this segment."""
        size_class = record.size_class
        # A part lies as it is in the class of its own length, and encoded in none that is larger.
        if not 0 < size_class_of(record.stored_bytes) <= size_class:
            return False
        if size_class > size_class_of(record.payload_bytes):
            return False
        if record.codec == Codec.NONE and record.stored_bytes != record.payload_bytes:
            return False
        try:
            self._geometry.check_extent(record.offset, size_class)
        except BadValue:
            return False
        return self._geometry.record_offset(record.offset, size_class) == at

    def _not_overlapping(self, newest: Mapping[Chunk, int]) -> set[Chunk]:
        """Chunks that stay: of two that share frames, the one with the newest record."""
        taken: set[int] = set()
        kept: set[Chunk] = set()
        for chunk in sorted(newest, key=newest.__getitem__, reverse=True):
            start, size_class = chunk
            first = start // self._geometry.frame_bytes
            frames = set(range(first, first + self._geometry.chunk_frames(size_class)))
            if not frames & taken:
                taken |= frames
                kept.add(chunk)
        return kept


def _whole(row: bytes) -> Record | None:
    """The record in a row; None for a damaged or FREE one."""
    try:
        return unpack_record(row)
    except CorruptPage:
        return None
