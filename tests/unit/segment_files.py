"""A segment file made by hand, for tests of whoever reads one. Not a test."""

from __future__ import annotations

import mmap
import os
from array import array
from typing import TYPE_CHECKING

from kvstore.ids import Generation, Incarnation, PageKey
from kvstore.page import payload_checksum
from kvstore.record import RECORD_BYTES, Record, RecordState, pack_record
from kvstore.segment import Geometry, size_class_of
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import Address, SegmentRef
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.page import PageChain

CHUNK_BYTES = 1 << 20
INCARNATION = 3


class SegmentFile:
    """A memfd with the layout of a segment; pages lie one after the other from `first` on."""

    def __init__(self, chunks: int = 4) -> None:
        """Make an empty one."""
        self.geometry = Geometry(chunks * CHUNK_BYTES, CHUNK_BYTES)
        self.fd = os.memfd_create("segment-of-a-test")
        os.ftruncate(self.fd, self.geometry.file_bytes)
        self.bytes = mmap.mmap(self.fd, self.geometry.file_bytes)

    def close(self) -> None:
        """Free it."""
        self.bytes.close()
        os.close(self.fd)

    def open(self) -> int:
        """A descriptor with an open file description of its own, as a worker hands out."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)

    def ref(self, incarnation: int = INCARNATION) -> SegmentRef:
        """What lookups say of it."""
        address = Address("shm", "/nowhere", 0)
        return SegmentRef("s", incarnation, "dram", self.geometry, "w", "h", (address,))

    def store(self, chain: PageChain, size: int, *, part: int = 0, first: int = 0) -> list[int]:
        """Seal the pages of a chain; their payload offsets."""
        size_class = size_class_of(size)
        offsets = [first + i * size_class for i in range(len(chain))]
        for key, offset in zip(chain, offsets, strict=True):
            start = self.geometry.payload_base + offset
            self.bytes[start : start + size] = payload(key, part, size)
            self.write_record(key, offset, size, part=part)
        return offsets

    def write_record(
        self,
        key: PageKey,
        offset: int,
        size: int,
        *,
        part: int = 0,
        state: RecordState = RecordState.SEALED,
        incarnation: int = INCARNATION,
    ) -> None:
        """Write one extent's record; its generation is its offset + 1."""
        size_class = size_class_of(size)
        checksum = payload_checksum(payload(key, part, size), key, part)
        record = Record(
            state, key, part, Generation(offset + 1), Incarnation(incarnation), size, checksum,
            offset, size_class, 1, PageKey(bytes(32)), 64,
        )  # fmt: skip
        start = self.geometry.record_offset(offset, size_class)
        self.bytes[start : start + RECORD_BYTES] = pack_record(record)

    def flip(self, offset: int) -> None:
        """Change one bit of the payload area."""
        place = self.geometry.payload_base + offset
        self.bytes[place] ^= 0x10

    def span(
        self,
        chain: PageChain,
        offsets: Sequence[int],
        size: int,
        places: Sequence[int],
        *,
        part: int = 0,
    ) -> ReadSpan:
        """What a read of stored pages asks for."""
        sums = [payload_checksum(payload(key, part, size), key, part) for key in chain]
        return ReadSpan(
            self.ref(), part, size, chain.packed, array("Q", offsets).tobytes(),
            array("Q", (offset + 1 for offset in offsets)).tobytes(),
            array("Q", sums).tobytes(), tuple(places),
        )  # fmt: skip
