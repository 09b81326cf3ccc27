"""The record of one extent: 192 checksummed bytes beside the payload (DESIGN 3).

It is the worker's inventory, the proof for re-adoption, and what readers compare after the last
byte. It names its own place, so a misdirected write shows. Written by the owning worker only.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from kvstore.errors import CorruptPage
from kvstore.ids import Generation, Incarnation, PageKey

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORD_BYTES: Final = 192
_MAGIC: Final = 0x3152564B  # "KVR1", little-endian
_BODY: Final = struct.Struct("<IBBBxHxxI32sQQQQQQQI4x32sQ32x")
_CHECKSUM: Final = struct.Struct("<Q")
_DIGEST_ROW: Final = struct.Struct("<IBQ")
assert _BODY.size + _CHECKSUM.size == RECORD_BYTES


class RecordState(IntEnum):
    """State of an extent in its owner's table."""

    FREE = 0
    RESERVED = 1
    """Bytes are being written; never served, never adopted."""
    SEALED = 2
    """Bytes verified against the writer's checksum."""
    REMOVED = 3
    """Taken out by a remove: never served, never re-adopted."""


class RecordFlag(IntFlag):
    """Extras of a record."""

    NONE = 0
    PRIVATE = 1
    """A ticket's unfinished tail page: never matched."""
    NAME = 2
    """Holds the name of an opaque object, not a payload of its own."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One extent's record. Lengths and offsets in bytes; offset is within the payload area."""

    state: RecordState
    key: PageKey
    part: int
    generation: Generation
    incarnation: Incarnation
    payload_bytes: int
    checksum: int
    offset: int
    size_class: int
    namespace_ordinal: int
    parent: PageKey
    token_count: int
    stored_bytes: int = 0
    codec: int = 0
    flags: RecordFlag = RecordFlag.NONE
    name_offset: int = 0


def pack_record(record: Record) -> bytes:
    """RECORD_BYTES bytes, checksum last."""
    body = _BODY.pack(
        _MAGIC,
        record.state,
        record.codec,
        record.flags,
        record.part,
        record.token_count,
        record.key,
        record.generation,
        record.incarnation,
        record.payload_bytes,
        record.stored_bytes,
        record.checksum,
        record.offset,
        record.size_class,
        record.namespace_ordinal,
        record.parent,
        record.name_offset,
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack_record(data: bytes | memoryview) -> Record | None:
    """The record in `data`; None for an all-zero (never used) one; CorruptPage otherwise."""
    if len(data) != RECORD_BYTES:
        raise CorruptPage(f"record: got {len(data)} bytes, want {RECORD_BYTES}")
    body = bytes(data[: _BODY.size])
    if not any(data):
        return None
    if _CHECKSUM.unpack_from(data, _BODY.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise CorruptPage("record: checksum differs")
    (magic, state, codec, flags, part, tokens, key, generation, incarnation, payload, stored,
     checksum, offset, size_class, ordinal, parent, name_offset) = _BODY.unpack(body)  # fmt: skip
    if magic != _MAGIC:
        raise CorruptPage(f"record: got magic {magic:#x}, want {_MAGIC:#x}")
    try:
        known = RecordState(state)
    except ValueError as error:
        raise CorruptPage(f"record: unknown state {state}") from error
    return Record(
        known, PageKey(key), part, Generation(generation), Incarnation(incarnation), payload,
        checksum, offset, size_class, ordinal, PageKey(parent), tokens, stored, codec,
        RecordFlag(flags), name_offset,
    )  # fmt: skip


def is_sealed_as(
    data: bytes | memoryview, key: bytes, part: int, generation: int, incarnation: int
) -> bool:
    """Whether `data` is whole, SEALED, and still the same page, part, generation and life.

    The reader's last check (I8, I11): any doubt is False, never an exception.
    """
    try:
        record = unpack_record(data)
    except CorruptPage:
        return False
    return (
        record is not None
        and record.state is RecordState.SEALED
        and record.key == key
        and record.part == part
        and record.generation == generation
        and record.incarnation == incarnation
    )


def chunk_digest(entries: Iterable[tuple[int, int, int]]) -> int:
    """XXH3-64 over (slot, state, generation) of a chunk's extents that are not FREE, by slot.

    Worker and master compute it from their own tables; only chunks that differ are sent whole.
    """
    return xxhash.xxh3_64_intdigest(b"".join(_DIGEST_ROW.pack(*entry) for entry in entries))
