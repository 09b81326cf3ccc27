"""Parts to and from a disk: encoded, in runs of neighbours, verified before anybody sees them.

Owns the order of a write (record RESERVED, bytes, record SEALED) and of a read (record, bytes,
checksum, record again). Must not know why a part moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.codec import COMPRESSING, Codec, decode, encode
from kvstore.errors import CorruptPage
from kvstore.ids import Generation, PageKey
from kvstore.page import payload_checksum
from kvstore.record import (
    RECORD_BYTES,
    Record,
    RecordState,
    is_sealed_as,
    pack_record,
    unpack_record,
)
from kvstore.segment import size_class_of
from kvstore.transfer.memory import address_of, copy_bytes, zero_bytes
from kvstore.wire.messages.common import Outcome
from workers.events import Stretch
from workers.tiers.codec_choice import Trial
from workers.tiers.disk import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.ids import Incarnation
    from kvstore.segment import Geometry
    from workers.record_table import RecordTable
    from workers.tiers.guarded_file import GuardedFile
    from workers.tiers.io_threads import IoThreads

RUN_BYTES_MAX: Final = 1 * limits.MIB
"""Neighbours moved by one call of the system. More gains nothing on the disks that we know."""
RUN_PARTS_MAX: Final = 256
"""A call of the system takes 1024 pieces of memory."""


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Where a part lies: payload offset and size class, in bytes."""

    offset: int
    size_class: int


class PartToRead(msgspec.Struct, frozen=True):
    """A part that should lie at `extent`, and where to bring it; `into` is as long as the part."""

    extent: Extent
    key: PageKey
    part: int
    generation: Generation
    into: memoryview


class PartRead(msgspec.Struct, frozen=True):
    """OK with the record that proves the bytes; else `into` holds zeros.

    STALE: something else lies there. CHECKSUM: what lies there is damaged. TRANSPORT: it could not
    be read.
    """

    outcome: Outcome
    record: Record | None = None


class PartToWrite(msgspec.Struct, frozen=True):
    """A part and what its record will say: place, key, generation, checksum, parent, flags.

    State, incarnation, stored bytes and codec of `record` are not looked at.
    """

    record: Record
    payload: memoryview


class PartWritten(msgspec.Struct, frozen=True):
    """OK: sealed. `stored_bytes` is the length of the stored form, 0 where none was made.

    TOO_BIG: that length does not fit the extent. CHECKSUM: the payload is not what the record
    says. OUT_OF_SPACE: no room for the record, or no memory. TRANSPORT: the disk takes no writes.
    """

    outcome: Outcome
    stored_bytes: int = 0
    codec: Codec = Codec.NONE


class Encoded(msgspec.Struct, frozen=True):
    """A part's stored form. For NONE it is the payload itself."""

    codec: Codec
    stored: memoryview


