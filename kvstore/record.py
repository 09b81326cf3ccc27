"""The record of one extent: 192 checksummed bytes beside the payload.

It is the worker's inventory, the proof for re-adoption, and what readers compare after the last
byte. It names its own place, so a misdirected write shows. Written by the owning worker only.
"""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from kvstore.errors import CorruptPage
from kvstore.ids import KEY_BYTES, Generation, Incarnation, PageKey

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORD_BYTES: Final = 192
_MAGIC: Final = 0x3152564B  # "KVR1", little-endian
_BODY: Final = struct.Struct("<IBBBxHxxI32sQQQQQQQI4x32sQ32x")
_HEAD: Final = struct.Struct("<IB3xHxx4x32sQQ")
"""The fields of a body that readers compare, up to the incarnation."""
_INCARNATION_AT: Final = 56
_U64: Final = struct.Struct("<Q")
_STATE_AT: Final = 4
"""Where the state byte lies: after the magic."""
_WORDS: Final = RECORD_BYTES // 8
_KEY_WORDS: Final = KEY_BYTES // 8
_KEY_WORD: Final = 2
_PAYLOAD_CHECKSUM_WORD: Final = 10
_OFFSET_WORD: Final = 11
_PARENT_WORD: Final = 14
_CHECKSUM_WORD: Final = _WORDS - 1
"""Where fields lie, in words of 8 bytes (hosts are little-endian, as the columns on the wire)."""
_DIGEST_ROW: Final = struct.Struct("<IBQ")
_SLOT_BYTES: Final = 2
"""Of a slot's number that are not 0: a chunk has few enough extents."""
assert _BODY.size + _U64.size == RECORD_BYTES


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
    return body + _U64.pack(xxhash.xxh3_64_intdigest(body))


class RecordBatch:
    """Records of consecutive pages of one put, packed together: one copy writes a run of slots.

    Equal to `pack_record` of each, at a fraction of its time, and restated in place.
    """

    __slots__ = ("_packed", "_view", "_words")

    def __init__(
        self,
        first: Record,
        keys: bytes,
        parents: bytes,
        offsets: array[int],
        checksums: array[int],
    ) -> None:
        """`first` is the first page's record; the columns have one entry a page, it included."""
        count = len(offsets)
        self._packed = bytearray(pack_record(first)) * count
        self._view = memoryview(self._packed)
        self._words = self._view.cast("Q")
        if count == 1:
            return
        # Column by column: what differs from page to page lies on words of the record.
        words, own, above = self._words, memoryview(keys).cast("Q"), memoryview(parents).cast("Q")
        for word in range(_KEY_WORDS):
            words[_KEY_WORD + word :: _WORDS] = own[word::_KEY_WORDS]
            words[_PARENT_WORD + word :: _WORDS] = above[word::_KEY_WORDS]
        words[_PAYLOAD_CHECKSUM_WORD::_WORDS] = memoryview(checksums)
        words[_OFFSET_WORD::_WORDS] = memoryview(offsets)
        self._check_all()

    def restate(self, state: RecordState) -> None:
        """Give every record this state."""
        self._packed[_STATE_AT::RECORD_BYTES] = bytes((state,)) * (
            len(self._packed) // RECORD_BYTES
        )
        self._check_all()

    def packed(self, start: int, stop: int) -> memoryview:
        """Records [start, stop), RECORD_BYTES each; changes with the batch."""
        return self._view[start * RECORD_BYTES : stop * RECORD_BYTES]

    def _check_all(self) -> None:
        digest, view, body = xxhash.xxh3_64_intdigest, self._view, _BODY.size
        rows = range(0, len(view), RECORD_BYTES)
        checks = array("Q", [digest(view[at : at + body]) for at in rows])
        self._words[_CHECKSUM_WORD::_WORDS] = memoryview(checks)


def unpack_record(data: bytes | memoryview) -> Record | None:
    """The record in `data`; None for an all-zero (never used) one; CorruptPage otherwise."""
    if len(data) != RECORD_BYTES:
        raise CorruptPage(f"record: got {len(data)} bytes, want {RECORD_BYTES}")
    body = bytes(data[: _BODY.size])
    if not any(data):
        return None
    if _U64.unpack_from(data, _BODY.size)[0] != xxhash.xxh3_64_intdigest(body):
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


def in_new_life(data: bytes, incarnation: int) -> bytes | None:
    """The same record with another incarnation; None for one that is not whole.

    A fraction of the time of unpacking and packing it.
    """
    if _U64.unpack_from(data, _BODY.size)[0] != xxhash.xxh3_64_intdigest(data[: _BODY.size]):
        return None
    row = bytearray(data)
    _U64.pack_into(row, _INCARNATION_AT, incarnation)
    _U64.pack_into(row, _BODY.size, xxhash.xxh3_64_intdigest(row[: _BODY.size]))
    return bytes(row)


def is_sealed_as(
    data: bytes | memoryview, key: bytes, part: int, generation: int, incarnation: int
) -> bool:
    """Whether `data` is whole, SEALED, and still the same page, part, generation and life.

    The reader's last check (I8, I11): any doubt is False, never an exception. Looks at one copy of
    the bytes, which their owner may be changing meanwhile.
    """
    record = bytes(data)
    if len(record) != RECORD_BYTES:
        return False
    magic, found_state, found_part, found_key, found_generation, found_incarnation = (
        _HEAD.unpack_from(record)
    )
    return bool(
        magic == _MAGIC
        and found_state == RecordState.SEALED
        and found_key == key
        and found_part == part
        and found_generation == generation
        and found_incarnation == incarnation
        and _U64.unpack_from(record, _BODY.size)[0]
        == xxhash.xxh3_64_intdigest(record[: _BODY.size])
    )


def chunk_digest(entries: Iterable[tuple[int, int, int]]) -> int:
    """XXH3-64 over (slot, state, generation) of a chunk's extents that are not FREE, by slot.

    Worker and master compute it from their own tables; only chunks that differ are sent whole.
    """
    return xxhash.xxh3_64_intdigest(b"".join(_DIGEST_ROW.pack(*entry) for entry in entries))


def sealed_digest(slots: array[int], generations: array[int]) -> int:
    """`chunk_digest` of extents that are all SEALED; columns of equal length, ascending slots."""
    rows = bytearray(bytes((0, 0, 0, 0, RecordState.SEALED))) + bytes(8)
    rows *= len(slots)
    low, high = slots.tobytes(), generations.tobytes()
    for byte in range(_SLOT_BYTES):  # plane by plane: a row has no alignment
        rows[byte :: _DIGEST_ROW.size] = low[byte :: slots.itemsize]
    for byte in range(8):
        rows[5 + byte :: _DIGEST_ROW.size] = high[byte::8]
    return xxhash.xxh3_64_intdigest(rows)
