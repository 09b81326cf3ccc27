"""A pull step by step: what is written when, and what undoes it."""

from __future__ import annotations

import errno
from array import array
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from kvstore.ids import NO_PARENT, ROOT_PARENT
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from tests.unit.worker_scripts import CHUNK, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder, opened, sealed_memfd
from workers import ingest
from workers.ingest import BufferSource, Pull, PullFailed, Target
from workers.running_pulls import RunningPulls
from workers.sharing import ClientBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.tiers.dram import DramSegment

OFFSETS = (0, PAGE, 2 * PAGE, 5 * PAGE)


class Given:
    """A source that brings pages from memory, and does something first."""

    group_bytes = PAGE  # a page at a time

    def __init__(self, pages: Pages, before: Callable[[int], None] = lambda _: None) -> None:
        self.pages = pages
        self.before = before
        self.asked: list[int] = []
        self.starts: list[int] = []
        self.cancelled = 0

    def fill(self, page: int, target: Target) -> None:
        """Copy, after `before(page)`."""
        self.asked.append(page)
        self.starts.append(target.start)
        self.before(page)
        for i in range(target.count):
            to, data = i * target.stride, self.pages.payloads[page + i]
            piece = data[target.start : target.start + target.size_bytes]
            target.view[to : to + target.size_bytes] = piece

    def cancel(self) -> None:
        """Count."""
        self.cancelled += 1


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        yield made
        made.close()


def states(pages: Pages, segment: DramSegment) -> list[RecordState]:
    """The extents' states on the segment."""
    return [RecordState.FREE if r is None else r.state for r in pages.records(segment)]


