"""How the pages of a copy are read, and what is said of those that were read in vain."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, cast

import pytest

from kvstore import limits
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import ReadSpan, all_of
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.puts import PeerSource
from tests.fakes import LoopbackTransport, ManualClock
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers import peer_source
from workers.ingest import PullFailed, Target
from workers.peer_source import PeerPages, PeerReads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transfer.choice import Choice
    from workers.tiers.dram import DramSegment

FROM = (0, PAGE, 2 * PAGE, CHUNK)
REF = SegmentRef("v-dram0", 3, "dram", GEOMETRY, "v", "host", (Address("tcp", "v:1", 0),))
ROOM_BYTES = 64 * PAGE


class Way(LoopbackTransport):
    """A worker whose answers take as long as a test says."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.takes_s = 0.0
        self.timeouts: list[float] = []
        self._clock = clock

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """Bring what the span names, after a while."""
        self._clock.advance(self.takes_s)
        self.timeouts.append(timeout_s)
        return super().read(span, into, timeout_s)


class Ways:
    """In the place of a Choice: one way, or none."""

    def __init__(self, way: Way) -> None:
        self.way: Way | None = way
        self.noted: list[tuple[bytes, float]] = []

    def transport(self, segment: SegmentRef, timeout_s: float) -> Way | None:
        """The only one."""
        assert (segment, timeout_s > 0) == (REF, True)
        return self.way

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        """The best there is."""
        return None if self.transport(segment, timeout_s) is None else 0

    def kind_of(self, way: Way) -> str:
        """As it says."""
        assert way is self.way
        return "loopback"

    def note_read(self, way: Way, span: ReadSpan, outcomes: bytes, took_s: float) -> None:
        """Of use to whoever reads next."""
        assert (way, span.segment) == (self.way, REF)
        self.noted.append((outcomes, took_s))

    def close(self) -> None:
        """No way any more."""
        self.way = None


class Peer:
    """Another worker with four pages, and the way to it."""

    def __init__(self, size: int = PAGE) -> None:
        self.clock = ManualClock()
        self.way = Way(self.clock)
        self.ways = Ways(self.way)
        self.came: list[tuple[str, int]] = []
        choice = cast("Choice", self.ways)
        self.reads = PeerReads(choice, self.clock, lambda *came: self.came.append(came))
        self.pages = Pages(range(0, 4 * size, size), size=size)
        self.way.pages = {
            (REF.segment, offset): (key, 0, generation(5), data)
            for offset, key, data in zip(FROM, self.pages.keys, self.pages.payloads, strict=True)
        }

    def spoil(self, page: int, outcome: Outcome) -> None:
        """What is answered for a page, once."""
        self.way.spoil[REF.segment, FROM[page]] = [outcome]

    def source(self, segment: DramSegment) -> PeerPages:
        """The pages of a copy to the first extents of a segment."""
        generations = array("Q", [generation(5)] * 4).tobytes()
        where = PeerSource(REF, array("Q", FROM).tobytes(), generations)
        return self.reads.source(self.pages.start(segment, 6, where))


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        yield made
        made.close()


def target(count: int = 4, size: int = PAGE) -> Target:
    memory = Memory.of("room", bytearray(ROOM_BYTES), writable=True)
    return Target(memory.view, memory.address, size, size, count)


def test_pages_come_straight_to_their_extents_and_are_counted(segment: DramSegment) -> None:
    peer = Peer()
    source = peer.source(segment)
    assert peer.pages.pull(segment, source, 6).run() == bytes(4)
    assert peer.pages.stored(segment) == peer.pages.payloads
    assert source.explained(bytes(4)) == bytes(4)
    assert sum(size for _, size in peer.came) == 4 * PAGE


def test_what_was_read_in_vain_is_told_apart_from_what_arrived_damaged(
    segment: DramSegment,
) -> None:
    peer = Peer()
    peer.spoil(0, Outcome.STALE)
    peer.spoil(1, Outcome.CHECKSUM)
    peer.spoil(2, Outcome.BUSY)
    source = peer.source(segment)
    outcomes = peer.pages.pull(segment, source, 6).run()
    assert outcomes == bytes((Outcome.CHECKSUM,) * 3 + (0,))
    said = bytes((Outcome.SOURCE_LOST, Outcome.CHECKSUM, Outcome.BUSY, 0))
    assert source.explained(outcomes) == said
    fenced = bytes((Outcome.FENCED,) * 4)
    assert source.explained(fenced) == fenced, "nobody hashed these"
    damaged_here = bytes((0, 0, 0, Outcome.CHECKSUM))
    assert source.explained(damaged_here) == damaged_here


