"""Two replicas race for one read: what the caller gets, and what never touches his memory.

Tries are ended by events, in whichever order a test wants; nothing depends on how long it takes.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from kvstore.client import hedged_reads
from kvstore.client.counters import ClientCounters
from kvstore.client.hedge_delay import DELAY_MAX_S, SAMPLES_MIN
from kvstore.client.hedged_reads import (
    HEDGED_BYTES_MAX,
    TRIES_MAX,
    TRY_MAX_S,
    Hedger,
    HedgingMover,
)
from kvstore.segment import Geometry
from kvstore.transfer.degraded import DegradedReads
from kvstore.transfer.memory import Memory
from kvstore.transfer.shm import ShmTransport
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.stripes import Shard, StripedPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.transfer.choice import Choice
    from kvstore.transfer.transport import Transport

SIZE = 4096
PAGES = 2
TIMEOUT_S = 30.0
PATIENCE_S = 60.0
GOOD, BAD = bytes(PAGES), bytes([Outcome.TRANSPORT]) * PAGES
MIXED = bytes([Outcome.OK, Outcome.STALE])
BEFORE = b"\xee"


def span(worker: str, pages: int = PAGES, size: int = SIZE) -> ReadSpan:
    segment = SegmentRef(f"s-{worker}", 1, "dram", Geometry(1 << 26), worker, "h", ())
    places = tuple(size * (1 + 2 * i) for i in range(pages))  # with gaps
    columns = bytes(8 * pages)
    return ReadSpan(segment, 0, size, bytes(32 * pages), columns, columns, columns, places)


class Replica:
    """What one worker answers, once it may."""

    def __init__(self, fill: bytes, outcomes: bytes = GOOD) -> None:
        self.fill = fill
        self.outcomes = outcomes
        self.may_end = threading.Event()
        self.ended = threading.Event()
        self.on_asked: Callable[[], object] = lambda: None
        self.timeouts_s: list[float] = []

    def at_once(self) -> Replica:
        """Nobody needs to wait."""
        self.may_end.set()
        return self

    def read(self, asked: ReadSpan, room: Memory, timeout_s: float) -> bytes:
        """Deliver."""
        self.timeouts_s.append(timeout_s)
        self.on_asked()
        assert self.may_end.wait(PATIENCE_S)
        for place, code in zip(asked.places, self.outcomes, strict=True):
            byte = self.fill if code == Outcome.OK else b"\0"
            room.view[place : place + asked.part_bytes] = byte * asked.part_bytes
        self.ended.set()
        return self.outcomes


class Race:
    """A store's hedger, and two replicas of the same pages."""

    def __init__(self, first: Replica, other: Replica) -> None:
        self.hedger = Hedger()
        self.replicas = {"first": first, "other": other}
        self.into = Memory.of("into", bytearray(BEFORE * (8 * SIZE)), writable=True)
        self.late_s: list[float] = []

    def warm(self, took_s: float = 0.0) -> Race:
        """Reads of this size usually take so long."""
        for _ in range(SAMPLES_MIN):
            self.hedger.note(span("first"), took_s)
        return self

    def read(self, timeout_s: float = TIMEOUT_S) -> bytes | None:
        """Race."""
        spans = span("first"), span("other")
        return self.hedger.read(spans, self.into, timeout_s, self.attempt, self.late_s.append)

    def attempt(self, asked: ReadSpan, room: Memory, timeout_s: float) -> bytes:
        return self.replicas[asked.segment.worker].read(asked, room, timeout_s)

    def assert_holds(self, *pages: bytes) -> None:
        """Each place is filled with its byte, and nothing beside the places was touched."""
        want = bytearray(BEFORE * len(self.into.view))
        for place, byte in zip(span("first").places, pages, strict=True):
            want[place : place + SIZE] = byte * SIZE
        assert bytes(self.into.view) == bytes(want)


@contextmanager
def racing(first: Replica, other: Replica, usual_s: float = 0.0) -> Iterator[Race]:
    race = Race(first, other).warm(usual_s)
    try:
        yield race
    finally:
        for replica in (first, other):
            replica.may_end.set()
        race.hedger.close()


def test_a_read_in_time_is_not_hedged() -> None:
    with racing(Replica(b"1").at_once(), Replica(b"2"), usual_s=DELAY_MAX_S) as race:
        assert race.read() == GOOD
        race.assert_holds(b"1", b"1")
        assert race.hedger.counters == ClientCounters(hedgeable_reads=1)
        assert race.late_s == []