def test_a_pull_copies_verifies_and_seals(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    assert pages.put(segment, counter=9) == bytes(4)
    assert pages.stored(segment) == pages.payloads
    records = pages.records(segment)
    for i, record in enumerate(records):
        assert record is not None
        assert record.state is RecordState.SEALED
        assert (record.key, record.checksum) == (pages.keys[i], pages.checksums[i])
        assert (record.generation, record.incarnation) == (generation(9), segment.incarnation)
        assert (record.offset, record.size_class) == (OFFSETS[i], PAGE)
        assert (record.payload_bytes, record.stored_bytes, record.token_count) == (PAGE, PAGE, 64)
        assert record.parent == (pages.keys[i - 1] if i else bytes(32))


def test_named_objects_are_recorded_without_parents(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    start = pages.start(segment)
    objects = msgspec.structs.replace(start.message, parent=NO_PARENT)
    Pull(segment, msgspec.structs.replace(start, message=objects), Given(pages)).run()
    assert [r.parent for r in pages.records(segment) if r is not None] == [ROOT_PARENT] * 4


def test_records_are_reserved_before_the_first_byte_and_sealed_after_the_last(
    segment: DramSegment,
) -> None:
    pages = Pages(OFFSETS)
    seen: list[list[RecordState]] = []
    source = Given(pages, lambda _: seen.append(states(pages, segment)))
    pages.pull(segment, source).run()
    free, reserved, sealed = RecordState.FREE, RecordState.RESERVED, RecordState.SEALED
    assert seen == [[reserved] * 3 + [free]] * 3 + [[sealed] * 3 + [reserved]]
    assert states(pages, segment) == [sealed] * 4


@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, CHUNK - 5, CHUNK])
def test_parts_of_any_size(segment: DramSegment, size: int) -> None:
    stride = (size + PAGE - 1) // PAGE * PAGE
    pages = Pages(range(0, 2 * CHUNK if stride > CHUNK // 2 else 3 * stride,
                        CHUNK if stride > CHUNK // 2 else stride), size=size)  # fmt: skip
    assert not any(pages.put(segment))
    assert pages.stored(segment) == pages.payloads


@given(
    seed=st.integers(0, 1 << 32),
    size=st.sampled_from([100, PAGE, 2 * PAGE]),
    group=st.sampled_from([PAGE, 3 * PAGE, ingest.GROUP_BYTES]),
)
def test_any_places_on_both_sides(seed: int, size: int, group: int) -> None:
    random = Random(seed)
    slots = random.sample(range(8), random.randrange(1, 8))
    stride = (size + PAGE - 1) // PAGE * PAGE
    pages = Pages([slot * stride for slot in slots], size=size)
    order = random.sample(range(len(slots)), len(slots))
    data = b"".join(pages.payloads[i] for i in order)
    places = array("Q", (order.index(i) * size for i in range(len(slots))))
    with memory_folder() as folder:
        segment, _ = opened(folder / "segment")
        buffer = ClientBuffer(sealed_memfd(data), len(data))
        source = BufferSource(buffer, places, size)
        source.group_bytes = group
        outcomes = pages.pull(segment, source).run()
        assert not any(outcomes)
        assert pages.stored(segment) == pages.payloads
        buffer.close()
        segment.close()


def test_a_page_larger_than_a_group_comes_in_pieces(segment: DramSegment) -> None:
    size = 3 * PAGE + 100
    pages = Pages((0, 4 * PAGE), size=size)
    source = Given(pages)
    assert not any(pages.pull(segment, source).run())
    assert source.starts == [0, PAGE, 2 * PAGE, 3 * PAGE] * 2
    assert pages.stored(segment) == pages.payloads


def test_a_piece_that_differs_refuses_its_page_alone(segment: DramSegment) -> None:
    pages = Pages((0, 3 * PAGE), size=3 * PAGE)
    pages.payloads[0] = pages.payloads[0][: PAGE + 5] + b"?" + pages.payloads[0][PAGE + 6 :]
    assert pages.pull(segment, Given(pages)).run() == bytes((Outcome.CHECKSUM, Outcome.OK))
    assert states(pages, segment) == [RecordState.FREE, RecordState.SEALED]


def test_a_cancelled_pull_stops_between_two_pieces(segment: DramSegment) -> None:
    pages, pull = Pages((0,), size=3 * PAGE), list[Pull]()
    source = Given(pages, lambda _: pull[0].cancel())
    pull.append(pages.pull(segment, source))
    assert pull[0].run() == bytes((Outcome.FENCED,))
    assert source.starts == [0]
    assert states(pages, segment) == [RecordState.FREE]


def test_bytes_that_differ_from_the_writers_checksum_are_not_sealed(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.payloads[1] = bytes(PAGE)  # the client reused its buffer too early
    outcomes = pages.put(segment)
    assert outcomes == bytes((Outcome.OK, Outcome.CHECKSUM, Outcome.OK, Outcome.OK))
    assert states(pages, segment)[1] is RecordState.FREE


def test_the_extent_is_hashed_not_the_source(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)

    def scribble(page: int) -> None:
        if page == 2:  # the page before it was already verified
            segment.payload[PAGE] ^= 1

    source = Given(pages, scribble)
    assert not any(pages.pull(segment, source).run())
    assert pages.stored(segment)[1] != pages.payloads[1]  # a reader's checksum will find it

    class Liar(Given):
        """Brings other bytes than those it was told to."""

        def fill(self, page: int, target: Target) -> None:
            super().fill(page, target)
            target.view[7] ^= 1

    assert set(pages.pull(segment, Liar(pages)).run()) == {Outcome.CHECKSUM}


def test_a_source_that_is_lost_ends_the_rest(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)

    def lose(page: int) -> None:
        if page == 1:
            raise PullFailed(Outcome.SOURCE_LOST, "the client is gone")

    source = Given(pages, lose)
    outcomes = pages.pull(segment, source).run()
    lost = Outcome.SOURCE_LOST
    assert outcomes == bytes((Outcome.OK, lost, lost, lost))
    assert source.asked == [0, 1]
    assert states(pages, segment) == [RecordState.SEALED] + [RecordState.FREE] * 3


def test_a_fault_of_ours_ends_the_pull_and_leaves_no_record(
    segment: DramSegment, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages(OFFSETS)

    def fail(_: int) -> None:
        raise RuntimeError("a bug")

    assert set(pages.pull(segment, Given(pages, fail)).run()) == {Outcome.TRANSPORT}
    assert states(pages, segment) == [RecordState.FREE] * 4
    assert "a bug" in caplog.text


def test_a_cancelled_pull_stops_between_two_groups(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pull: list[Pull] = []

    def cancel(page: int) -> None:
        if page == 1:
            pull[0].cancel()

    source = Given(pages, cancel)
    pull.append(pages.pull(segment, source))
    outcomes = pull[0].run()
    assert outcomes == bytes((Outcome.OK, Outcome.OK, Outcome.FENCED, Outcome.FENCED))
    assert (source.asked, source.cancelled) == ([0, 1], 1)
    assert states(pages, segment)[2:] == [RecordState.FREE] * 2


def test_a_source_that_fails_because_it_was_cancelled_is_fenced(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pull: list[Pull] = []

    def cancel(_: int) -> None:
        pull[0].cancel()
        raise PullFailed(Outcome.SOURCE_LOST, "its connection was ended")

    pull.append(pages.pull(segment, Given(pages, cancel)))
    assert set(pull[0].run()) == {Outcome.FENCED}


def test_no_memory_for_a_record_table_is_no_space(
    segment: DramSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment.records, "require", full)
    pages = Pages(OFFSETS)
    source = Given(pages)
    assert set(pages.pull(segment, source).run()) == {Outcome.OUT_OF_SPACE}
    assert source.asked == []


def test_a_system_that_gives_no_locks_fails_the_pull(
    segment: DramSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(segment.locks, "try_lock", refuse)
    pages = Pages(OFFSETS)
    assert set(pages.pull(segment, Given(pages)).run()) == {Outcome.TRANSPORT}
    assert states(pages, segment) == [RecordState.FREE] * 4


@pytest.mark.parametrize("places", [[0, 1], [PAGE + 1], [1 << 63], [2 * PAGE]])
def test_pages_beyond_the_buffer_are_refused(places: list[int]) -> None:
    buffer = ClientBuffer(sealed_memfd(bytes(PAGE)), PAGE)
    with pytest.raises(BadValue, match=r"source\.offsets"):
        BufferSource(buffer, array("Q", places), PAGE)
    buffer.close()


def test_a_page_larger_than_the_buffer_is_refused() -> None:
    buffer = ClientBuffer(sealed_memfd(bytes(PAGE)), PAGE)
    with pytest.raises(BadValue, match=r"source\.offsets"):
        BufferSource(buffer, array("Q", [0]), PAGE + 1)
    buffer.close()


def test_a_cancel_may_come_before_the_pull(segment: DramSegment) -> None:
    pages, pulls = Pages(OFFSETS), RunningPulls()
    pulls.cancel(1)
    source = Given(pages)
    pull = pages.pull(segment, source)
    pulls.begin(1, pull)
    assert set(pull.run()) == {Outcome.FENCED}
    pulls.end(1)
    later = pages.pull(segment, Given(pages))
    pulls.begin(1, later)
    assert not any(later.run())


def test_all_pulls_end_when_the_worker_stops(segment: DramSegment) -> None:
    pages, pulls = Pages(OFFSETS), RunningPulls()
    sources = [Given(pages), Given(pages)]
    for number, source in enumerate(sources):
        pulls.begin(number, pages.pull(segment, source))
    pulls.cancel_all()
    assert [source.cancelled for source in sources] == [1, 1]


def test_the_group_size_is_a_fraction_of_a_cache() -> None:
    assert PAGE <= ingest.GROUP_BYTES <= 1 << 20
