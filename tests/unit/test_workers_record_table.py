"""Record tables on a mapped segment: written, read back, and taken over after any damage."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.ids import ROOT_PARENT, Incarnation
from kvstore.record import RECORD_BYTES, Record, RecordState, pack_record, unpack_record
from kvstore.segment import HEADER_BYTES
from tests.fakes import adopted_records
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers import record_table
from workers.events import Listed, Stretch
from workers.record_table import RecordTable
from workers.tiers.disk import next_data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.record_table import Found
    from workers.tiers.dram import DramSegment

OFFSETS = (0, PAGE, 3 * PAGE)


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        yield made
        made.close()


def written(segment: DramSegment, pages: Pages, **changes: object) -> None:
    """Write the pages' records again, changed."""
    for record in pages.records(segment):
        assert record is not None
        row = segment.records.read(record.offset, record.size_class)
        row[:] = pack_record(msgspec.structs.replace(record, **changes))


def taken_over(segment: DramSegment) -> Found:
    """What the next start would find."""
    return segment.records.take_over(segment.incarnation, Incarnation(segment.incarnation + 1))


def is_empty(segment: DramSegment) -> bool:
    """Whether every record is FREE."""
    area = os.pread(segment.ownership, GEOMETRY.payload_base - HEADER_BYTES, HEADER_BYTES)
    return not any(area)


def listed_rows(segment: DramSegment, *listed: Listed) -> list[Record | None]:
    """The rows of the first chunk's listed extents."""
    rows = segment.records.rows(0, PAGE, listed)
    assert len(rows) == len(listed) * RECORD_BYTES
    return [unpack_record(rows[at : at + RECORD_BYTES]) for at in range(0, len(rows), RECORD_BYTES)]