def test_a_late_read_is_won_by_the_other_replica() -> None:
    with racing(Replica(b"1"), Replica(b"2").at_once()) as race:
        assert race.read() == GOOD
        race.assert_holds(b"2", b"2")
        assert race.hedger.counters == ClientCounters(hedgeable_reads=1, hedges=1, hedges_won=1)
        assert len(race.late_s) == 1


def test_the_loser_never_touches_the_memory_of_the_caller() -> None:
    first = Replica(b"1")
    with racing(first, Replica(b"2").at_once()) as race:
        race.read()
        first.may_end.set()
        assert first.ended.wait(PATIENCE_S)
        race.hedger.close()
        race.assert_holds(b"2", b"2")


def test_the_room_of_a_loser_is_not_used_before_it_has_ended() -> None:
    first, other = Replica(b"1"), Replica(b"2").at_once()
    with racing(first, other) as race:
        for _ in range(3):
            race.hedger._budget._left = 1.0  # noqa: SLF001 -- as after many reads in time
            assert race.read() == GOOD
            race.assert_holds(b"2", b"2")
        first.may_end.set()
        race.hedger.close()
        assert len(race.hedger._rooms) == 4  # noqa: SLF001 -- three first ones and the other's


def test_what_won_late_is_taken_too() -> None:
    first, other = Replica(b"1"), Replica(b"2")
    other.on_asked = first.may_end.set
    with racing(first, other) as race:
        assert race.read() == GOOD
        race.assert_holds(b"1", b"1")
        assert race.hedger.counters == ClientCounters(hedgeable_reads=1, hedges=1)


@pytest.mark.parametrize("outcomes", [BAD, MIXED])
def test_a_hedge_that_fails_leaves_the_read_to_the_first(outcomes: bytes) -> None:
    first, other = Replica(b"1"), Replica(b"2", outcomes).at_once()
    other.on_asked = first.may_end.set
    with racing(first, other) as race:
        assert race.read() == GOOD
        race.assert_holds(b"1", b"1")


@pytest.mark.parametrize("outcomes", [BAD, MIXED])
def test_a_failure_in_time_is_told_at_once(outcomes: bytes) -> None:
    with racing(Replica(b"1", outcomes).at_once(), Replica(b"2"), usual_s=DELAY_MAX_S) as race:
        assert race.read() == outcomes
        race.assert_holds(*[b"\0" if code else b"1" for code in outcomes])
        assert race.hedger.counters.hedges == 0


@pytest.mark.parametrize("outcomes", [BAD, MIXED])
def test_a_failure_while_the_hedge_runs_waits_for_it(outcomes: bytes) -> None:
    first, other = Replica(b"1", outcomes), Replica(b"2")

    def fail_first() -> None:
        first.may_end.set()
        assert first.ended.wait(PATIENCE_S)
        other.may_end.set()

    other.on_asked = fail_first
    with racing(first, other) as race:
        assert race.read() == GOOD
        race.assert_holds(b"2", b"2")


def test_if_both_fail_the_first_says_why() -> None:
    first, other = Replica(b"1", MIXED), Replica(b"2", BAD).at_once()
    other.on_asked = first.may_end.set
    with racing(first, other) as race:
        assert race.read() == MIXED
        race.assert_holds(b"1", b"\0")


def test_it_ends_by_the_deadline_with_nothing_delivered() -> None:
    with racing(Replica(b"1"), Replica(b"2")) as race:
        assert race.read(timeout_s=0.02) == BAD
        race.assert_holds(b"\0", b"\0")


def test_tries_have_a_bound_of_their_own() -> None:
    first = Replica(b"1").at_once()
    with racing(first, Replica(b"2")) as race:
        race.read(timeout_s=600.0)
    assert max(first.timeouts_s) <= TRY_MAX_S


def test_before_enough_samples_nothing_is_hedged() -> None:
    race = Race(Replica(b"1"), Replica(b"2"))
    assert race.read() is None
    race.assert_holds(BEFORE, BEFORE)
    race.hedger.close()


def test_without_a_hedge_left_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Replica(b"1")

    class Empty:
        def earn(self) -> None:
            """Nothing."""

        def spend(self) -> bool:
            first.may_end.set()
            return False

    monkeypatch.setattr(hedged_reads, "HedgeBudget", Empty)
    with racing(first, Replica(b"2")) as race:
        assert race.read() == GOOD
        race.assert_holds(b"1", b"1")
        assert race.hedger.counters == ClientCounters(hedgeable_reads=1, hedges_withheld=1)


