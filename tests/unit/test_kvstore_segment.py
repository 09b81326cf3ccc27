"""Geometry: slots and records that never overlap, and headers that are whole or refused."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.errors import BadValue, CorruptPage
from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RECORD_BYTES
from kvstore.segment import (
    HEADER_BYTES,
    PAYLOAD_ALIGN,
    Geometry,
    SegmentHeader,
    check_geometry,
    pack_header,
    size_class_of,
    unpack_header,
)

ALIGN = limits.EXTENT_ALIGN_BYTES
SMALLEST = 4 * ALIGN

geometries = st.builds(
    lambda power, chunks: Geometry(chunks * (SMALLEST << power), SMALLEST << power),
    st.integers(0, 12),
    st.integers(1, 40),
)


@st.composite
def classes(draw: st.DrawFn) -> tuple[Geometry, int]:
    geometry = draw(geometries)
    pages = draw(st.integers(1, geometry.chunk_bytes // ALIGN))
    return geometry, pages * ALIGN


@st.composite
def extents(draw: st.DrawFn) -> tuple[Geometry, int, int]:
    geometry, size_class = draw(classes())
    chunks = geometry.payload_bytes // geometry.chunk_span(size_class)
    chunk = draw(st.integers(0, chunks - 1)) * geometry.chunk_span(size_class)
    slot = draw(st.integers(0, geometry.chunk_slots(size_class) - 1))
    return geometry, size_class, chunk + slot * size_class


@given(st.integers(1, limits.CHUNK_BYTES))
def test_a_class_holds_the_part_with_less_than_a_step_to_spare(size: int) -> None:
    assert size_class_of(size) % ALIGN == 0
    assert 0 <= size_class_of(size) - size < ALIGN


@given(geometries)
def test_areas_of_the_file_do_not_overlap(geometry: Geometry) -> None:
    assert check_geometry(geometry.payload_bytes, geometry.chunk_bytes) == geometry
    records = geometry.frames * geometry.records_per_frame * RECORD_BYTES
    assert HEADER_BYTES + records <= geometry.payload_base
    assert geometry.payload_base - (HEADER_BYTES + records) < PAYLOAD_ALIGN
    assert geometry.payload_base % PAYLOAD_ALIGN == 0
    assert geometry.file_bytes == geometry.payload_base + geometry.payload_bytes
    assert geometry.frames * geometry.frame_bytes == geometry.payload_bytes


@given(classes())
def test_a_chunk_has_room_for_its_slots_and_their_records(case: tuple[Geometry, int]) -> None:
    geometry, size_class = case
    slots = geometry.chunk_slots(size_class)
    assert 1 <= slots <= limits.CHUNK_EXTENTS_MAX
    assert slots <= geometry.records_per_frame
    assert slots * size_class <= geometry.chunk_span(size_class) <= geometry.chunk_bytes
    # Only the smallest classes may waste room, and then less than half of the chunk.
    if geometry.chunk_frames(size_class) == 4:
        assert geometry.chunk_span(size_class) - slots * size_class < size_class
    assert geometry.chunk_bytes % geometry.chunk_span(size_class) == 0


@given(extents())
def test_offset_and_class_alone_give_chunk_slot_and_record(case: tuple[Geometry, int, int]) -> None:
    geometry, size_class, offset = case
    geometry.check_extent(offset, size_class)
    geometry.check_extent(offset, size_class - ALIGN + 1)
    start = geometry.chunk_start(offset, size_class)
    assert start % geometry.chunk_span(size_class) == 0
    assert start <= offset < start + geometry.chunk_span(size_class)
    slot, rest = divmod(offset - start, size_class)
    assert rest == 0
    table, length = geometry.table_range(start, size_class)
    assert geometry.record_offset(offset, size_class) == table + slot * RECORD_BYTES
    assert slot < length // RECORD_BYTES
    assert table >= HEADER_BYTES
    assert table + length <= geometry.payload_base


@given(geometries, st.data())
def test_records_of_neighbouring_chunks_of_any_class_are_disjoint(
    geometry: Geometry, data: st.DataObject
) -> None:
    """Fill the segment with chunks of drawn classes, as an allocator would."""
    sizes = st.integers(1, geometry.chunk_bytes // ALIGN).map(lambda pages: pages * ALIGN)
    used: list[range] = []
    payload: list[range] = []
    at = 0
    while at < geometry.payload_bytes and len(used) < 12:
        size_class = data.draw(sizes)
        span = geometry.chunk_span(size_class)
        if at % span:
            # A chunk is aligned to its own length; smaller ones may fill the gap.
            at += geometry.frame_bytes
            continue
        table, length = geometry.table_range(at, size_class)
        used.append(range(table, table + length))
        payload.append(range(at, at + geometry.chunk_slots(size_class) * size_class))
        at += span
    for ranges in (used, payload):
        for one, other in pairwise(ranges):
            assert one.stop <= other.start


@given(extents(), st.integers(-5, 5))
def test_a_place_between_slots_is_refused(case: tuple[Geometry, int, int], shift: int) -> None:
    geometry, size_class, offset = case
    if shift % size_class == 0:
        return
    with pytest.raises(BadValue, match="offset"):
        geometry.check_extent(offset + shift, size_class)


def test_places_outside_and_sizes_beyond_a_chunk_are_refused() -> None:
    geometry = check_geometry(2 * limits.CHUNK_BYTES)
    for offset in (-4096, 2 * limits.CHUNK_BYTES, 1 << 70):
        with pytest.raises(BadValue, match="offset"):
            geometry.check_extent(offset, 4096)
    for size in (0, -1, limits.CHUNK_BYTES + 1):
        with pytest.raises(BadValue, match="size_bytes"):
            geometry.check_extent(0, size)
    # The fourth 20 MiB slot would end beyond the 64 MiB chunk.
    with pytest.raises(BadValue, match="offset"):
        geometry.check_extent(3 * 20 * limits.MIB, 20 * limits.MIB)


@pytest.mark.parametrize(
    ("payload", "chunk", "field"),
    [
        (0, limits.CHUNK_BYTES, "payload_bytes"),
        (-SMALLEST, SMALLEST, "payload_bytes"),
        (SMALLEST + 1, SMALLEST, "payload_bytes"),
        (SMALLEST, 0, "chunk_bytes"),
        (SMALLEST, -SMALLEST, "chunk_bytes"),
        (SMALLEST * 3, SMALLEST * 3, "chunk_bytes"),
        (2 * limits.CHUNK_BYTES, 2 * limits.CHUNK_BYTES, "chunk_bytes"),
        (8192, 8192, "chunk_bytes"),
    ],
)
def test_bad_geometries_are_refused_by_name(payload: int, chunk: int, field: str) -> None:
    with pytest.raises(BadValue) as caught:
        check_geometry(payload, chunk)
    assert caught.value.field == field


names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=16)


@given(names, names, st.integers(0, (1 << 64) - 1), geometries)
def test_headers_come_back(cluster: str, segment: str, life: int, geometry: Geometry) -> None:
    header = SegmentHeader(cluster, SegmentId(segment), Incarnation(life), geometry)
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == header
    assert unpack_header(packed + b"more") == header


HEADER = pack_header(
    SegmentHeader("c", SegmentId("s"), Incarnation(1), Geometry(SMALLEST, SMALLEST))
)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_flipped_bit_in_a_header_is_noticed(at: int, flip: int) -> None:
    damaged = bytearray(HEADER)
    damaged[at] ^= flip
    with pytest.raises(CorruptPage):
        unpack_header(bytes(damaged))


@given(st.binary(max_size=300))
def test_any_bytes_are_no_header(data: bytes) -> None:
    for padded in (data, data.ljust(HEADER_BYTES, b"\0"), HEADER[:8] + data):
        with pytest.raises(CorruptPage):
            unpack_header(padded)


@given(st.binary(min_size=8, max_size=300))
def test_a_header_that_only_its_checksum_vouches_for_is_refused(data: bytes) -> None:
    body = (HEADER[:8] + data).ljust(HEADER_BYTES - 8, b"\0")
    forged = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    try:
        geometry = unpack_header(forged).geometry
    except CorruptPage:
        return
    check_geometry(geometry.payload_bytes, geometry.chunk_bytes)


@pytest.mark.parametrize(("cluster", "segment"), [("é" * 33, "s"), ("c", "s" * 129), ("c\0", "s")])
def test_names_that_a_header_would_cut_are_refused(cluster: str, segment: str) -> None:
    with pytest.raises(BadValue):
        pack_header(
            SegmentHeader(cluster, SegmentId(segment), Incarnation(1), Geometry(SMALLEST, SMALLEST))
        )