def runs(geometry: Geometry, extents: Sequence[Extent]) -> list[Stretch]:
    """Extents as neighbours in order, none longer than one call of the system should be.

    `page` counts within `extents`. BadValue for a place that no extent can have.
    """
    found: list[Stretch] = []
    page, count = 0, len(extents)
    while page < count:
        offset, size_class = extents[page].offset, extents[page].size_class
        geometry.check_extent(offset, size_class)
        start = geometry.chunk_start(offset, size_class)
        slot = (offset - start) // size_class
        most = min(RUN_PARTS_MAX, max(1, RUN_BYTES_MAX // size_class))
        stop = page + min(most, count - page, geometry.chunk_slots(size_class) - slot)
        last = page + 1
        while last < stop and extents[last] == Extent(
            offset + (last - page) * size_class, size_class
        ):
            last += 1
        found.append(Stretch(page, last - page, start, slot, offset))
        page = last
    return found


def encoded(codec: Codec, payload: memoryview) -> Encoded:
    """The stored form by this codec; as it is where that saves no block of the disk."""
    stored = encode(codec, payload)
    if stored is None or size_class_of(len(stored)) >= size_class_of(len(payload)):
        return Encoded(Codec.NONE, payload)
    return Encoded(codec, memoryview(stored))


def tried(payload: memoryview, clock: Clock) -> tuple[list[Trial], Encoded]:
    """What every codec does to this part, and the shortest form."""
    trials: list[Trial] = []
    shortest = Encoded(Codec.NONE, payload)
    into = memoryview(bytearray(len(payload)))
    for codec in COMPRESSING:
        started_s = clock.now_s()
        made = encoded(codec, payload)
        if made.codec is not Codec.NONE:
            decode(made.codec, made.stored, into)
        seconds = clock.now_s() - started_s
        trials.append(Trial(codec, len(payload), len(made.stored), seconds))
        if len(made.stored) < len(shortest.stored):
            shortest = made
    return trials, shortest


class PartFile:
    """Runs of parts in one segment file. Every method runs in one of `threads`."""

    def __init__(
        self,
        file: GuardedFile,
        records: RecordTable,
        geometry: Geometry,
        incarnation: Incarnation,
        threads: IoThreads,
    ) -> None:
        """Work on these; all stay the caller's."""
        self._file = file
        self._records = records
        self._base = geometry.payload_base
        self._incarnation = incarnation
        self._threads = threads

    # --- writing ------------------------------------------------------------------------------

    def write_run(
        self, stretch: Stretch, records: Sequence[Record], forms: Sequence[Encoded]
    ) -> None:
        """Seal neighbours; `records` and `forms` are the stretch's. OutOfService, OSError (ENOSPC).

        A kill or an error leaves RESERVED records, which nobody adopts. Seals are not synced: one
        that is lost, or survives without its bytes, is a miss by checksum.
        """
        size_class = records[0].size_class
        self._records.require(stretch, size_class)
        self._records.write_rows(stretch, self._rows(RecordState.RESERVED, records, forms))
        self._file.write_payload(self._pieces(size_class, forms), self._base + stretch.offset)
        self._records.write_rows(stretch, self._rows(RecordState.SEALED, records, forms))

    def _rows(
        self, state: RecordState, records: Sequence[Record], forms: Sequence[Encoded]
    ) -> bytes:
        return b"".join(
            pack_record(
                msgspec.structs.replace(
                    record,
                    state=state,
                    incarnation=self._incarnation,
                    stored_bytes=len(form.stored),
                    codec=form.codec,
                )
            )
            for record, form in zip(records, forms, strict=True)
        )

    def _pieces(self, size_class: int, forms: Sequence[Encoded]) -> list[memoryview]:
        """What to write: the parts' own memory where it is fit for that, else copies of them."""
        views = [form.stored for form in forms]
        if _is_direct(views, size_class):
            return views
        last = size_class_of(len(views[-1]))
        aligned = self._threads.aligned((len(views) - 1) * size_class + last)
        for i, view in enumerate(views):
            place = aligned[i * size_class : (i + 1) * size_class]
            _copy(view, place)
            wipe(place[len(view) :])  # of whatever lay here before
        return [aligned]

    # --- reading ------------------------------------------------------------------------------

    def read_run(self, stretch: Stretch, parts: Sequence[PartToRead]) -> list[PartRead]:
        """Bring neighbours; `parts` are the stretch's. OutOfService when the disk fails."""
        rows = self._rows_of(stretch)
        records = [self._proven(row, part) for row, part in zip(rows, parts, strict=True)]
        wanted = [i for i, record in enumerate(records) if record is not None]
        if not wanted:
            return [PartRead(Outcome.STALE)] * len(parts)
        found = self._bring(stretch, parts, records)
        # After the last byte the records must be what they were (I8).
        same = [a == b for a, b in zip(rows, self._rows_of(stretch), strict=True)]
        return [
            each if ok else PartRead(Outcome.STALE) for each, ok in zip(found, same, strict=True)
        ]

    def _rows_of(self, stretch: Stretch) -> list[bytes]:
        whole = bytes(self._records.read_stretch(stretch))
        return [whole[at : at + RECORD_BYTES] for at in range(0, len(whole), RECORD_BYTES)]

    def _proven(self, row: bytes, part: PartToRead) -> Record | None:
        """The record, if it is of exactly this part at this place."""
        if not is_sealed_as(row, part.key, part.part, part.generation, self._incarnation):
            return None
        record = unpack_record(row)
        if record is None or Extent(record.offset, record.size_class) != part.extent:
            return None
        fits = 0 < record.stored_bytes <= record.size_class
        return record if fits and record.payload_bytes == len(part.into) else None

    def _bring(
        self, stretch: Stretch, parts: Sequence[PartToRead], records: Sequence[Record | None]
    ) -> list[PartRead]:
        size_class = parts[0].extent.size_class
        views = [part.into for part in parts]
        as_they_are = all(r is not None and r.codec == Codec.NONE for r in records)
        if as_they_are and _is_direct(views, size_class):
            self._file.read_payload(views, self._base + stretch.offset)
            return [_judged(part, record) for part, record in zip(parts, records, strict=True)]
        last = records[-1]
        rest = size_class if last is None else size_class_of(last.stored_bytes)
        aligned = self._threads.aligned((len(parts) - 1) * size_class + rest)
        self._file.read_payload([aligned], self._base + stretch.offset)
        found: list[PartRead] = []
        for i, (part, record) in enumerate(zip(parts, records, strict=True)):
            if record is None:
                found.append(PartRead(Outcome.STALE))
                continue
            stored = aligned[i * size_class : i * size_class + record.stored_bytes]
            try:
                if record.codec == Codec.NONE and len(stored) == len(part.into):
                    _copy(stored, part.into)
                else:
                    decode(record.codec, stored, part.into)
            except CorruptPage:
                found.append(PartRead(Outcome.CHECKSUM))
            else:
                found.append(_judged(part, record))
        return found


def _judged(part: PartToRead, record: Record | None) -> PartRead:
    """What the bytes in `part.into` prove to be."""
    if record is None or payload_checksum(part.into, part.key, part.part) != record.checksum:
        return PartRead(Outcome.CHECKSUM)
    return PartRead(Outcome.OK, record)


def _is_direct(views: Sequence[memoryview], size_class: int) -> bool:
    """Whether the disk may take or fill these views themselves: whole blocks, without gaps."""
    if any(len(view) % BLOCK_BYTES or address_of(view) % BLOCK_BYTES for view in views):
        return False
    return len(views) == 1 or all(len(view) == size_class for view in views)


def wipe(view: memoryview) -> None:
    """Zeros, without the interpreter lock."""
    zero_bytes(address_of(view), 0, len(view))


def _copy(source: memoryview, to: memoryview) -> None:
    """Copy without the interpreter lock."""
    copy_bytes(address_of(to), address_of(source), len(source))
