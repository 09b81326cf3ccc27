"""How spans are cut into pieces."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.limits import KIB, MIB
from kvstore.transfer.transport import (
    PIECE_BYTES_MAX,
    IngestSpan,
    ReadSpan,
    even_pieces,
    growing_pieces,
    span_checksums,
    verified,
)
from kvstore.wire.messages.common import Outcome
from tests.unit.client_scripts import segment, u64

SEGMENT = segment("s")


def ingest_span(pages: int, part_bytes: int) -> IngestSpan:
    """Pages whose columns tell them apart."""
    keys = b"".join((i + 1).to_bytes(KEY_BYTES, "little") for i in range(pages))
    places = tuple(i * part_bytes for i in range(pages))
    return IngestSpan(
        1, SEGMENT, 1 << 32 | 1, 7, 0, part_bytes, 16, ROOT_PARENT, keys, u64(places), places
    )


def read_span(pages: int, part_bytes: int) -> ReadSpan:
    """Pages whose columns tell them apart."""
    whole = ingest_span(pages, part_bytes)
    numbers = u64(range(pages))
    return ReadSpan(
        SEGMENT, 0, part_bytes, whole.keys, whole.offsets, numbers, numbers, whole.places
    )


@pytest.mark.parametrize(
    ("part_bytes", "batch_bytes", "want_mib"),
    [
        (64 * KIB, MIB, [1]),
        (64 * KIB, 32 * MIB, [4, 8, 20]),
        (MIB, 11 * MIB, [11]),
        (MIB, 12 * MIB, [4, 8]),
        (4 * MIB, 32 * MIB, [4, 8, 20]),
        (16 * MIB, 32 * MIB, [16, 16]),
        (64 * MIB, 256 * MIB, [64, 64, 64, 64]),
        (MIB, 256 * MIB, [4, 8, 16, 32, 32, 32, 32, 32, 68]),
    ],
)
def test_pieces_grow_as_hashing_outruns_pulling(
    part_bytes: int, batch_bytes: int, want_mib: list[int]
) -> None:
    span = ingest_span(batch_bytes // part_bytes, part_bytes)
    sizes = [len(piece) * part_bytes for _, _, piece in growing_pieces([span])]
    assert sizes == [mib * MIB for mib in want_mib]


def test_pieces_go_on_growing_from_one_span_to_the_next() -> None:
    span = ingest_span(12, MIB)
    cut = [(number, first, len(piece)) for number, first, piece in growing_pieces([span] * 2)]
    assert cut == [(0, 0, 4), (0, 4, 8), (1, 0, 12)]


sizes = st.sampled_from([4096, 64 * KIB, MIB, 16 * MIB, 64 * MIB])


@given(st.lists(st.tuples(st.integers(1, 300), sizes), min_size=1, max_size=4))
def test_the_pieces_of_a_put_are_all_of_it_in_order(shapes: list[tuple[int, int]]) -> None:
    spans = [ingest_span(pages, part_bytes) for pages, part_bytes in shapes]
    seen = [0] * len(spans)
    for number, first, piece in growing_pieces(spans):
        assert first == seen[number]
        stop = seen[number] = first + len(piece)
        assert (piece.keys, piece.offsets) == (
            spans[number].keys[first * KEY_BYTES : stop * KEY_BYTES],
            spans[number].offsets[first * 8 : stop * 8],
        )
        assert piece.parent == (spans[number].keys[: first * KEY_BYTES] or ROOT_PARENT)[-KEY_BYTES:]
        assert len(piece) == 1 or len(piece) * piece.part_bytes < 3 * PIECE_BYTES_MAX
    assert seen == [len(span) for span in spans]


def test_what_was_brought_is_believed_where_its_checksum_is_the_writers() -> None:
    memory = memoryview(bytearray(range(4))).toreadonly()
    span = read_span(4, 1)
    good = msgspec.structs.replace(span, checksums=span_checksums(span, memory))
    assert verified(good, memory, bytes(4)) == bytes(4)
    other = memoryview(bytes((0, 9, 2, 9)))
    lost = bytes((0, Outcome.STALE, 0, 0))
    assert verified(good, other, bytes(4)) == bytes((0, Outcome.CHECKSUM, 0, Outcome.CHECKSUM))
    assert verified(good, other, lost) == bytes((0, Outcome.STALE, 0, Outcome.CHECKSUM))


@given(st.integers(1, 300), sizes, st.sampled_from([1, MIB, 4 * MIB]))
def test_even_pieces_are_the_whole_span(pages: int, part_bytes: int, piece_bytes: int) -> None:
    span = read_span(pages, part_bytes)
    pieces = list(even_pieces(span, piece_bytes))
    for column in ("keys", "offsets", "generations", "checksums"):
        assert b"".join(getattr(piece, column) for piece in pieces) == getattr(span, column)
    assert sum((piece.places for piece in pieces), ()) == span.places
    assert all(len(piece) == 1 or len(piece) * part_bytes <= piece_bytes for piece in pieces)
