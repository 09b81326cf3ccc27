"""Reads of pages on a disk of this host, through the memory that their worker stages them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.record import RecordState
from kvstore.transfer import staged_reads
from kvstore.transfer.shm import ShmTransport
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.transfers import ReleaseStaged, Staged, StageExtents
from tests.contract.fake_worker import FakeWorker
from tests.contract.transport_ways import CHAIN, PAGES, SIZE, TIMEOUT_S, Way, hang_up_on, reply
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.mapped_segment import HeldSpan
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message

ALL_BUSY = bytes([Outcome.BUSY] * PAGES)
ALL_TRANSPORT = bytes([Outcome.TRANSPORT] * PAGES)
COLUMN = bytes(8 * PAGES)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[FakeWorker]:
    with FakeWorker(tmp_path) as made:
        yield made


@pytest.fixture
def way(worker: FakeWorker) -> Iterator[Way]:
    made = Way("shm nvme", worker)
    yield made
    made.transport.close()


def asked(worker: FakeWorker) -> list[StageExtents]:
    return [each for each in worker.seen if isinstance(each, StageExtents)]


@pytest.mark.parametrize("piece_pages", [1, 2, 4, PAGES])
@pytest.mark.parametrize("slots", [1, 4, 2 * PAGES])
def test_a_span_larger_than_the_memory_comes_bit_by_bit(
    way: Way, piece_pages: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_reads, "STAGE_PIECE_BYTES", piece_pages * SIZE)
    way.worker.staging.slots = slots
    assert way.read(way.stored()) == bytes(PAGES)
    assert way.worker.staging.taken == []


def test_pieces_are_asked_for_ahead(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "STAGE_PIECE_BYTES", 2 * SIZE)
    assert way.read(way.stored()) == bytes(PAGES)
    kinds = [type(each) for each in way.worker.seen[1:]]
    stage, release = StageExtents, ReleaseStaged
    assert kinds == [stage, stage, release, stage, release, release]


def test_pages_in_memory_are_read_without_a_word(worker: FakeWorker) -> None:
    way = Way("shm", worker)
    assert way.read(way.stored()) == bytes(PAGES)
    assert asked(worker) == []
    way.transport.close()


def test_no_room_at_all_is_busy_after_one_wait(way: Way) -> None:
    way.worker.staging.slots = 0
    assert way.read(way.stored()) == ALL_BUSY
    first, second = asked(way.worker)
    assert first.timeout_s == 0.0
    assert TIMEOUT_S / 4 < second.timeout_s <= TIMEOUT_S / 2


@pytest.mark.parametrize("times", [1, 100])
def test_a_page_whose_slot_went_to_another_is_asked_for_again(way: Way, times: int) -> None:
    staging, left = way.worker.staging, [times]

    def say(link: FrameSocket, frame: Frame) -> bool:
        message = frame.message
        if not isinstance(message, StageExtents) or not left[0]:
            return False
        left[0] -= 1
        staged = staging.stage(message, bytes(len(message.offsets) // 8))
        staging.file.write_record(CHAIN.key(0), 0, SIZE, state=RecordState.FREE)
        link.send(FrameKind.REPLY, frame.request_id, staged)
        return True

    staging.slots = 1
    way.worker.say = say
    outcomes = way.read(way.stored())
    assert outcomes == (bytes(PAGES) if times == 1 else ALL_BUSY)
    assert staging.taken == []


@pytest.mark.parametrize(
    "message",
    [
        Done(),
        Failure("bad_value", "no disk here"),
        Staged(bytes(PAGES - 1), "staging", 3, COLUMN, COLUMN),
        Staged(bytes(PAGES), "staging", 3, COLUMN[8:], COLUMN),
        Staged(bytes(PAGES), "staging", 3, COLUMN, COLUMN[8:]),
    ],
)
def test_refusals_and_nonsense_are_a_failed_transport(way: Way, message: Message) -> None:
    span = way.stored()
    way.worker.say = reply(message, StageExtents)
    assert way.read(span) == ALL_TRANSPORT
    way.worker.say = lambda link, frame: False
    assert way.read(span) == bytes(PAGES)


@pytest.mark.parametrize(
    ("segment", "incarnation", "offset"), [("x", 3, 0), ("staging", 4, 0), ("staging", 3, 1 << 40)]
)
def test_a_place_that_is_not_there_is_no_page(
    way: Way, segment: str, incarnation: int, offset: int
) -> None:
    offsets = offset.to_bytes(8, "little") * PAGES
    staged = Staged(bytes(PAGES), segment, incarnation, offsets, COLUMN)
    span = way.stored()
    says = reply(staged, StageExtents), reply(Done(), ReleaseStaged)
    way.worker.say = lambda link, frame: any(say(link, frame) for say in says)
    assert way.read(span) == ALL_BUSY


def test_a_worker_that_dies_keeps_what_was_read(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "STAGE_PIECE_BYTES", 2 * SIZE)
    way.worker.say = hang_up_on(ReleaseStaged)
    outcomes = way.read(way.stored())
    assert outcomes[:2] == bytes(2)
    assert outcomes[-2:] == ALL_TRANSPORT[:2]


def test_a_worker_that_does_not_answer_is_not_waited_for(way: Way) -> None:
    span = way.stored()
    way.worker.say = lambda link, frame: isinstance(frame.message, StageExtents)
    assert way.transport.read(span, way.into, 0.05) == ALL_TRANSPORT
    assert bytes(way.into.view) == bytes(PAGES * SIZE)


def held_by_place(found: list[HeldSpan]) -> dict[int, memoryview]:
    return {
        place: view
        for held in found
        for place, view in zip(held.places, held.views, strict=True)
        if view is not None
    }


def test_views_lock_the_staged_pages_and_release_them(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_reads, "STAGE_PIECE_BYTES", 4 * SIZE)
    way.worker.staging.slots = PAGES
    span = way.stored()
    way.flip(2)
    assert isinstance(way.transport, ShmTransport)
    outcomes, found = way.transport.hold(span, TIMEOUT_S)
    want = bytearray(PAGES)
    want[2] = Outcome.CHECKSUM
    assert outcomes == bytes(want)
    assert way.worker.staging.taken == []
    views = held_by_place(found)
    assert sorted(views) == [place for i, place in enumerate(span.places) if i != 2]
    for i, place in enumerate(span.places):
        if i != 2:
            assert views[place] == payload(CHAIN.key(i), 0, SIZE)
    assert [held.end() for held in found] == [0, 0]


def test_views_without_room_are_busy(way: Way) -> None:
    way.worker.staging.slots = 0
    assert isinstance(way.transport, ShmTransport)
    assert way.transport.hold(way.stored(), TIMEOUT_S) == (ALL_BUSY, [])