def test_one_read_takes_no_longer_than_its_bytes_may(segment: DramSegment) -> None:
    peer = Peer()
    source = peer.source(segment)
    source.fill(0, target())
    longest_s = limits.READ_STALL_MAX_S + 4 * PAGE / limits.PUT_BYTES_PER_S_MIN
    assert peer.way.timeouts == [longest_s]


def test_all_reads_take_no_longer_than_a_put_may(segment: DramSegment) -> None:
    peer = Peer()
    source = peer.source(segment)
    left_s = 0.25
    peer.clock.advance(limits.put_timeout_s(4 * PAGE) - left_s)
    source.fill(0, target())
    assert peer.way.timeouts == [pytest.approx(left_s)]


def test_a_way_by_which_nothing_comes_ends_the_copy(segment: DramSegment) -> None:
    peer = Peer()
    peer.way.close()
    with pytest.raises(PullFailed) as failed:
        peer.source(segment).fill(0, target())
    assert failed.value.outcome is Outcome.TRANSPORT


def test_some_pages_that_did_not_come_do_not_end_the_copy(segment: DramSegment) -> None:
    peer = Peer()
    peer.spoil(1, Outcome.TRANSPORT)
    source = peer.source(segment)
    source.fill(0, target())
    outcomes = bytes((0, Outcome.CHECKSUM, 0, 0))
    assert source.explained(outcomes) == bytes((0, Outcome.TRANSPORT, 0, 0))


def test_ways_are_given_up_by_the_rules_of_every_reader(segment: DramSegment) -> None:
    peer = Peer()
    peer.way.takes_s = limits.READ_STALL_MAX_S
    peer.spoil(1, Outcome.TRANSPORT)
    peer.source(segment).fill(0, target())
    said = bytes((0, Outcome.TRANSPORT, 0, 0))
    assert peer.ways.noted == [(said, limits.READ_STALL_MAX_S)]


def test_without_a_way_nothing_is_read(segment: DramSegment) -> None:
    peer = Peer()
    peer.reads.close()
    with pytest.raises(PullFailed) as failed:
        peer.source(segment).fill(0, target())
    assert failed.value.outcome is Outcome.TRANSPORT
    assert not peer.came


def test_a_copy_that_is_cancelled_reads_nothing_more(segment: DramSegment) -> None:
    peer = Peer()
    source = peer.source(segment)
    source.fill(0, target(2))
    source.cancel()
    with pytest.raises(PullFailed) as failed:
        source.fill(2, target(2))
    assert failed.value.outcome is Outcome.FENCED
    assert len(peer.way.timeouts) == 1


def test_pages_larger_than_a_group_are_read_whole(
    segment: DramSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_source, "GROUP_BYTES", PAGE)
    peer = Peer(size=4 * PAGE)
    source = peer.source(segment)
    assert source.group_bytes == 4 * PAGE
    assert peer.pages.pull(segment, source, 6).run() == bytes(4)
    assert len(peer.way.timeouts) == 4
    assert peer.pages.stored(segment) == peer.pages.payloads


def test_a_room_is_the_same_each_time(segment: DramSegment) -> None:
    source = Peer().source(segment)
    with source.room(CHUNK) as first, source.room(CHUNK) as second:
        assert first is second
        assert len(first.view) == CHUNK


def test_every_outcome_of_a_read_is_one_of_a_copy(segment: DramSegment) -> None:
    peer = Peer()
    for outcome in Outcome:
        source = peer.source(segment)
        peer.spoil(0, outcome)
        source.fill(0, target(2))
        said = source.explained(bytes((Outcome.CHECKSUM, 0)) + all_of(Outcome.OK, 2))
        want = {Outcome.OK: Outcome.CHECKSUM, Outcome.STALE: Outcome.SOURCE_LOST}
        assert said[0] == want.get(outcome, outcome)
