"""Values of chunks: golden bytes, there and back again, and no damage that goes unseen."""

from __future__ import annotations

import hashlib
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.checksummed import checked, checksummed
from kvstore.coordination.metadata_store import VALUE_BYTES_MAX
from kvstore.errors import CorruptPage
from kvstore.limits import REPLICAS_MAX
from kvstore.record import RecordState, chunk_digest
from master.chunk_values import (
    Asked,
    ChainRow,
    ChunkHead,
    ChunkValue,
    chunk_head,
    decode_chunk,
    encode_chunk,
    key_of,
    place_of,
)
from master.pool_time import Life
from tests.unit.master_rig import chain

LIFE = Life(60.0, 5.0, 65.5)
ASKED = Asked(LIFE)
ROWS = [
    ChainRow(0, 3, 0, 7, 4096, (2 << 32) | 9, bytes(32), ASKED),
    ChainRow(5, 1, 1, 8, 4000, 11, b"p" * 32, Asked(Life(inf, -3.0, inf))),
]
COLUMNS = chain(1, 3) + chain(2, 1), bytes(range(32))
VALUE = ChunkValue(4096, ROWS, *COLUMNS)
GOLDEN = "9b293935ac13f3b54062744cc113d8404f9f15f12b48036d9583cf6b4137719f"


def encoded(value: ChunkValue) -> bytes:
    return encode_chunk(value, value.digest())


@st.composite
def values(draw: st.DrawFn) -> ChunkValue:
    """Any value that a master may write."""
    rows: list[ChainRow] = []
    slot = 0
    number = st.integers(0, (1 << 32) - 1)
    for _ in range(draw(st.integers(0, 5))):
        slot += draw(st.integers(0, 9))
        count = draw(st.integers(1, 9))
        life = Life(*(draw(st.floats(allow_nan=False)) for _ in range(3)))
        asked = Asked(life, draw(st.integers(0, REPLICAS_MAX)))
        generation = draw(st.integers(0, (1 << 64) - 1))
        parent = draw(st.binary(min_size=32, max_size=32))
        part = draw(st.integers(0, 1023))
        row = ChainRow(slot, count, part, draw(number), draw(number), generation, parent, asked)
        rows.append(row)
        slot += count
    pages = sum(row.count for row in rows)
    return ChunkValue(draw(st.integers(1, 1 << 26)), rows, chain(1, pages), chain(2, pages)[::4])


def test_the_stored_form_stays_what_it_is() -> None:
    assert hashlib.sha256(encoded(VALUE)).hexdigest() == GOLDEN
    assert len(encoded(VALUE)) == 24 + 2 * 80 + 4 * 40 + 8


def test_replicas_that_were_asked_for_take_the_place_of_a_byte_that_was_zero() -> None:
    (first, second), asked = ROWS, Asked(LIFE, 2)
    more = ChunkValue(4096, [msgspec.structs.replace(first, asked=asked), second], *COLUMNS)
    pairs = zip(encoded(VALUE)[:-8], encoded(more)[:-8], strict=True)  # but for the checksum
    assert [pair for pair in pairs if pair[0] != pair[1]] == [(0, 2)]
    assert decode_chunk(encoded(more)).rows[0].asked == asked


@given(values())
def test_a_value_comes_back_as_it_was(value: ChunkValue) -> None:
    stored = encoded(value)
    assert decode_chunk(stored) == value
    pages = len(value.keys) // 32
    assert chunk_head(stored) == ChunkHead(value.size_class, value.digest(), len(value.rows), pages)


@given(values(), st.data())
def test_no_truncation_and_no_flipped_bit_goes_unseen(
    value: ChunkValue, data: st.DataObject
) -> None:
    stored = encoded(value)
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    flipped = bytearray(stored)
    flipped[bit // 8] ^= 1 << bit % 8
    short = stored[: data.draw(st.integers(0, len(stored) - 1))]
    for bad in (bytes(flipped), short, stored + b"\0", b""):
        with pytest.raises(CorruptPage):
            decode_chunk(bad)


def test_whole_bytes_that_are_no_value_are_bad_ones() -> None:
    body = bytes(checked(encoded(VALUE)))
    for bad in (b"", body[:20], b"KVC2" + body[4:], body[:-1], body + bytes(40)):
        with pytest.raises(CorruptPage):
            chunk_head(checksummed(bad))


def test_the_digest_is_the_workers() -> None:
    first, second = ROWS[0].generation, ROWS[1].generation
    rows = [(0, first), (1, first), (2, first), (5, second)]
    worker = chunk_digest((slot, RecordState.SEALED, generation) for slot, generation in rows)
    assert VALUE.digest() == worker
    assert ChunkValue(4096, [], b"", b"").digest() == chunk_digest(())


def test_the_largest_chunk_fits_a_value() -> None:
    rows = [ChainRow(slot, 1, 0, 1, 4096, slot, b"p" * 32, ASKED) for slot in range(4096)]
    value = ChunkValue(4096, rows, chain(1, 4096), chain(2, 1024))
    assert len(encoded(value)) <= VALUE_BYTES_MAX
    assert value.digest() == chunk_digest((s, RecordState.SEALED, s) for s in range(4096))


def test_chains_come_with_their_columns() -> None:
    assert list(VALUE.chains()) == [
        (ROWS[0], VALUE.keys[:96], VALUE.checksums[:24]),
        (ROWS[1], VALUE.keys[96:], VALUE.checksums[24:]),
    ]


@pytest.mark.parametrize("segment", ["w1-dram", "a/b", "ü"])
def test_keys_name_their_chunk(segment: str) -> None:
    assert place_of(key_of(segment, 64 << 20)) == (segment, 64 << 20)


@pytest.mark.parametrize(
    "key",
    [
        "segments/",
        "segments/w1",
        "segments//000000000000",
        "segments/w1/0",
        "segments/w1/00000000000G",
        "segments/w1/00000000000A",
        "segments/w1/-00000000001",
    ],
)
def test_other_keys_are_bad_ones(key: str) -> None:
    with pytest.raises(CorruptPage):
        place_of(key)
