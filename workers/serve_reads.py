"""Pages sent over a stream, and records checked for a reader elsewhere.

Reads need no permission of the state machine: the records say what is there, before the first byte
and again after the last (I8). They go on while the worker has fenced itself. The tables are asked
for the classes of a disk's extents alone: a wrong one finds no such record. Must not know leases.
"""

from __future__ import annotations

import mmap
from array import array
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES, Generation, PageKey
from kvstore.record import is_sealed_as
from kvstore.segment import size_class_of
from kvstore.transfer.memory import Memory
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.transfers import (
    CheckRecords,
    ReadEnded,
    ReadExtents,
    ReadStarted,
    RecordsChecked,
    StageExtents,
)
from workers.tiers.guarded_file import OutOfService
from workers.tiers.hbm import HbmSegment
from workers.tiers.nvme import NvmeSegment
from workers.tiers.part_io import Extent, PartToRead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from workers.extent_table import SegmentTable
    from workers.tiers.tier import Segment

LOADED_BYTES: Final = 4 * limits.MIB
"""Of a disk's or a device's pages in memory at once, for each connection."""


class Asked(msgspec.Struct, gc=False):
    """The pages of one request, columns unpacked."""

    part: int
    part_bytes: int
    keys: bytes
    offsets: array[int]
    generations: array[int]

    def key(self, page: int) -> PageKey:
        """The key of one page."""
        return PageKey(self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES])


def check_records(
    message: CheckRecords, segments: Mapping[str, Segment], tables: Mapping[str, SegmentTable]
) -> RecordsChecked:
    """Which of these are still SEALED as named. BadValue for columns that do not fit."""
    asked = asked_pages(message)
    segment = _segment(message, segments)
    return RecordsChecked(_sealed(asked, segment, _classes(asked, segment, tables)))


def send_extents(
    link: FrameSocket,
    request_id: int,
    message: ReadExtents,
    segments: Mapping[str, Segment],
    tables: Mapping[str, SegmentTable],
) -> int:
    """Answer with what is there; the payload bytes sent. BadValue before anything is sent."""
    asked = asked_pages(message)
    segment = _segment(message, segments)
    classes = _classes(asked, segment, tables)
    outcomes = _sealed(asked, segment, classes)
    pages = [page for page, outcome in enumerate(outcomes) if outcome == Outcome.OK]
    if isinstance(segment, HbmSegment | NvmeSegment):
        if isinstance(segment, HbmSegment):
            load = partial(_load_from_device, message, asked, segment)
        else:
            load = partial(_load_from_disk, asked, segment, classes)
        link.send(FrameKind.REPLY, request_id, ReadStarted(outcomes))
        ended = _send_loaded(link, asked, outcomes, load)
        link.send(FrameKind.REPLY, request_id, ReadEnded(ended))
    else:
        views = _views(segment.payload, asked, pages) if segment is not None else []
        link.send(FrameKind.REPLY, request_id, ReadStarted(outcomes), raw=views)
        # The bytes are in the socket by now: what the records say next is said of them.
        link.send(FrameKind.REPLY, request_id, ReadEnded(_sealed(asked, segment, classes)))
    return len(pages) * asked.part_bytes


