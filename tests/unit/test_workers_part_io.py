"""How parts become runs of neighbours, and what their stored forms are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec import COMPRESSING, Codec
from kvstore.errors import BadValue
from kvstore.segment import check_geometry
from tests.fakes import ManualClock
from tests.unit.nvme_parts import compressible, part
from tests.unit.worker_scripts import GEOMETRY, PAGE, key
from workers.tiers.part_io import RUN_BYTES_MAX, RUN_PARTS_MAX, Extent, encoded, runs, tried

LARGE = check_geometry(64 << 20, 32 << 20)


def extents_of(slots: list[int], size_class: int) -> list[Extent]:
    return [Extent(slot * size_class, size_class) for slot in slots]


@given(
    slots=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8),
    pages=st.sampled_from([1, 2, 4]),
)
def test_runs_are_all_extents_in_order_as_neighbours_in_one_chunk(
    slots: list[tuple[int, int]], pages: int
) -> None:
    size_class = pages * PAGE
    room = GEOMETRY.payload_bytes // size_class
    wanted = extents_of(
        [slot for start, count in slots for slot in range(start, start + count) if slot < room],
        size_class,
    )
    found = runs(GEOMETRY, wanted)
    covered = [
        (each.page + i, Extent(each.offset + i * size_class, size_class))
        for each in found
        for i in range(each.count)
    ]
    assert covered == list(enumerate(wanted))
    for each in found:
        start = GEOMETRY.chunk_start(each.offset, size_class)
        assert (each.chunk_start, each.slot) == (start, (each.offset - start) // size_class)
        assert each.slot + each.count <= GEOMETRY.chunk_slots(size_class)
    for before, after in pairwise(found):
        if before.chunk_start == after.chunk_start:
            assert after.offset != before.offset + before.count * size_class


def test_a_run_is_no_longer_than_one_call_should_be() -> None:
    small = runs(LARGE, extents_of(list(range(1000)), PAGE))
    assert max(each.count for each in small) == RUN_PARTS_MAX == RUN_BYTES_MAX // PAGE
    middle = runs(LARGE, extents_of(list(range(20)), 3 * RUN_BYTES_MAX // 8))
    assert {each.count for each in middle} == {2}
    large = runs(LARGE, extents_of([0, 1], 2 * RUN_BYTES_MAX))
    assert [each.count for each in large] == [1, 1]


def test_extents_of_different_classes_are_never_neighbours() -> None:
    found = runs(GEOMETRY, [Extent(0, 2 * PAGE), Extent(2 * PAGE, PAGE), Extent(3 * PAGE, PAGE)])
    assert [each.count for each in found] == [1, 2]


@pytest.mark.parametrize("extent", [Extent(1, PAGE), Extent(-PAGE, PAGE), Extent(0, 0)])
def test_a_place_that_no_extent_can_have_is_refused(extent: Extent) -> None:
    with pytest.raises(BadValue):
        runs(GEOMETRY, [Extent(0, PAGE), extent])


def test_a_form_that_saves_no_block_is_not_used() -> None:
    almost = bytes(part(1, 0).payload) + bytes(PAGE)  # comes to 4 KiB and a few bytes
    assert encoded(Codec.ZSTD, memoryview(almost)).codec is Codec.NONE
    two_less = bytes(part(1, 0).payload) + bytes(2 * PAGE)
    form = encoded(Codec.ZSTD, memoryview(two_less))
    assert form.codec is Codec.ZSTD
    assert PAGE < len(form.stored) <= 2 * PAGE


def test_every_codec_is_tried_on_a_part_and_the_shortest_form_kept() -> None:
    payload = memoryview(compressible(key(1), 8 * PAGE))
    made, shortest = tried(payload, ManualClock())
    assert [trial.codec for trial in made] == list(COMPRESSING)
    assert len(shortest.stored) == min(trial.stored_bytes for trial in made) < 8 * PAGE
    made, shortest = tried(part(1, 0).payload, ManualClock())
    assert {trial.stored_bytes for trial in made} == {PAGE}
    assert shortest.codec is Codec.NONE