def test_rows_are_the_records_of_what_is_listed(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    sealed = RecordState.SEALED
    rows = listed_rows(segment, Listed(0, sealed, generation(5)), Listed(3, sealed, generation(5)))
    first, _, last = pages.records(segment)
    assert rows == [first, last]


def test_a_damaged_record_is_listed_as_something_nobody_can_serve(segment: DramSegment) -> None:
    Pages(OFFSETS).put(segment)
    segment.records.read(0, PAGE)[20] ^= 1
    (row,) = listed_rows(segment, Listed(0, RecordState.SEALED, generation(5)))
    assert row is not None
    assert (row.state, row.offset, row.size_class) == (RecordState.REMOVED, 0, PAGE)
    assert (row.generation, row.key) == (generation(5), ROOT_PARENT)


def test_a_record_that_is_not_written_yet_is_listed_as_reserved(segment: DramSegment) -> None:
    Pages(OFFSETS).put(segment)
    coming = Listed(0, RecordState.RESERVED, generation(6))  # over what a free has left there
    (row,) = listed_rows(segment, coming)
    assert row is not None
    assert (row.state, row.generation) == (RecordState.RESERVED, generation(6))


def test_a_removed_record_keeps_its_story(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    before = pages.records(segment)
    segment.records.write_removed(Stretch(0, 2, 0, 0, 0), PAGE)
    after = pages.records(segment)
    assert [r.state for r in after if r] == [RecordState.REMOVED] * 2 + [RecordState.SEALED]
    assert [r.key for r in after if r] == [r.key for r in before if r]


@pytest.mark.parametrize("state", [RecordState.RESERVED, RecordState.REMOVED])
def test_what_is_not_sealed_is_never_adopted(segment: DramSegment, state: RecordState) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    written(segment, pages, state=state)
    found = taken_over(segment)
    assert not found.adopted
    assert (found.unfinished, found.removed, found.damaged) == (
        (3, 0, 0) if state is RecordState.RESERVED else (0, 3, 0)
    )
    assert is_empty(segment)


@given(page=st.integers(0, 2), bit=st.integers(0, RECORD_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_record_costs_that_page_alone(page: int, bit: int) -> None:
    with memory_folder() as folder:
        segment, _ = opened(folder / "segment")
        pages = Pages(OFFSETS)
        pages.put(segment)
        segment.records.read(OFFSETS[page], PAGE)[bit // 8] ^= 1 << bit % 8
        found = taken_over(segment)
        assert sorted(record.offset for record in found.adopted) == sorted(
            set(OFFSETS) - {OFFSETS[page]}
        )
        assert found.damaged == 1
        segment.close()


WRONG = {
    "another place": {"offset": 2 * PAGE},
    "no place at all": {"offset": 100},
    "beyond the segment": {"offset": 1 << 40},
    "another class": {"size_class": 2 * PAGE},
    "no class": {"size_class": 0},
    "a payload of another class": {"payload_bytes": PAGE + 1},
    "a stored form that is no form": {"codec": 2, "stored_bytes": 0},
    "a stored form beyond its extent": {"codec": 2, "stored_bytes": PAGE + 1},
    "as it is, but of another length": {"stored_bytes": PAGE - 1},
    "a life that has not been": {"incarnation": 1 << 62},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_record_that_says_the_impossible_is_damaged(
    segment: DramSegment, changes: dict[str, int]
) -> None:
    pages = Pages((0,))
    pages.put(segment)
    written(segment, pages, **changes)
    assert taken_over(segment).damaged == 1
    assert is_empty(segment)


def test_an_encoded_part_may_lie_in_a_smaller_class(segment: DramSegment) -> None:
    pages = Pages((0,))
    pages.put(segment)
    written(segment, pages, codec=2, payload_bytes=3 * PAGE, stored_bytes=PAGE - 7)
    (record,) = adopted_records(segment.records, taken_over(segment))
    assert record.stored_bytes == PAGE - 7


def test_an_older_life_counts_as_well(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    written(segment, pages, incarnation=Incarnation(1))
    assert len(taken_over(segment).adopted) == 3


def test_taking_over_twice_is_the_same_as_once(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)
    first = taken_over(segment)
    again = segment.records.take_over(
        Incarnation(segment.incarnation + 1), Incarnation(segment.incarnation + 1)
    )
    assert list(again.adopted) == list(first.adopted)
    lives = {record.incarnation for record in adopted_records(segment.records, again)}
    assert lives == {segment.incarnation + 1}
    assert len(again.adopted) == len(OFFSETS)


def test_of_records_in_each_others_way_the_newest_stays(segment: DramSegment) -> None:
    small, large = Pages((PAGE, 3 * PAGE)), Pages((0,), size=2 * PAGE, first_key=9)
    small.put(segment, counter=5)
    large.put(segment, counter=6)  # as if a free had never reached the file
    found = taken_over(segment)
    assert [(r.offset, r.size_class) for r in found.adopted] == [(0, 2 * PAGE)]
    assert found.damaged == 2


def test_every_table_of_a_segment_is_looked_at(segment: DramSegment) -> None:
    offsets = tuple(range(0, 4 * CHUNK, CHUNK))
    Pages(offsets).put(segment)
    assert sorted(record.offset for record in taken_over(segment).adopted) == list(offsets)


def test_random_bytes_are_no_records(segment: DramSegment) -> None:
    noise = os.urandom(GEOMETRY.payload_base - HEADER_BYTES)
    os.pwrite(segment.ownership, noise, HEADER_BYTES)
    assert not taken_over(segment).adopted
    assert segment.records.take_over(segment.incarnation, segment.incarnation).damaged == 0


def test_a_table_takes_memory_only_when_it_is_needed(segment: DramSegment) -> None:
    def blocks() -> int:
        return os.fstat(segment.ownership).st_blocks

    before = blocks()
    segment.records.require(Stretch(0, 1, CHUNK, 0, CHUNK), PAGE)
    once = blocks()
    segment.records.require(Stretch(0, 1, CHUNK, 3, CHUNK + 3 * PAGE), PAGE)
    assert before < once == blocks()


def test_freeing_works_when_memory_has_run_out(
    segment: DramSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(OFFSETS)
    pages.put(segment)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    segment.records.require(Stretch(0, 1, 0, 0, 0), PAGE)
    monkeypatch.setattr(segment.records, "require", full)
    segment.records.write_free(Stretch(0, 2, 0, 0, 0), PAGE)
    segment.records.write_free(Stretch(0, 4, 2 * CHUNK, 0, 2 * CHUNK), PAGE)  # a hole
    assert [record is None for record in pages.records(segment)] == [True, True, False]


def test_the_generation_survives_the_new_life(segment: DramSegment) -> None:
    Pages(OFFSETS).put(segment, counter=77)
    assert {record.generation for record in taken_over(segment).adopted} == {generation(77)}


def test_a_start_keeps_no_records_as_objects(
    segment: DramSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may have more of them than memory would hold."""
    alive = 0

    class Counted:
        """A record that tells when it goes."""

        def __init__(self, record: Record) -> None:
            nonlocal alive
            alive += 1
            assert alive <= 2, "the last one and this"
            self._record = record

        def __getattr__(self, name: str) -> object:
            return getattr(self._record, name)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted(row: bytes) -> Counted | None:
        record = unpack_record(row)
        return None if record is None else Counted(record)

    Pages(tuple(range(0, CHUNK, PAGE))).put(segment)
    monkeypatch.setattr(record_table, "unpack_record", counted)
    assert len(taken_over(segment).adopted) == CHUNK // PAGE


class Forgetful:
    """A record area whose second look at its records finds one damaged and one gone."""

    def __init__(self, fd: int) -> None:
        """Of the file that is open as `fd`."""
        self._fd = fd
        self._loads = 0

    def load(self, at: int, length: int) -> bytes:
        """As it was at first."""
        data = os.pread(self._fd, length, at)
        if not any(data):
            return data
        self._loads += 1
        if self._loads < 2:
            return data
        return bytes(RECORD_BYTES + 20) + b"?" + data[RECORD_BYTES + 21 :]

    def look(self, at: int, length: int) -> memoryview:
        """As it is."""
        return memoryview(os.pread(self._fd, length, at))

    def store(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Write."""
        os.pwrite(self._fd, data, at)

    def allocate(self, at: int, length: int) -> None:
        """There is room."""

    def next_data(self, at: int) -> int | None:
        """The next place that is no hole."""
        return next_data(self._fd, at)


def test_what_was_damaged_since_it_was_proven_is_not_made_whole(segment: DramSegment) -> None:
    pages = Pages((0, PAGE, 2 * PAGE))
    pages.put(segment)
    table = RecordTable(Forgetful(segment.ownership), GEOMETRY)
    found = table.take_over(segment.incarnation, Incarnation(segment.incarnation + 1))
    assert len(found.adopted) == 3, "each was proven once; a reader will find the record"
    assert [record.offset for record in adopted_records(table, found)] == [0, 2 * PAGE]
    lives = [record.incarnation for record in pages.records(segment) if record]
    assert lives == [segment.incarnation, segment.incarnation + 1]