def _send_loaded(
    link: FrameSocket,
    asked: Asked,
    started: bytes,
    load: Callable[[list[int], Memory, range], bytes],
) -> bytes:
    """Send the pages that were promised, a few at a time; what became of each.

    `load` brings pages to places. One that could not be brought is sent as zeros, since its bytes
    are waited for.
    """
    size, outcomes = asked.part_bytes, bytearray(started)
    stride, pages = size_class_of(size), [i for i, each in enumerate(started) if not each]
    group = max(1, min(len(pages), LOADED_BYTES // stride))
    memory = Memory.of("memory", mmap.mmap(-1, group * stride), writable=True)
    for first in range(0, len(pages), group):
        some = pages[first : first + group]
        places = range(0, len(some) * stride, stride)
        for page, outcome in zip(some, load(some, memory, places), strict=True):
            outcomes[page] = outcome
        link.send_raw([memory.view[place : place + size] for place in places])
    return bytes(outcomes)


def _load_from_disk(
    asked: Asked, segment: NvmeSegment, classes: Sequence[int],
    pages: list[int], into: Memory, places: range,
) -> bytes:  # fmt: skip
    parts = [
        PartToRead(
            Extent(asked.offsets[page], classes[page]), asked.key(page), asked.part,
            Generation(asked.generations[page]), into.view[place : place + asked.part_bytes],
        )
        for page, place in zip(pages, places, strict=True)
    ]  # fmt: skip
    return bytes(each.outcome for each in segment.read(parts))


def _load_from_device(
    message: ReadExtents, asked: Asked, segment: HbmSegment,
    pages: list[int], into: Memory, places: range,
) -> bytes:  # fmt: skip
    some = msgspec.structs.replace(
        message,
        keys=b"".join([asked.key(page) for page in pages]),
        offsets=array("Q", [asked.offsets[page] for page in pages]).tobytes(),
        generations=array("Q", [asked.generations[page] for page in pages]).tobytes(),
    )
    return segment.read(some, into, places)


def asked_pages(message: ReadExtents | CheckRecords | StageExtents) -> Asked:
    """The columns of a request; BadValue naming the one that does not fit."""
    count, rest = divmod(len(message.keys), KEY_BYTES)
    if rest or not 0 < count <= limits.BATCH_PAGES_MAX:
        want = f"1 to {limits.BATCH_PAGES_MAX} keys of {KEY_BYTES} bytes"
        raise BadValue("keys", len(message.keys), want)
    for field in ("offsets", "generations"):
        column: bytes = getattr(message, field)
        if len(column) != count * 8:
            raise BadValue(field, len(column), f"{count * 8} bytes for {count} keys")
    offsets, generations = array("Q", message.offsets), array("Q", message.generations)
    return Asked(message.part, message.part_bytes, message.keys, offsets, generations)


def _segment(
    message: ReadExtents | CheckRecords, segments: Mapping[str, Segment]
) -> Segment | None:
    """The segment in the life that the reader means (I11)."""
    found = segments.get(message.segment)
    if found is None or found.incarnation != message.incarnation:
        return None
    return found


def _classes(
    asked: Asked, segment: Segment | None, tables: Mapping[str, SegmentTable]
) -> Sequence[int]:
    """The size class of each extent. BadValue where none of the segment can be."""
    full = size_class_of(asked.part_bytes)
    classes = [full] * len(asked.offsets)
    if segment is None:
        return classes
    table = tables[segment.id] if isinstance(segment, NvmeSegment) else None
    for page, offset in enumerate(asked.offsets):
        chunk = None if table is None else table.chunk_around(offset)
        if chunk is not None:
            classes[page] = min(full, chunk.size_class)
        segment.geometry.check_extent(offset, classes[page])
    return classes


def _sealed(asked: Asked, segment: Segment | None, classes: Sequence[int]) -> bytes:
    """One Outcome a page: OK while its record names exactly this page, else STALE."""
    if segment is None:
        return bytes((Outcome.STALE,)) * len(asked.offsets)
    read, incarnation = segment.records.read, segment.incarnation
    outcomes = bytearray(len(asked.offsets))
    try:
        for i, (offset, size_class) in enumerate(zip(asked.offsets, classes, strict=True)):
            row = bytes(read(offset, size_class))
            key, generation = asked.key(i), asked.generations[i]
            if not is_sealed_as(row, key, asked.part, generation, incarnation):
                outcomes[i] = Outcome.STALE
    except OutOfService:
        return bytes((Outcome.TRANSPORT,)) * len(asked.offsets)
    return bytes(outcomes)


def _views(payload: memoryview, asked: Asked, pages: list[int]) -> list[memoryview]:
    """The payloads of these pages, neighbours as one."""
    size, found, at = asked.part_bytes, [], 0
    while at < len(pages):
        start = asked.offsets[pages[at]]
        stop = start + size
        at += 1
        while at < len(pages) and asked.offsets[pages[at]] == stop:
            stop += size
            at += 1
        found.append(payload[start:stop])
    return found
