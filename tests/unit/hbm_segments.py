"""A small HBM segment, and pages put into it as a pull does. Not a test."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvstore.ids import KEY_BYTES, ROOT_PARENT, Generation, PageKey, SegmentId
from kvstore.page import checksum_seeds, parents_of
from kvstore.record import Record, RecordBatch, RecordState
from kvstore.segment import size_class_of
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.common import SegmentRef
from kvstore.wire.messages.transfers import ReadExtents
from tests.unit.worker_scripts import GEOMETRY, generation
from workers.extent_table import SegmentTable
from workers.tiers.hbm import Extents, HbmSegment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.device import Block, Device
    from tests.unit.worker_segments import Pages

NAME = SegmentId("w-hbm0")


def opened(device: Device, name: SegmentId = NAME) -> HbmSegment:
    """A segment of four chunks of 64 KiB."""
    return HbmSegment(name, GEOMETRY, device)


def reference(incarnation: int) -> SegmentRef:
    """The segment in this life, as clients know it."""
    return SegmentRef(NAME, incarnation, "hbm", GEOMETRY, "w", "here", ())


def host(data: bytes) -> Memory:
    """Host memory with these bytes."""
    return Memory.of("host", bytearray(data), writable=True)


def put(
    segment: HbmSegment,
    pages: Pages,
    source: Memory | Block | None = None,
    places: Sequence[int] | None = None,
    counter: int = 5,
) -> list[int]:
    """Pull pages, and seal all of them; the checksums of what the extents hold."""
    size, found = pages.size, list[int]()
    size_class, keys = size_class_of(size), b"".join(pages.keys)
    source = host(pages.source) if source is None else source
    places = pages.places() if places is None else places
    table = SegmentTable(segment.id, segment.incarnation, segment.geometry)
    for stretch in table.stretches(size_class, pages.offsets):
        first, stop = stretch.page, stretch.page + stretch.count
        record = Record(
            RecordState.RESERVED, PageKey(pages.keys[first]), 0, Generation(generation(counter)),
            segment.incarnation, size, pages.checksums[first], stretch.offset, size_class, 1,
            PageKey(pages.keys[first - 1]) if first else ROOT_PARENT, 64, stored_bytes=size,
        )  # fmt: skip
        own = keys[first * KEY_BYTES : stop * KEY_BYTES]
        batch = RecordBatch(
            record, own, parents_of(record.parent, own), pages.offsets[first:stop],
            pages.checksums[first:stop],
        )  # fmt: skip
        segment.records.require(stretch, size_class)
        segment.records.write(stretch, batch, 0, stretch.count)
        extents = Extents(stretch.offset, stretch.count, size_class, size)
        found += segment.fill(extents, source, places[first:stop], checksum_seeds(own, 0))
        batch.restate(RecordState.SEALED)
        segment.records.write(stretch, batch, 0, stretch.count)
    return found


def asked(segment: HbmSegment, pages: Pages, counter: int = 5) -> ReadExtents:
    """A reader's request for these pages."""
    generations = array("Q", [generation(counter)] * len(pages.keys))
    return ReadExtents(
        segment.id, segment.incarnation, 0, pages.size, b"".join(pages.keys),
        pages.offsets.tobytes(), generations.tobytes(),
    )  # fmt: skip
