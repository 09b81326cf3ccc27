"""Reads over a stream: only what its record proves is sent, and it is looked at again after."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import BadValue
from kvstore.record import RecordState
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.transfers import (
    CheckRecords,
    ReadEnded,
    ReadExtents,
    ReadStarted,
    RecordsChecked,
)
from tests.unit.worker_scripts import CHUNK, PAGE, generation, packed
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers.events import Stretch
from workers.serve_reads import check_records, send_extents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.wire.messages.base import Message
    from workers.tiers.dram import DramSegment

OFFSETS = (0, PAGE, 2 * PAGE, CHUNK)
STALE = Outcome.STALE


class Wire:
    """What a FrameSocket would have sent."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.messages: list[Message] = []
        self.raw: list[bytes] = []
        self.between = between

    def send(
        self,
        kind: FrameKind,
        request_id: int,
        message: Message,
        raw: list[memoryview] | None = None,
    ) -> None:
        """Keep a frame and its raw bytes; then something may happen."""
        assert (kind, request_id) == (FrameKind.REPLY, 4)
        self.messages.append(message)
        self.raw += [bytes(view) for view in raw or ()]
        self.between()


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        yield made
        made.close()


def question(
    kind: type[ReadExtents | CheckRecords], pages: Pages, segment: DramSegment
) -> ReadExtents | CheckRecords:
    count = len(pages.offsets)
    return kind(
        segment.id, segment.incarnation, 0, pages.size, b"".join(pages.keys),
        pages.offsets.tobytes(), packed([generation(5)] * count),
    )  # fmt: skip


def sent(owner: DramSegment, pages: Pages, wire: Wire, **changes: object) -> None:
    message = msgspec.structs.replace(question(ReadExtents, pages, owner), **changes)
    send_extents(wire, 4, message, {owner.id: owner}, {})  # type: ignore[arg-type]  # a double


@pytest.mark.parametrize("size", [PAGE, 100])
def test_sealed_pages_are_sent_in_order(segment: DramSegment, size: int) -> None:
    pages, wire = Pages(OFFSETS, size=size), Wire()
    pages.put(segment)
    sent(segment, pages, wire)
    assert wire.messages == [ReadStarted(bytes(4)), ReadEnded(bytes(4))]
    assert b"".join(wire.raw) == b"".join(pages.payloads)
    assert len(wire.raw) == (2 if size == PAGE else 4)  # neighbours go at once


CHANGES = {
    "another key": {"keys": b"".join(Pages(OFFSETS, first_key=90).keys)},
    "another generation": {"generations": packed([generation(6)] * 4)},
    "another part": {"part": 1},
    "another life": {"incarnation": 3},
    "another segment": {"segment": "elsewhere"},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_is_not_what_was_asked_for_is_not_sent(
    segment: DramSegment, changes: dict[str, object]
) -> None:
    pages, wire = Pages(OFFSETS), Wire()
    pages.put(segment)
    sent(segment, pages, wire, **changes)
    assert wire.messages == [ReadStarted(bytes((STALE,)) * 4), ReadEnded(bytes((STALE,)) * 4)]
    assert wire.raw == []


@pytest.mark.parametrize("state", [RecordState.RESERVED, RecordState.REMOVED, RecordState.FREE])
def test_only_sealed_records_are_served(segment: DramSegment, state: RecordState) -> None:
    pages, wire = Pages(OFFSETS), Wire()
    pages.put(segment)
    if state is RecordState.FREE:
        segment.records.write_free(Stretch(0, 2, 0, 0, 0), PAGE)
    else:
        segment.records.write_removed(Stretch(0, 2, 0, 0, 0), PAGE)
    sent(segment, pages, wire)
    assert wire.messages[0] == ReadStarted(bytes((STALE, STALE, 0, 0)))
    assert b"".join(wire.raw) == b"".join(pages.payloads[2:])


def test_a_flipped_bit_in_a_record_is_a_miss(segment: DramSegment) -> None:
    pages, wire = Pages(OFFSETS), Wire()
    pages.put(segment)
    segment.records.read(PAGE, PAGE)[77] ^= 1
    sent(segment, pages, wire)
    assert wire.messages[0] == ReadStarted(bytes((0, STALE, 0, 0)))


def test_a_page_freed_while_it_is_sent_is_taken_back(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    wire = Wire(lambda: segment.records.write_free(Stretch(0, 1, 0, 1, PAGE), PAGE))
    sent(segment, pages, wire)
    assert wire.messages == [ReadStarted(bytes(4)), ReadEnded(bytes((0, STALE, 0, 0)))]


def test_records_are_checked_without_bytes(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    segment.records.write_removed(Stretch(0, 1, 0, 2, 2 * PAGE), PAGE)
    message = question(CheckRecords, pages, segment)
    assert isinstance(message, CheckRecords)
    found = check_records(message, {segment.id: segment}, {})
    assert found == RecordsChecked(bytes((0, 0, STALE, 0)))


BAD = {
    "no page": {"keys": b"", "offsets": b"", "generations": b""},
    "half a key": {"keys": bytes(48)},
    "an offset too few": {"offsets": packed(OFFSETS[:3])},
    "a generation too many": {"generations": bytes(40)},
    "an offset between extents": {"offsets": array("Q", (0, 1, 2, 3)).tobytes()},
    "an offset beyond the segment": {"offsets": packed((0, PAGE, 2 * PAGE, 1 << 60))},
    "an empty part": {"part_bytes": 0},
    "a huge part": {"part_bytes": 1 << 40},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_a_question_that_contradicts_itself_is_refused_before_anything_is_sent(
    segment: DramSegment, changes: dict[str, object]
) -> None:
    pages, wire = Pages(OFFSETS), Wire()
    pages.put(segment)
    with pytest.raises(BadValue):
        sent(segment, pages, wire, **changes)
    assert wire.messages == []
