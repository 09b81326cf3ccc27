"""The segment file of a worker in memory, read and damaged behind its owner's back. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import CorruptPage
from kvstore.page import payload_checksum
from kvstore.record import RECORD_BYTES, RecordState, unpack_record
from kvstore.segment import HEADER_BYTES, unpack_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from kvstore.record import Record

ZEROS: Final = bytes(RECORD_BYTES)
SPOILT_SHARE: Final = 0.3


def sealed(path: Path) -> Iterator[tuple[int, Record]]:
    """(file offset of the payload, record) of every page that lies there now."""
    with path.open("rb") as file:
        geometry = unpack_header(file.read(HEADER_BYTES)).geometry
        area = file.read(geometry.frames * geometry.records_per_frame * RECORD_BYTES)
    for at in range(0, len(area), RECORD_BYTES):
        row = area[at : at + RECORD_BYTES]
        record = None if row == ZEROS else _whole(row)
        if record is not None and record.state is RecordState.SEALED:
            yield geometry.payload_base + record.offset, record


def spoil(path: Path, draw: Random) -> int:
    """Turn a bit over in some of the pages; how many."""
    spoilt = 0
    with path.open("r+b", buffering=0) as file:
        for at, record in sealed(path):
            if draw.random() < SPOILT_SHARE:
                place = at + draw.randrange(record.payload_bytes)
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes((byte ^ 1 << draw.randrange(8),)))
                spoilt += 1
    return spoilt


def damaged(path: Path) -> int:
    """How many pages lie there that are not what their record says."""
    with path.open("rb", buffering=0) as file:
        found = 0
        for at, record in sealed(path):
            file.seek(at)
            payload = file.read(record.payload_bytes)
            found += payload_checksum(payload, record.key, record.part) != record.checksum
    return found


def _whole(row: bytes) -> Record | None:
    try:
        return unpack_record(row)
    except CorruptPage:
        return None
