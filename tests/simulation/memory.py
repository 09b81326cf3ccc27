"""The memory of one segment: a real (unnamed) file that outlives crashes, with real records."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RECORD_BYTES
from kvstore.replica import Tier
from kvstore.segment import HEADER_BYTES
from tests.simulation.store import SegmentStore
from workers.record_table import RecordTable
from workers.tiers.mapped_records import MappedRecords

if TYPE_CHECKING:
    from kvstore.segment import Geometry
    from workers.record_table import Found


class SegmentMemory(SegmentStore):
    """A segment in memory that its owner and its readers have mapped."""

    tier = Tier.DRAM

    def __init__(self, segment: SegmentId, geometry: Geometry) -> None:
        """A new file, in no life yet."""
        super().__init__(segment, geometry)
        self.fd = os.memfd_create(segment)
        os.ftruncate(self.fd, geometry.file_bytes)
        self._map = mmap.mmap(self.fd, geometry.file_bytes)
        self._whole = memoryview(self._map)
        self.payload = self._whole[geometry.payload_base :]
        self.records = self._table(self._whole)

    def _table(self, whole: memoryview) -> RecordTable:
        return RecordTable(MappedRecords(self.fd, whole), self.geometry)

    def begin_life(self) -> Found:
        """An owner starts: a higher incarnation, records rewritten in it, the rest FREE."""
        known = self.incarnation
        self.incarnation = Incarnation(known + 1)
        return self.records.take_over(known, self.incarnation)

    def begin_empty(self) -> None:
        """A higher incarnation in which nothing lies: of a segment that is new at each start."""
        self.incarnation = Incarnation(self.incarnation + 1)
        end = HEADER_BYTES + self.geometry.frames * self.geometry.records_per_frame * RECORD_BYTES
        self._whole[HEADER_BYTES:end] = bytes(end - HEADER_BYTES)

    def look(self, at: int, length: int) -> bytes:
        """What lies at a file offset."""
        return bytes(self._whole[at : at + length])

    def flip(self, at: int, bit: int) -> None:
        """A fault: one bit of the byte at a file offset turns over."""
        self._whole[at] ^= 1 << bit

    def close(self) -> None:
        """Give the memory back."""
        self.records = self._table(memoryview(bytearray()))
        self.payload.release()
        self._whole.release()
        self._map.close()
        os.close(self.fd)
