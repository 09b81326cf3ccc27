"""A small NVMe segment on a fake disk, and parts to put into it. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.codec import Codec
from kvstore.ids import ROOT_PARENT, Generation, Incarnation, PageKey, SegmentId
from kvstore.page import payload_checksum
from kvstore.record import Record, RecordState
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from tests.fakes import ManualClock, adopted_records, payload
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, generation, key
from workers.events import Stretch
from workers.tiers.nvme import NvmeSegment, open_nvme
from workers.tiers.part_io import Extent, PartToRead, PartToWrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.segment import Geometry
    from tests.fake_disk import FakeDisk
    from workers.record_table import Found
    from workers.tiers.part_io import PartRead, PartWritten

CLUSTER: Final = "testing"
NAME: Final = SegmentId("w-nvme0")
PATH: Final = Path("/d/segment")
OK: Final = Outcome.OK
OFFSETS: Final = (0, PAGE, 3 * PAGE, CHUNK, 3 * CHUNK)
"""Neighbours, and strangers in three chunks."""


def opened(
    disk: FakeDisk, codec: Codec | None = Codec.NONE, geometry: Geometry = GEOMETRY,
    name: SegmentId = NAME,
) -> tuple[NvmeSegment, Found]:  # fmt: skip
    """The segment at PATH, made or taken over."""
    clock = ManualClock()
    return open_nvme(PATH, CLUSTER, name, geometry, codec=codec, clock=clock, disk=disk)


def payload_place(offset: int) -> int:
    """Where in the file a payload offset lies."""
    return GEOMETRY.payload_base + offset


def compressible(page_key: bytes, size: int) -> bytes:
    """Bytes of a key that come to about a third when compressed: one of three is noise."""
    return b"".join(bytes((0, 7, each)) for each in payload(page_key, 0, size // 3 + 1))[:size]


def part(
    number: int,
    offset: int,
    *,
    data: bytes | None = None,
    size_class: int | None = None,
    counter: int = 5,
) -> PartToWrite:
    """Page `number` for the extent at `offset`; its bytes follow from its key unless given."""
    page_key = PageKey(key(number))
    data = payload(page_key, 0, PAGE) if data is None else data
    record = Record(
        RecordState.FREE, page_key, 0, Generation(generation(counter)), Incarnation(0), len(data),
        payload_checksum(data, page_key, 0), offset, size_class or size_class_of(len(data)), 1,
        ROOT_PARENT, 64,
    )  # fmt: skip
    return PartToWrite(record, memoryview(data))


def parts_at(*offsets: int) -> list[PartToWrite]:
    """One-page parts with keys from 1 on."""
    return [part(number, offset) for number, offset in enumerate(offsets, 1)]


def reading(record: Record) -> PartToRead:
    """Ask for what a record says."""
    into = memoryview(bytearray(b"\xee" * record.payload_bytes))
    place = Extent(record.offset, record.size_class)
    return PartToRead(place, record.key, record.part, record.generation, into)


def outcomes(found: Iterable[PartRead | PartWritten]) -> list[Outcome]:
    """Their outcomes."""
    return [each.outcome for each in found]


def read_back(segment: NvmeSegment, parts: Sequence[PartToWrite]) -> list[Outcome]:
    """Read what was written, at once; each is right or a miss whose place holds zeros."""
    asked = [reading(each.record) for each in parts]
    found = segment.read(asked)
    for wanted, each, place in zip(parts, found, asked, strict=True):
        right = wanted.payload if each.outcome is OK else bytes(len(wanted.payload))
        assert place.into == right, (each, wanted.record.offset)
    return outcomes(found)


def require_never_wrong(segment: NvmeSegment, found: Found) -> set[int]:
    """Read all that was adopted: the offsets of those that are right; none is another's bytes."""
    right = set()
    for record in adopted_records(segment.records, found):
        asked = reading(record)
        (answer,) = segment.read([asked])
        if answer.outcome is OK:
            assert asked.into == payload(record.key, 0, record.payload_bytes), record
            right.add(record.offset)
        else:
            assert not any(asked.into), record
    return right


def stretch(offset: int, count: int = 1, size_class: int = PAGE) -> Stretch:
    """Neighbours from `offset` on, in one chunk."""
    start = GEOMETRY.chunk_start(offset, size_class)
    return Stretch(0, count, start, (offset - start) // size_class, offset)
