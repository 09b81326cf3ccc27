"""Whether a sealed extent still holds what its record says: for suspects that readers report.

Owns one look at one extent. Must not know who asked, nor what becomes of a bad one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvstore.errors import CorruptPage
from kvstore.page import payload_checksum
from kvstore.record import RecordState, unpack_record
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from workers.record_table import RecordTable


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


def verify(segment: Bytes, offset: int, size_class: int) -> Outcome:
    """OK, or CHECKSUM when payload or record are damaged.

    The state machine vouches that a page was sealed there and that nobody is at work on it: so
    anything but its sealed record is damage.
    """
    try:
        record = unpack_record(bytes(segment.records.read(offset, size_class)))
    except CorruptPage:
        return Outcome.CHECKSUM
    if record is None or record.state is not RecordState.SEALED:
        return Outcome.CHECKSUM
    payload = segment.payload[offset : offset + record.payload_bytes]
    found = payload_checksum(payload, record.key, record.part)
    return Outcome.OK if found == record.checksum else Outcome.CHECKSUM
