"""The port between planning and moving bytes: spans of pages, and what a transport promises.

Knows messages and memory; must not know masters, retries or deadlines of calls.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.page import checksum_seeds, seeded_checksum
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.puts import BufferSource, EngineSource, Ingest, StreamSource
from kvstore.wire.messages.stripes import StripedPage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.memory import Memory

COLUMN_BYTES: Final = 8
FIRST_PIECE_BYTES: Final = 4 * limits.MIB
PIECE_BYTES_MAX: Final = 32 * limits.MIB


class IngestSpan(msgspec.Struct, frozen=True, gc=False):
    """Consecutive pages of one plan, in one segment, and where their bytes lie in the source."""

    epoch: int
    segment: SegmentRef
    generation: int
    namespace_ordinal: int
    part: int
    part_bytes: int
    token_count: int
    parent: bytes
    """As in Ingest."""
    keys: bytes
    offsets: bytes
    places: tuple[int, ...]
    """Byte offsets in the source, one a page."""

    def __len__(self) -> int:
        return len(self.places)

    def cut(self, start: int, stop: int) -> IngestSpan:
        """Pages [start, stop) as a span of their own."""
        if stop - start == len(self.places):
            return self
        parent = self.parent
        if start and parent:
            parent = self.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES]
        return msgspec.structs.replace(
            self,
            parent=parent,
            keys=self.keys[start * KEY_BYTES : stop * KEY_BYTES],
            offsets=self.offsets[start * COLUMN_BYTES : stop * COLUMN_BYTES],
            places=self.places[start:stop],
        )

    def message(
        self, checksums: bytes, source: BufferSource | StreamSource | EngineSource
    ) -> Ingest:
        """The request that makes the worker pull these pages."""
        return Ingest(
            self.epoch, self.segment.segment, self.segment.incarnation, self.generation,
            self.namespace_ordinal, self.part, self.part_bytes, size_class_of(self.part_bytes),
            self.token_count, self.parent, self.keys,
            self.offsets, checksums, source,
        )  # fmt: skip


class ReadSpan(msgspec.Struct, frozen=True, gc=False):
    """Consecutive pages of one replica, and where their bytes go in the destination."""

    segment: SegmentRef
    part: int
    part_bytes: int
    keys: bytes
    offsets: bytes
    generations: bytes
    checksums: bytes
    places: tuple[int, ...]
    """Byte offsets in the destination (for views: positions in the result), one a page."""
    stripes: tuple[StripedPage, ...] = ()
    """One a page where pages are decoded from others, which lie in `segments`."""
    segments: tuple[SegmentRef, ...] = ()

    def __len__(self) -> int:
        return len(self.places)

    def cut(self, start: int, stop: int) -> ReadSpan:
        """Pages [start, stop) as a span of their own."""
        if stop - start == len(self.places):
            return self
        column = slice(start * COLUMN_BYTES, stop * COLUMN_BYTES)
        return msgspec.structs.replace(
            self,
            keys=self.keys[start * KEY_BYTES : stop * KEY_BYTES],
            offsets=self.offsets[column],
            generations=self.generations[column],
            checksums=self.checksums[column],
            places=self.places[start:stop],
            stripes=self.stripes[start:stop],
        )


class Reader(Protocol):
    """Brings pages. Thread-safe. Failures are Outcome bytes, not errors."""

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """One Outcome byte a page.

        OK: the bytes are in place, their checksum is the span's, and after the last byte the
        extent's record was still SEALED with this key, generation and incarnation (I8, I11).
        Anything else: that place holds zeros.
        """
        ...


class Transport(Reader, Protocol):
    """One way to one worker's segments."""

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """Have the worker pull these pages; one Outcome byte a page for each span.

        Checksums are computed here, over the source, before the worker is asked for the piece.
        """
        ...

    def close(self) -> None:
        """End connections and mappings; later calls answer TRANSPORT. Safe to repeat."""
        ...


def column(packed: bytes) -> array[int]:
    """A packed u64 column as integers. Hosts are little-endian (asserted at import)."""
    return array("Q", packed)


def span_checksums(span: IngestSpan | ReadSpan, memory: memoryview) -> bytes:
    """Packed checksums of a span's pages at their places (kvstore.page.payload_checksum)."""
    size, digest = span.part_bytes, seeded_checksum
    rows = zip(span.places, checksum_seeds(span.keys, span.part), strict=True)
    return array("Q", [digest(memory[at : at + size], seed) for at, seed in rows]).tobytes()


def verified(span: ReadSpan, memory: memoryview, brought: bytes) -> bytes:
    """Outcomes of pages that were brought so: CHECKSUM where the writer hashed other bytes."""
    found = span_checksums(span, memory)
    if found == span.checksums:
        return brought
    rows = zip(brought, column(found), column(span.checksums), strict=True)
    return bytes([code or (Outcome.CHECKSUM if there != want else 0) for code, there, want in rows])


def growing_pieces(spans: Sequence[IngestSpan]) -> Iterator[tuple[int, int, IngestSpan]]:
    """(number of the span, first page in it, piece): what goes into one Ingest each.

    A writer hashes a piece while the worker pulls the one before. Nothing overlaps the first
    hash, so the first piece is small; hashing takes half as long as pulling, so each next one is
    twice as large, up to PIECE_BYTES_MAX. What would not leave enough for a whole next piece is not
    cut any more: an Ingest costs both servers as much as the pull of a few megabytes.
    """
    piece_bytes = FIRST_PIECE_BYTES
    for number, span in enumerate(spans):
        first, pages = 0, len(span.places)
        while first < pages:
            step = max(1, piece_bytes // span.part_bytes)
            after_bytes = (pages - first - step) * span.part_bytes
            stop = first + step if after_bytes >= 2 * piece_bytes else pages
            yield number, first, span.cut(first, stop)
            grown = 2 * (stop - first) * span.part_bytes
            piece_bytes = min(max(grown, FIRST_PIECE_BYTES), PIECE_BYTES_MAX)
            first = stop


def even_pieces(span: ReadSpan, piece_bytes: int) -> Iterator[ReadSpan]:
    """The span cut so that each piece holds about `piece_bytes`, at least one page."""
    step = max(1, piece_bytes // span.part_bytes)
    return (span.cut(first, min(first + step, len(span))) for first in range(0, len(span), step))


def all_of(outcome: Outcome, pages: int) -> bytes:
    """The same Outcome byte for every page."""
    return bytes((outcome,)) * pages


assert column(b"\x01" + bytes(7))[0] == 1, "columns are little-endian"
