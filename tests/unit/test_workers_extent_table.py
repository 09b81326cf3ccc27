"""Columns of extents: cutting, cutting anew, floors that never fall, runs of neighbours."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.errors import BadValue, InvariantBroken
from kvstore.ids import Generation, Incarnation, PageKey, SegmentId
from kvstore.record import Record, RecordState, chunk_digest
from kvstore.segment import Geometry, check_geometry, size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import ChunkDigest
from tests.unit.worker_scripts import CHUNK, GEOMETRY, INCARNATION, PAGE, key
from workers.extent_table import SegmentTable


def table(geometry: Geometry = GEOMETRY) -> SegmentTable:
    return SegmentTable(SegmentId("s"), Incarnation(INCARNATION), geometry)


def record(offset: int, generation: int, *, size: int = PAGE) -> Record:
    return Record(
        RecordState.SEALED, PageKey(key(1)), 0, Generation(generation), Incarnation(INCARNATION),
        size, 99, offset, size_class_of(size), 1, PageKey(bytes(32)), 64,
    )  # fmt: skip


@given(
    size=st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE, 5 * PAGE, CHUNK]),
    data=st.data(),
)
def test_stretches_are_the_offsets_in_order(size: int, data: st.DataObject) -> None:
    geometry = check_geometry(4 * CHUNK, CHUNK)
    every = [
        start + slot * size
        for start in range(0, 4 * CHUNK, geometry.chunk_span(size))
        for slot in range(geometry.chunk_slots(size))
    ]
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    if data.draw(st.booleans()):  # neighbours, from one extent on to another
        first, last = sorted((every.index(chosen[0]), every.index(chosen[-1])))
        chosen = every[first : last + 1]
    found = table(geometry).stretches(size, array("Q", chosen))
    rebuilt: list[int] = []
    for stretch in found:
        assert stretch.page == len(rebuilt)
        assert stretch.chunk_start == geometry.chunk_start(stretch.offset, size)
        assert stretch.offset == stretch.chunk_start + stretch.slot * size
        assert stretch.slot + stretch.count <= geometry.chunk_slots(size)
        rebuilt += [stretch.offset + i * size for i in range(stretch.count)]
    assert rebuilt == chosen
    # As few as can be: two that follow each other are never neighbours in one chunk.
    for one, other in pairwise(found):
        joined = one.offset + one.count * size == other.offset
        assert not (joined and one.chunk_start == other.chunk_start)


@pytest.mark.parametrize(
    "offsets", [(0, 0), (1,), (PAGE - 1,), (4 * CHUNK,), (1 << 63,), (2 * PAGE, 0, 2 * PAGE)]
)
def test_offsets_that_are_no_extents_are_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(BadValue, match="offset"):
        table().stretches(PAGE, array("Q", offsets))


def test_a_chunk_is_cut_once() -> None:
    segment = table()
    chunk = segment.cut(PAGE, PAGE)
    assert chunk is not None
    assert segment.cut(5 * PAGE, PAGE) is chunk
    assert segment.chunk_around(CHUNK - 1) is chunk
    assert segment.chunk_around(CHUNK) is None
    assert segment.chunk_around(1 << 40) is None
    segment.check_invariants()


@pytest.mark.parametrize("what", ["sealed", "busy"])
def test_a_chunk_in_use_is_not_cut_anew(what: str) -> None:
    segment = table()
    chunk = segment.cut(0, PAGE)
    assert chunk is not None
    (chunk.states if what == "sealed" else chunk.works)[3] = 2 if what == "sealed" else 1
    assert segment.cut(0, 2 * PAGE) is None
    (chunk.states if what == "sealed" else chunk.works)[3] = 0
    assert segment.cut(0, 2 * PAGE) is not None
    segment.check_invariants()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3, 8, 16]),
                          st.integers(1, 100)), max_size=12))  # fmt: skip
def test_what_was_refused_stays_refused_however_chunks_are_cut(
    steps: list[tuple[int, int, int]],
) -> None:
    segment, refused = table(), [0] * 4
    for place, pages, generation in steps:
        chunk = segment.cut(place * CHUNK, pages * PAGE)
        assert chunk is not None  # all are idle
        assert min(chunk.generations) >= refused[place] or chunk.generations[0] >= refused[place]
        chunk.generations[0] = max(chunk.generations[0], generation)
        refused[place] = max(refused[place], generation)
        assert chunk.outcomes[0] == Outcome.FENCED
        segment.check_invariants()


def test_a_larger_chunk_takes_the_highest_floor_of_its_frames() -> None:
    geometry = check_geometry(limits.CHUNK_BYTES)  # here the smallest class has short chunks
    segment = table(geometry)
    small = [segment.cut(frame * geometry.frame_bytes, PAGE) for frame in range(4)]
    floors = (5, 9, 2, 0)
    for chunk, floor in zip(small, floors, strict=True):
        assert chunk is not None
        chunk.generations[0] = floor
    whole = segment.cut(0, limits.CHUNK_BYTES)
    assert whole is not None
    assert list(whole.generations) == [9]
    assert list(segment.chunks) == [0]
    again = [segment.cut(frame * geometry.frame_bytes, PAGE) for frame in range(4)]
    assert [chunk.generations[0] for chunk in again if chunk] == [9, 9, 9, 9]
    segment.check_invariants()


def test_adopted_records_are_sealed_as_they_say() -> None:
    segment = table()
    segment.adopt([record(0, 7), record(3 * PAGE, 8), record(CHUNK, 9, size=2 * PAGE)])
    first, second = segment.cut(0, PAGE), segment.cut(CHUNK, 2 * PAGE)
    assert first is not None
    assert second is not None
    assert list(first.occupied()) == [(0, 2, 7), (3, 2, 8)]
    assert list(second.occupied()) == [(0, 2, 9)]
    assert (first.checksums[3], first.outcomes[3]) == (99, Outcome.OK)
    assert segment.digests() == (
        ChunkDigest(0, PAGE, chunk_digest([(0, 2, 7), (3, 2, 8)])),
        ChunkDigest(CHUNK, 2 * PAGE, chunk_digest([(0, 2, 9)])),
    )
    segment.check_invariants()


def test_adopting_overlaps_is_our_bug() -> None:
    with pytest.raises(InvariantBroken, match="overlap"):
        table().adopt([record(0, 7), record(0, 8, size=2 * PAGE)])


def test_an_empty_chunk_has_no_line_in_the_inventory() -> None:
    segment = table()
    segment.cut(0, PAGE)
    assert segment.digests() == ()


def test_chunks_in_which_nothing_lies_can_be_released() -> None:
    shrinking = SegmentTable(SegmentId("s"), Incarnation(INCARNATION), GEOMETRY, can_shrink=True)
    shrinking.adopt([record(CHUNK, 7)])
    for numbers, want in (([1], "chunks in which nothing lies"), ([-1], "0 to 3"), ([4], "0 to 3")):
        with pytest.raises(BadValue, match=want):
            shrinking.release([0, *numbers])
        assert not shrinking.released
    shrinking.chunks[CHUNK].states[0] = RecordState.FREE
    shrinking.chunks[CHUNK].works[0] = 3
    with pytest.raises(BadValue, match="nothing lies"):
        shrinking.release([1])
    shrinking.release([0, 3])
    shrinking.release([3, 2])
    assert shrinking.released == {0, 2, 3}


def test_chunks_of_a_file_are_not_released() -> None:
    with pytest.raises(BadValue, match="one whose chunks can be given back"):
        table().release([0])
