"""Geometry of a segment: header, record tables, payload area, chunks, size classes, slots.

Pure arithmetic shared by the master's allocator, the worker's record tables and readers that map
the segment. File layout, offsets in bytes:

    0                      header, one 4 KiB block
    4096                   record area: `records_per_frame` records a frame
    payload_base (2 MiB)   payload area: `payload_bytes`, in frames of chunk_bytes / 4

A chunk holds extents of one size class. It is 1, 2 or 4 frames long and aligned to its own
length, so an extent's offset and class alone give its chunk. A chunk has at most
`limits.CHUNK_EXTENTS_MAX` extents, so small classes have smaller chunks. Its record table is the
record area of its first frame. The record area is sparse: only tables in use take memory.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from kvstore import limits
from kvstore.errors import BadValue, CorruptPage
from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADER_BYTES: Final = 4096
PAYLOAD_ALIGN: Final = 2 * limits.MIB
FRAMES_PER_CHUNK: Final = 4
HEADER_MAGIC: Final = b"KVHSEG01"
CLUSTER_BYTES_MAX: Final = 64
SEGMENT_BYTES_MAX: Final = 128
_HEADER: Final = struct.Struct(f"<8sQQQ{CLUSTER_BYTES_MAX}s{SEGMENT_BYTES_MAX}s")


def size_class_of(part_bytes: int) -> int:
    """Bytes that a part of `part_bytes` takes: rounded up to 4 KiB."""
    align = limits.EXTENT_ALIGN_BYTES
    return (part_bytes + align - 1) // align * align


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of one segment, in bytes. `payload_bytes` is a multiple of `chunk_bytes`."""

    payload_bytes: int
    chunk_bytes: int = limits.CHUNK_BYTES

    @property
    def frame_bytes(self) -> int:
        """A quarter of a chunk: the unit in which chunks are cut."""
        return self.chunk_bytes // FRAMES_PER_CHUNK

    @property
    def frames(self) -> int:
        """Frames in the payload area."""
        return self.payload_bytes // self.frame_bytes

    @property
    def records_per_frame(self) -> int:
        """Room of one record table."""
        smallest = self.chunk_bytes // limits.EXTENT_ALIGN_BYTES
        return min(limits.CHUNK_EXTENTS_MAX, smallest)

    @property
    def payload_base(self) -> int:
        """File offset of the payload area."""
        end = HEADER_BYTES + self.frames * self.records_per_frame * RECORD_BYTES
        return (end + PAYLOAD_ALIGN - 1) // PAYLOAD_ALIGN * PAYLOAD_ALIGN

    @property
    def file_bytes(self) -> int:
        """Length of the segment file."""
        return self.payload_base + self.payload_bytes

    def chunk_frames(self, size_class: int) -> int:
        """Frames in a chunk of `size_class`: the largest of 4, 2, 1 with few enough extents."""
        for frames in (4, 2):
            if frames * self.frame_bytes // size_class <= self.records_per_frame:
                return frames
        return 1

    def chunk_span(self, size_class: int) -> int:
        """Bytes of a chunk of `size_class`."""
        return self.chunk_frames(size_class) * self.frame_bytes

    def chunk_slots(self, size_class: int) -> int:
        """Extents in a chunk of `size_class`."""
        return min(self.chunk_span(size_class) // size_class, self.records_per_frame)

    def chunk_start(self, offset: int, size_class: int) -> int:
        """Payload offset at which the chunk of the extent at `offset` begins."""
        span = self.chunk_span(size_class)
        return offset // span * span

    def record_offset(self, offset: int, size_class: int) -> int:
        """File offset of the record of the extent at payload offset `offset`."""
        start = self.chunk_start(offset, size_class)
        slot = (offset - start) // size_class
        table = start // self.frame_bytes * self.records_per_frame
        return HEADER_BYTES + (table + slot) * RECORD_BYTES

    def record_offsets(self, offsets: Iterable[int], size_class: int) -> list[int]:
        """`record_offset` of many extents of one class; what readers pay for every page."""
        span, frame_bytes, table_records = _record_shape(self, size_class)
        return [
            HEADER_BYTES
            + RECORD_BYTES * (offset // span * span // frame_bytes * table_records
                              + offset % span // size_class)
            for offset in offsets
        ]  # fmt: skip

    def table_range(self, chunk_start: int, size_class: int) -> tuple[int, int]:
        """(file offset, bytes) of the record table of the chunk at payload offset `chunk_start`."""
        length = self.chunk_slots(size_class) * RECORD_BYTES
        return self.record_offset(chunk_start, size_class), length

    def check_extent(self, offset: int, size_bytes: int) -> None:
        """Raise BadValue unless an extent of `size_bytes` may lie at `offset`."""
        if not 0 < size_bytes <= self.chunk_bytes:
            raise BadValue("size_bytes", size_bytes, f"1 to {self.chunk_bytes}")
        size_class = size_class_of(size_bytes)
        start = self.chunk_start(offset, size_class)
        slot, rest = divmod(offset - start, size_class)
        inside = offset >= 0 and offset + size_class <= self.payload_bytes
        if not inside or rest or slot >= self.chunk_slots(size_class):
            raise BadValue("offset", offset, f"an extent of class {size_class} in the segment")


@lru_cache(maxsize=256)
def _record_shape(geometry: Geometry, size_class: int) -> tuple[int, int, int]:
    """Bytes of a chunk and of a frame, and records of a frame's table."""
    return geometry.chunk_span(size_class), geometry.frame_bytes, geometry.records_per_frame


def check_geometry(payload_bytes: int, chunk_bytes: int = limits.CHUNK_BYTES) -> Geometry:
    """A geometry, or BadValue naming what is wrong with the sizes."""
    unit = FRAMES_PER_CHUNK * limits.EXTENT_ALIGN_BYTES
    if chunk_bytes <= 0 or chunk_bytes % unit or chunk_bytes & (chunk_bytes - 1):
        raise BadValue("chunk_bytes", chunk_bytes, f"a power of two, at least {unit}")
    if chunk_bytes > limits.CHUNK_BYTES:
        raise BadValue("chunk_bytes", chunk_bytes, f"at most {limits.CHUNK_BYTES}")
    if payload_bytes <= 0 or payload_bytes % chunk_bytes:
        raise BadValue("payload_bytes", payload_bytes, f"a positive multiple of {chunk_bytes}")
    return Geometry(payload_bytes, chunk_bytes)


class SegmentHeader(msgspec.Struct, frozen=True):
    """First block of a segment file."""

    cluster: str
    segment: SegmentId
    incarnation: Incarnation
    geometry: Geometry


def pack_header(header: SegmentHeader) -> bytes:
    """HEADER_BYTES bytes with a checksum at the end. BadValue for a name that does not fit."""
    for field, name, room in (
        ("cluster", header.cluster, CLUSTER_BYTES_MAX),
        ("segment", header.segment, SEGMENT_BYTES_MAX),
    ):
        if len(name.encode()) > room or name.endswith("\0"):
            raise BadValue(field, name, f"at most {room} bytes, not ending in a zero")
    body = _HEADER.pack(
        HEADER_MAGIC,
        header.incarnation,
        header.geometry.payload_bytes,
        header.geometry.chunk_bytes,
        header.cluster.encode(),
        header.segment.encode(),
    )
    body += bytes(HEADER_BYTES - 8 - len(body))
    return body + xxhash.xxh3_64_digest(body)[::-1]


def unpack_header(data: bytes) -> SegmentHeader:
    """The header in `data`; CorruptPage, saying what differs, unless it is whole and ours."""
    if len(data) < HEADER_BYTES:
        raise CorruptPage(f"segment header: got {len(data)} bytes, want {HEADER_BYTES}")
    body, checksum = data[: HEADER_BYTES - 8], data[HEADER_BYTES - 8 : HEADER_BYTES]
    magic, incarnation, payload, chunk, cluster, segment = _HEADER.unpack_from(body)
    if magic != HEADER_MAGIC:
        raise CorruptPage(f"segment header: got magic {magic!r}, want {HEADER_MAGIC!r}")
    if xxhash.xxh3_64_digest(body)[::-1] != checksum:
        raise CorruptPage("segment header: checksum differs")
    try:
        return SegmentHeader(
            cluster.rstrip(b"\0").decode(),
            SegmentId(segment.rstrip(b"\0").decode()),
            Incarnation(incarnation),
            check_geometry(payload, chunk),
        )
    except (BadValue, UnicodeDecodeError) as error:
        raise CorruptPage(f"segment header: {error}") from error
