"""The memory of one segment: a real (unnamed) file with real record tables, that outlives crashes.

Owns the bytes, the byte-range locks on them, and the list of places that a fault has damaged. The
kernel's part of the story, so to say: it must not know who is right.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

from kvstore.errors import CorruptPage
from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RECORD_BYTES, Record, unpack_record
from kvstore.segment import HEADER_BYTES
from workers.record_table import ZEROS, RecordTable
from workers.tiers.mapped_records import MappedRecords

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from kvstore.segment import Geometry
    from workers.record_table import Found

EXCLUSIVE: Final = "exclusive"
SHARED: Final = "shared"


class SegmentMemory:
    """One segment file, its lives and its locks. Offsets are of the payload area."""

    def __init__(self, segment: SegmentId, geometry: Geometry) -> None:
        """A new file, in no life yet."""
        self.segment = segment
        self.geometry = geometry
        self.incarnation = Incarnation(0)
        self.fd = os.memfd_create(segment)
        os.ftruncate(self.fd, geometry.file_bytes)
        self._map = mmap.mmap(self.fd, geometry.file_bytes)
        self._whole = memoryview(self._map)
        self.payload = self._whole[geometry.payload_base :]
        self.records = self._table(self._whole)
        self._locks: dict[tuple[str, int, int], dict[str, int]] = {}
        """Holders and how often each holds, by (kind, offset, length)."""
        self.damaged: set[int] = set()
        """Offsets of extents whose bytes or record a fault has changed."""

    def close(self) -> None:
        """Give the memory back."""
        self.records = self._table(memoryview(bytearray()))
        self.payload.release()
        self._whole.release()
        self._map.close()
        os.close(self.fd)

    def _table(self, whole: memoryview) -> RecordTable:
        return RecordTable(MappedRecords(self.fd, whole), self.geometry)

    # --- lives ------------------------------------------------------------------------------

    def begin_life(self) -> Found:
        """An owner starts: a higher incarnation, records rewritten in it, the rest FREE."""
        known = self.incarnation
        self.incarnation = Incarnation(known + 1)
        return self.records.take_over(known, self.incarnation)

    # --- locks (those of one process end with it) ---------------------------------------------

    def _overlapping(self, kind: str, offset: int, length: int) -> Iterator[dict[str, int]]:
        for (held_kind, start, size), holders in self._locks.items():
            if held_kind == kind and start < offset + length and offset < start + size:
                yield holders

    def try_exclusive(self, owner: str, offset: int, length: int) -> bool:
        """Take a range for writing; False while another process reads or writes there."""
        others = (
            any(holder != owner for holder in holders)
            for kind in (SHARED, EXCLUSIVE)
            for holders in self._overlapping(kind, offset, length)
        )
        if any(others):
            return False
        self._add(EXCLUSIVE, owner, offset, length)
        return True

    def try_shared(self, reader: str, offset: int, length: int) -> bool:
        """Take a range for reading in place; False while its owner has it for writing."""
        if any(True for _ in self._overlapping(EXCLUSIVE, offset, length)):
            return False
        self._add(SHARED, reader, offset, length)
        return True

    def _add(self, kind: str, holder: str, offset: int, length: int) -> None:
        holders = self._locks.setdefault((kind, offset, length), {})
        holders[holder] = holders.get(holder, 0) + 1

    def unlock(self, kind: str, holder: str, offset: int, length: int) -> None:
        """Undo one lock of a process."""
        holders = self._locks[kind, offset, length]
        holders[holder] -= 1
        if not holders[holder]:
            del holders[holder]
            if not holders:
                del self._locks[kind, offset, length]

    def drop_locks(self, holder: str) -> None:
        """The process is gone."""
        for place, holders in list(self._locks.items()):
            holders.pop(holder, None)
            if not holders:
                del self._locks[place]

    def is_read_in_place(self, offset: int, length: int) -> bool:
        """Whether some reader holds a lock on any of these bytes."""
        return any(True for _ in self._overlapping(SHARED, offset, length))

    # --- bytes ------------------------------------------------------------------------------

    def record(self, offset: int, size_class: int) -> Record | None:
        """The record of one extent; None when it is FREE or damaged."""
        try:
            return unpack_record(self.records.read(offset, size_class))
        except CorruptPage:
            return None

    def all_records(self) -> list[Record]:
        """Every whole record of the segment that is not FREE."""
        found: list[Record] = []
        area = self.geometry.frames * self.geometry.records_per_frame * RECORD_BYTES
        table = bytes(self._whole[HEADER_BYTES : HEADER_BYTES + area])
        for at in range(0, area, RECORD_BYTES):
            row = table[at : at + RECORD_BYTES]
            if row != ZEROS:
                try:
                    record = unpack_record(row)
                except CorruptPage:
                    continue
                if record is not None:
                    found.append(record)
        return found

    def flip_payload_bit(self, random: Random, record: Record) -> None:
        """A fault: one bit of a sealed payload turns over."""
        at = record.offset + random.randrange(record.payload_bytes)
        self.payload[at] ^= 1 << random.randrange(8)
        self.damaged.add(record.offset)

    def flip_record_bit(self, random: Random, record: Record) -> None:
        """A fault: one bit of a record turns over."""
        row = self.records.read(record.offset, record.size_class)
        row[random.randrange(RECORD_BYTES)] ^= 1 << random.randrange(8)
        self.damaged.add(record.offset)