def test_tries_under_way_are_bounded() -> None:
    first = Replica(b"1")
    with racing(first, Replica(b"2").at_once()) as race:
        for _ in range(TRIES_MAX - 1):
            race.hedger._budget._left = 1.0  # noqa: SLF001 -- as after many reads in time
            assert race.read() == GOOD
        race.hedger._budget._left = 1.0  # noqa: SLF001 -- as above
        assert race.read(timeout_s=0.02) == BAD  # no thread for the other replica
        assert race.read() is None
        assert race.hedger.counters.hedges_withheld == 1
        assert len(race.hedger._rooms) <= TRIES_MAX  # noqa: SLF001 -- the bound is the test


def test_after_closing_nothing_is_hedged_and_no_thread_is_left() -> None:
    with racing(Replica(b"1").at_once(), Replica(b"2").at_once()) as race:
        race.read()  # by one or, on a busy machine, both
        race.hedger.close()
        race.hedger.close()
        assert race.read() is None
    assert not [each for each in threading.enumerate() if each.name == "kvharbor-hedge"]


class Ways:
    """A choice that leads to whatever transport a test names."""

    def __init__(self, way: object) -> None:
        self.way = way
        self.late: list[ReadSpan] = []

    def transport(self, segment: SegmentRef, timeout_s: float) -> Transport:
        del segment, timeout_s
        return cast("Transport", self.way)

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        raise AssertionError((segment, timeout_s))

    def read(self, asked: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        raise AssertionError((asked, into, timeout_s))

    def note_read(self, way: object, asked: ReadSpan, outcomes: bytes, took_s: float) -> None:
        """Learn nothing."""

    def note_late(self, asked: ReadSpan, after_s: float) -> None:
        del after_s
        self.late.append(asked)


class Shm(ShmTransport):
    """On this host."""

    def __init__(self) -> None:
        """Nothing of a transport is needed but its kind."""

    def read(self, asked: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        del into, timeout_s
        return bytes(len(asked))


def answer_at_once(asked: ReadSpan, into: Memory, timeout_s: float) -> bytes:
    del into, timeout_s
    return bytes(len(asked))


REMOTE = SimpleNamespace(read=answer_at_once)


def reading(way: object, size_bytes: int = 8 * SIZE) -> tuple[HedgingMover, Hedger]:
    hedger = Hedger()
    into = Memory.of("into", bytearray(size_bytes), writable=True)
    return HedgingMover(cast("Choice", Ways(way)), into, hedger), hedger


def test_reads_over_a_network_are_hedged_once_enough_were_seen() -> None:
    mover, hedger = reading(REMOTE)
    for _ in range(SAMPLES_MIN + 1):
        assert mover.read([span("first")] * 2, TIMEOUT_S, [span("other"), None]) == [GOOD, GOOD]
    assert hedger.counters.hedgeable_reads == SAMPLES_MIN + 1
    assert hedger._threads._threads  # noqa: SLF001 -- the last read was a race
    hedger.close()


def test_what_lies_on_this_host_or_nowhere_else_or_is_large_is_not_hedged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DegradedReads, "read", lambda self, asked, into, timeout_s: GOOD)
    one, two = span("first"), span("other")
    shards = (Shard(0, 0, 0, bytes(32), 0, 1, 0),)
    decoded = msgspec.structs.replace(one, stripes=(StripedPage(1, 1, 1, shards),) * PAGES)
    for way, asked, other in (
        (Shm(), one, two),
        (REMOTE, one, None),
        (REMOTE, decoded, two),
        (REMOTE, span("first", 2, HEDGED_BYTES_MAX), span("other", 2, HEDGED_BYTES_MAX)),
    ):
        mover, hedger = reading(way)
        for _ in range(SAMPLES_MIN + 1):
            assert mover.read([asked], TIMEOUT_S, [other]) == [GOOD]
        assert hedger.counters == ClientCounters()
        hedger.close()


def test_the_worker_that_was_late_is_told_to_who_chooses() -> None:
    first, other = Replica(b"1"), Replica(b"2").at_once()
    replicas = {"first": first, "other": other}

    def read(asked: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        return replicas[asked.segment.worker].read(asked, into, timeout_s)

    ways = Ways(SimpleNamespace(read=read))
    hedger = Hedger()
    for _ in range(SAMPLES_MIN):
        hedger.note(span("first"), 0.0)
    into = Memory.of("into", bytearray(8 * SIZE), writable=True)
    mover = HedgingMover(cast("Choice", ways), into, hedger)
    assert mover.read([span("first")], TIMEOUT_S, [span("other")]) == [GOOD]
    assert [each.segment.worker for each in ways.late] == ["first"]
    first.may_end.set()
    hedger.close()
