"""Degraded reads: any k shards will do, and what they do not prove to be the page is no hit."""

from __future__ import annotations

from itertools import combinations
from threading import Barrier, Thread
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.transfer import degraded
from kvstore.transfer.degraded import DegradedReads
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.stripes import StripedPage
from tests.unit.stripe_shards import PART_BYTES, Stripes

if TYPE_CHECKING:
    from kvstore.transfer.transport import ReadSpan

PLACES = (PART_BYTES, 3 * PART_BYTES)
CODES = [(4, 2), (2, 1), (1, 1)]


def names(numbers: tuple[int, ...]) -> set[str]:
    return {f"s{number}" for number in numbers}


def read(stripes: Stripes, number: int = 0, timeout_s: float = 60.0) -> tuple[bytes, bytearray]:
    """Outcomes of reading this shard of two stripes, and all of the destination."""
    into = bytearray(b"\xff" * (4 * PART_BYTES))
    memory = Memory.of("into", into, writable=True)
    span = stripes.span(number, PLACES)
    return DegradedReads(stripes.read, stripes.rank).read(span, memory, timeout_s), into


def is_right(stripes: Stripes, number: int, into: bytearray) -> bool:
    return all(
        into[place : place + PART_BYTES] == stripes.payload(stripe, number)
        for stripe, place in enumerate(PLACES)
    )


@pytest.mark.parametrize(("k", "m"), CODES)
def test_a_page_is_read_whichever_m_shards_are_lost_with_it(k: int, m: int) -> None:
    for lost in (each for n in range(m) for each in combinations(range(k + m), n)):
        for number in range(k + m):
            stripes = Stripes(k, m, 2)
            stripes.lost = names(lost)
            outcomes, into = read(stripes, number)
            assert outcomes == bytes(2), (lost, number)
            assert is_right(stripes, number, into), (lost, number)


@pytest.mark.parametrize(("k", "m"), CODES)
def test_one_shard_more_and_it_is_a_miss_that_leaves_zeros(k: int, m: int) -> None:
    for lost in combinations(range(1, k + m), m):
        stripes = Stripes(k, m, 2)
        stripes.lost = names(lost)
        outcomes, into = read(stripes)
        assert outcomes == bytes([Outcome.TRANSPORT]) * 2, lost
        for place in PLACES:
            assert not any(into[place : place + PART_BYTES]), lost


def test_no_more_is_read_than_is_needed_and_pages_share_a_read() -> None:
    stripes = Stripes(4, 2, 2)
    read(stripes)
    assert sorted(stripes.reads) == ["s1", "s2", "s3", "s4"]


def test_places_of_other_pages_are_left_alone() -> None:
    _, into = read(Stripes(4, 2, 2))
    assert into[:PART_BYTES] == into[2 * PART_BYTES : 3 * PART_BYTES] == b"\xff" * PART_BYTES


def test_a_damaged_shard_is_replaced_by_another() -> None:
    stripes = Stripes(4, 2, 2)
    stripes.damaged = {"s2"}
    outcomes, into = read(stripes)
    assert outcomes == bytes(2)
    assert is_right(stripes, 0, into)
    assert sorted(stripes.reads[:4]) == ["s1", "s2", "s3", "s4"]
    assert stripes.reads[4:] == ["s5"]


def test_near_shards_are_read_first_and_those_without_a_way_never() -> None:
    stripes = Stripes(4, 2, 2)
    ranks = {"s1": 5, "s2": None, "s3": 1, "s4": 1, "s5": 0}

    def rank(segment: SegmentRef, timeout_s: float) -> int | None:
        assert timeout_s > 0
        return ranks.get(segment.segment, 9)

    memory = Memory.of("into", bytearray(4 * PART_BYTES), writable=True)
    assert DegradedReads(stripes.read, rank).read(stripes.span(0, PLACES), memory, 9) == bytes(2)
    assert sorted(stripes.reads) == ["s1", "s3", "s4", "s5"]


def test_shards_of_two_stripes_are_never_taken_for_the_page() -> None:
    """I37: each shard is what it should be, and yet they are not of one stripe."""
    stripes = Stripes(4, 2, 2)
    strangers = {shard.number: shard for shard in stripes.shards[1]}
    page = stripes.page(0, 0)
    mixed = tuple(strangers[shard.number] if shard.number == 3 else shard for shard in page.shards)
    span = msgspec.structs.replace(
        stripes.span(0, PLACES[:1]), stripes=(StripedPage(4, 2, 0, mixed),)
    )
    into = bytearray(b"\xff" * (4 * PART_BYTES))
    reads = DegradedReads(stripes.read, stripes.rank)
    memory = Memory.of("into", into, writable=True)
    assert reads.read(span, memory, 9.0) == bytes([Outcome.CHECKSUM])
    assert not any(into[PLACES[0] : PLACES[0] + PART_BYTES])


def test_shards_come_at_once_from_all_who_have_them() -> None:
    stripes, meeting = Stripes(4, 2, 2), Barrier(4)

    def read_with_the_others(span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        meeting.wait(60.0)
        return stripes.read(span, into, timeout_s)

    into = bytearray(4 * PART_BYTES)
    memory = Memory.of("into", into, writable=True)
    reads = DegradedReads(read_with_the_others, stripes.rank)
    assert reads.read(stripes.span(0, PLACES), memory, 9.0) == bytes(2)
    assert is_right(stripes, 0, into)


def test_without_threads_they_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = Thread.start

    def refuse_the_third(self: Thread) -> None:
        started.append(self)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(Thread, "start", refuse_the_third)
    stripes = Stripes(4, 2, 2)
    outcomes, into = read(stripes)
    assert outcomes == bytes(2)
    assert is_right(stripes, 0, into)


def test_no_time_is_a_miss_and_asks_nobody() -> None:
    stripes = Stripes(4, 2, 2)
    outcomes, _ = read(stripes, timeout_s=0.0)
    assert outcomes == bytes([Outcome.TRANSPORT]) * 2
    assert stripes.reads == []


def test_many_pages_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(degraded, "ROOM_BYTES_MAX", 5 * PART_BYTES)
    stripes = Stripes(4, 2, 2)
    outcomes, into = read(stripes)
    assert outcomes == bytes(2)
    assert is_right(stripes, 0, into)
    assert len(stripes.reads) == 8


def test_a_part_of_a_span_has_its_own_stripes() -> None:
    stripes = Stripes(4, 2, 2)
    piece = stripes.span(0, PLACES).cut(1, 2)
    memory = Memory.of("into", bytearray(4 * PART_BYTES), writable=True)
    assert DegradedReads(stripes.read, stripes.rank).read(piece, memory, 9.0) == b"\0"
    assert memory.view[PLACES[1] : PLACES[1] + PART_BYTES] == stripes.payload(1, 0)
