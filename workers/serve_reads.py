"""Pages sent over a stream, and records checked for a reader elsewhere.

Reads need no permission of the state machine: the records say what is there, before the first byte
and again after the last (I8). They go on while the worker has fenced itself. Must not know leases.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.record import is_sealed_as
from kvstore.segment import size_class_of
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.rpc.frame_socket import FrameSocket
    from workers.tiers.tier import Segment


class Asked(msgspec.Struct, gc=False):
    """The pages of one request, columns unpacked."""

    part: int
    part_bytes: int
    keys: bytes
    offsets: array[int]
    generations: array[int]


def check_records(message: CheckRecords, segments: Mapping[str, Segment]) -> RecordsChecked:
    """Which of these are still SEALED as named. BadValue for columns that do not fit."""
    asked = asked_pages(message)
    return RecordsChecked(_sealed(asked, _segment(message, segments)))


def send_extents(
    link: FrameSocket, request_id: int, message: ReadExtents, segments: Mapping[str, Segment]
) -> int:
    """Answer with what is there; the payload bytes sent. BadValue before anything is sent."""
    asked = asked_pages(message)
    segment = _segment(message, segments)
    outcomes = _sealed(asked, segment)
    views: list[memoryview] = []
    if segment is not None:
        pages = (page for page, outcome in enumerate(outcomes) if outcome == Outcome.OK)
        views = _views(segment.payload, asked, pages=list(pages))
    link.send(FrameKind.REPLY, request_id, ReadStarted(outcomes), raw=views)
    # The bytes are in the socket by now: what the records say next is said of them.
    link.send(FrameKind.REPLY, request_id, ReadEnded(_sealed(asked, segment)))
    return sum(len(view) for view in views)


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
    size_class = size_class_of(message.part_bytes)
    for offset in array("Q", message.offsets):
        found.geometry.check_extent(offset, size_class)
    return found


def _sealed(asked: Asked, segment: Segment | None) -> bytes:
    """One Outcome a page: OK while its record names exactly this page, else STALE."""
    if segment is None:
        return bytes((Outcome.STALE,)) * len(asked.offsets)
    size_class = size_class_of(asked.part_bytes)
    read, incarnation = segment.records.read, segment.incarnation
    outcomes = bytearray(len(asked.offsets))
    for i, offset in enumerate(asked.offsets):
        key = asked.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        row = bytes(read(offset, size_class))
        if not is_sealed_as(row, key, asked.part, asked.generations[i], incarnation):
            outcomes[i] = Outcome.STALE
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
