"""Whether sealed extents still hold what their records say: for suspects, and for the scrubber.

Owns one look at one extent. Must not know who asked, nor what becomes of a bad one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import CorruptPage, OutOfSpace, Unavailable
from kvstore.page import checksum_seeds, payload_checksum
from kvstore.record import RecordState, unpack_record
from kvstore.wire.messages.common import Outcome
from workers.tiers.guarded_file import OutOfService
from workers.tiers.hbm import Extents, HbmSegment
from workers.tiers.nvme import NvmeSegment
from workers.tiers.part_io import Extent, PartToRead

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.record import Record
    from workers.events import ExtentGroup
    from workers.record_table import RecordTable
    from workers.tiers.tier import Segment

LOG: Final = logging.getLogger(__name__)


class Bytes(Protocol):
    """The part of a segment that is looked at."""

    @property
    def records(self) -> RecordTable:
        """Its record tables."""
        ...

    @property
    def payload(self) -> memoryview:
        """Its payload area."""
        ...


def verify_all(
    segment: Segment, extents: ExtentGroup, is_ending: Callable[[], bool] = lambda: False
) -> bytes:
    """One Outcome byte an extent; TRANSPORT for all that are left when something fails.

    Nothing more is read once `is_ending`.
    """
    outcomes, size_class = bytearray(), extents.size_class
    try:
        for stretch in extents.stretches:
            end = stretch.offset + stretch.count * size_class
            for offset in range(stretch.offset, end, size_class):
                if is_ending():
                    break
                outcomes.append(_verified(segment, offset, size_class))
    except Exception:
        LOG.exception("check of %s failed", extents.segment)
    return bytes(outcomes).ljust(extents.count, bytes((Outcome.TRANSPORT,)))


def _verified(segment: Segment, offset: int, size_class: int) -> Outcome:
    if isinstance(segment, NvmeSegment):
        return verify_on_disk(segment, offset, size_class)
    if isinstance(segment, HbmSegment):
        return verify_on_device(segment, offset, size_class)
    return verify(segment, offset, size_class)


def verify(segment: Bytes, offset: int, size_class: int) -> Outcome:
    """OK, or CHECKSUM when payload or record are damaged.

    The state machine vouches that a page was sealed there and that nobody is at work on it: so
    anything but its sealed record is damage.
    """
    record = _sealed(segment.records, offset, size_class)
    if record is None:
        return Outcome.CHECKSUM
    payload = segment.payload[offset : offset + record.payload_bytes]
    found = payload_checksum(payload, record.key, record.part)
    return Outcome.OK if found == record.checksum else Outcome.CHECKSUM


def verify_on_disk(segment: NvmeSegment, offset: int, size_class: int) -> Outcome:
    """The same of what lies on a disk; TRANSPORT where that cannot be read."""
    try:
        record = _sealed(segment.records, offset, size_class)
    except OutOfService:
        return Outcome.TRANSPORT
    if record is None or not 0 < record.payload_bytes <= segment.geometry.chunk_bytes:
        return Outcome.CHECKSUM
    into = memoryview(bytearray(record.payload_bytes))
    extent = Extent(offset, size_class)
    (found,) = segment.read([PartToRead(extent, record.key, record.part, record.generation, into)])
    is_known = found.outcome in {Outcome.OK, Outcome.TRANSPORT}
    return found.outcome if is_known else Outcome.CHECKSUM


def verify_on_device(segment: HbmSegment, offset: int, size_class: int) -> Outcome:
    """The same of what lies on a device; TRANSPORT where that cannot be read."""
    record = _sealed(segment.records, offset, size_class)
    if record is None:
        return Outcome.CHECKSUM
    extents = Extents(offset, 1, size_class, record.payload_bytes)
    try:
        (found,) = segment.checksums(extents, checksum_seeds(record.key, record.part))
    except (OutOfSpace, Unavailable):
        return Outcome.TRANSPORT
    return Outcome.OK if found == record.checksum else Outcome.CHECKSUM


def _sealed(records: RecordTable, offset: int, size_class: int) -> Record | None:
    try:
        record = unpack_record(bytes(records.read(offset, size_class)))
    except CorruptPage:
        return None
    return record if record is not None and record.state is RecordState.SEALED else None
