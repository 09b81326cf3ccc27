"""One segment of the simulation, whatever medium holds it: lives, readers' locks, records, damage.

Outlives crashes of its worker. The machine's part of the story, so to say: it must not know who is
right. Offsets are of the payload area.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvstore.codec import Codec, decode
from kvstore.errors import CorruptPage
from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RECORD_BYTES, Record, unpack_record
from kvstore.segment import HEADER_BYTES
from workers.record_table import ZEROS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from kvstore.replica import Tier
    from kvstore.segment import Geometry
    from workers.record_table import Found, RecordTable

EXCLUSIVE: Final = "exclusive"
SHARED: Final = "shared"


class SegmentStore(ABC):
    """One segment file, its lives and its locks."""

    tier: Tier
    records: RecordTable
    """As its owner uses them: on a disk, with the disk's errors."""

    def __init__(self, segment: SegmentId, geometry: Geometry) -> None:
        """A new file, in no life yet."""
        self.segment = segment
        self.geometry = geometry
        self.incarnation = Incarnation(0)
        self.damaged: set[int] = set()
        """Offsets of extents whose bytes or record a fault has changed."""
        self.spoilt: set[bytes] = set()
        """Keys of the pages that ever lay there; their extents may hold other pages by now."""
        self._locks: dict[tuple[str, int, int], dict[str, int]] = {}
        """Holders and how often each holds, by (kind, offset, length)."""

    @property
    def is_writable(self) -> bool:
        """Whether its owner can change records now."""
        return True

    @property
    def id(self) -> SegmentId:
        """Its name, as the worker's own code calls it."""
        return self.segment

    @abstractmethod
    def begin_life(self) -> Found:
        """An owner starts: a higher incarnation, records rewritten in it, the rest FREE."""

    @abstractmethod
    def look(self, at: int, length: int) -> bytes:
        """What lies at a file offset, as an onlooker sees it whom no fault of the medium hits."""

    @abstractmethod
    def flip(self, at: int, bit: int) -> None:
        """A fault: one bit of the byte at a file offset turns over."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

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

    # --- what lies there ----------------------------------------------------------------------

    def record(self, offset: int, size_class: int) -> Record | None:
        """The record of one extent; None when it is FREE or damaged."""
        return _whole(self.look(self.geometry.record_offset(offset, size_class), RECORD_BYTES))

    def all_records(self) -> list[Record]:
        """Every whole record of the segment that is not FREE."""
        found: list[Record] = []
        length = self.geometry.records_per_frame * RECORD_BYTES
        unused = bytes(length)
        for frame in range(self.geometry.frames):
            table = self.look(HEADER_BYTES + frame * length, length)
            if table == unused:
                continue
            for at in range(0, length, RECORD_BYTES):
                row = table[at : at + RECORD_BYTES]
                record = None if row == ZEROS else _whole(row)
                if record is not None:
                    found.append(record)
        return found

    def decoded(self, record: Record) -> bytes:
        """The part that an extent holds; empty when its stored form is none."""
        stored = self.look(self.geometry.payload_base + record.offset, record.stored_bytes)
        if record.codec == Codec.NONE:
            return stored
        into = bytearray(record.payload_bytes)
        try:
            decode(record.codec, memoryview(stored), memoryview(into))
        except CorruptPage:
            return b""
        return bytes(into)

    # --- faults -------------------------------------------------------------------------------

    def flip_payload_bit(self, random: Random, record: Record) -> None:
        """A fault: one bit of a sealed payload turns over."""
        at = record.offset + random.randrange(record.stored_bytes)
        self.flip(self.geometry.payload_base + at, random.randrange(8))
        self.damaged.add(record.offset)
        self.spoilt.add(record.key)

    def flip_record_bit(self, random: Random, record: Record) -> None:
        """A fault: one bit of a record turns over."""
        at = self.geometry.record_offset(record.offset, record.size_class)
        self.flip(at + random.randrange(RECORD_BYTES), random.randrange(8))
        self.damaged.add(record.offset)
        self.spoilt.add(record.key)


@lru_cache(maxsize=1 << 14)
def _whole(row: bytes) -> Record | None:
    try:
        return unpack_record(row)
    except CorruptPage:
        return None
