"""The value of one chunk in the metadata store: what its SEALED extents hold. Pure codec.

Little-endian: a head; fixed-width rows, one for each chain of pages that lie side by side, with
all that its pages have in common; the pages' keys and their checksums, as columns; a checksum over
everything. Keys and checksums are hashes, which nothing compresses, and all that would compress is
in the rows once a chain: so values are stored as they are. How many tokens a page has, its
namespace says. Moments are in pool time (master.pool_time), so that a value stays true while
nobody writes it.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.checksummed import CHECKSUM_BYTES, checked, checksummed
from kvstore.coordination.metadata_store import VALUE_BYTES_MAX
from kvstore.errors import CorruptPage
from kvstore.ids import KEY_BYTES
from kvstore.record import sealed_digest
from master.packed import WORD
from master.pool_time import Life

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "segments/"
LAYOUT: Final = 0x3143564B  # "KVC1", little-endian
_HEAD: Final = struct.Struct("<IIQII")
_ROW: Final = struct.Struct("<HHHBxIIQ32sddd")
_PAGE_BYTES: Final = KEY_BYTES + WORD
# A chunk in which every page is a chain of its own.
assert (
    _HEAD.size + limits.CHUNK_EXTENTS_MAX * (_ROW.size + _PAGE_BYTES) + CHECKSUM_BYTES
    <= VALUE_BYTES_MAX
)


class Asked(msgspec.Struct, frozen=True, gc=False):
    """What was asked for pages."""

    life: Life
    """In pool time."""
    replicas: int = 0
    """0: as many as their namespace wants."""


class ChainRow(msgspec.Struct, frozen=True, gc=False):
    """Pages of a chain, one below the other, of one generation, in neighbouring slots."""

    slot: int
    count: int
    part: int
    namespace: int
    """Its ordinal."""
    payload_bytes: int
    """Of each page's part."""
    generation: int
    parent: bytes
    """Of the first page."""
    asked: Asked


class ChunkHead(msgspec.Struct, frozen=True, gc=False):
    """What can be told of a value without its rows."""

    size_class: int
    digest: int
    """What a worker's ChunkDigest is if it lists exactly these extents."""
    chains: int
    pages: int


class ChunkValue(msgspec.Struct, frozen=True, gc=False):
    """A value's rows and columns; the columns have one entry a page, in the order of the rows."""

    size_class: int
    rows: list[ChainRow]
    keys: bytes
    checksums: bytes

    def digest(self) -> int:
        """As in the head."""
        slots, generations = array("H"), array("Q")
        for row in self.rows:
            slots.extend(range(row.slot, row.slot + row.count))
            generations.extend([row.generation] * row.count)
        return sealed_digest(slots, generations)

    def chains(self) -> Iterator[tuple[ChainRow, bytes, bytes]]:
        """Each row with its pages' keys and checksums."""
        at = 0
        for row in self.rows:
            end = at + row.count
            keys = self.keys[at * KEY_BYTES : end * KEY_BYTES]
            yield row, keys, self.checksums[at * WORD : end * WORD]
            at = end


def key_of(segment: str, chunk_start: int) -> str:
    """Where the value of a chunk is stored."""
    return f"{PREFIX}{segment}/{chunk_start:012x}"


def place_of(key: str) -> tuple[str, int]:
    """Segment and chunk start of such a key; CorruptPage when it is none."""
    segment, _, start = key.removeprefix(PREFIX).rpartition("/")
    try:
        place = segment, int(start, 16)
    except ValueError:
        place = "", -1
    if not segment or place[1] < 0 or key != key_of(*place):
        raise CorruptPage(f"metadata key {key}: names no chunk")
    return place


def encode_chunk(value: ChunkValue, digest: int) -> bytes:
    """The stored form; `digest` is the value's own."""
    pages = len(value.keys) // KEY_BYTES
    parts = [_HEAD.pack(LAYOUT, value.size_class, digest, len(value.rows), pages)]
    for row in value.rows:
        life = row.asked.life
        parts.append(
            _ROW.pack(
                row.slot, row.count, row.part, row.asked.replicas, row.namespace,
                row.payload_bytes, row.generation, row.parent,
                life.ttl_s, life.created_s, life.expires_s,
            )
        )  # fmt: skip
    return checksummed(b"".join((*parts, value.keys, value.checksums)))


def chunk_head(value: bytes) -> ChunkHead:
    """The head of a value that is whole; CorruptPage otherwise."""
    body = checked(value)
    if len(body) < _HEAD.size:
        raise CorruptPage(f"chunk value: {len(value)} bytes")
    layout, size_class, digest, chains, pages = _HEAD.unpack_from(body)
    if layout != LAYOUT:
        raise CorruptPage(f"chunk value: got layout {layout:#x}, want {LAYOUT:#x}")
    if len(body) != _HEAD.size + chains * _ROW.size + pages * _PAGE_BYTES or not size_class:
        raise CorruptPage(f"chunk value: {len(value)} bytes for {chains} chains, {pages} pages")
    return ChunkHead(size_class, digest, chains, pages)


def decode_chunk(value: bytes) -> ChunkValue:
    """All of a value; CorruptPage when it is not whole."""
    head = chunk_head(value)
    end = _HEAD.size + head.chains * _ROW.size
    rows = [
        ChainRow(
            slot, count, part, namespace, size, generation, parent,
            Asked(Life(ttl, made, ends), replicas),
        )
        for slot, count, part, replicas, namespace, size, generation, parent, ttl, made, ends
        in _ROW.iter_unpack(memoryview(value)[_HEAD.size : end])
    ]  # fmt: skip
    columns = end + head.pages * KEY_BYTES
    checksums = value[columns : columns + head.pages * WORD]
    return ChunkValue(head.size_class, rows, value[end:columns], checksums)
