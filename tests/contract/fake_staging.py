"""The staging of a fake worker: its segment stands for a disk, another for memory to read from.

Honest and simple: slots one after another, round and round. Not a test.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvstore.ids import PageKey
from kvstore.page import payload_checksum
from kvstore.record import RecordState
from kvstore.segment import size_class_of
from kvstore.transfer.transport import column
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.transfers import Staged
from tests.fakes import keys_of, payload
from tests.unit.segment_files import INCARNATION, SegmentFile

if TYPE_CHECKING:
    from kvstore.wire.messages.transfers import ReleaseStaged, StageExtents

NAME = "staging"


class FakeStaging:
    """Fills `slots` extents of a segment file; BUSY when none is free."""

    def __init__(self, disk: SegmentFile) -> None:
        """Nothing is staged."""
        self.disk = disk
        self.file = SegmentFile()
        self.slots = 4
        self.taken: list[int] = []
        """Offsets of slots that were not released yet."""
        self._next = 0

    def close(self) -> None:
        """Free the memory."""
        self.file.close()

    def stage(self, message: StageExtents, sealed: bytes) -> Staged:
        """Copy the pages whose records are right; the last outcomes say what came of each."""
        outcomes, offsets, generations = bytearray(sealed), array("Q"), array("Q")
        for i, key in enumerate(keys_of(message.keys)):
            offset = 0
            if not outcomes[i]:
                outcomes[i], offset = self._copied(message, i, PageKey(key))
            offsets.append(offset)
            generations.append(offset + 1)
        columns = offsets.tobytes(), generations.tobytes()
        return Staged(bytes(outcomes), NAME, INCARNATION, *columns)

    def release(self, message: ReleaseStaged) -> None:
        """Take the slots back."""
        for offset in column(message.offsets):
            self.taken.remove(offset)

    def _copied(self, message: StageExtents, i: int, key: PageKey) -> tuple[int, int]:
        """Outcome and the offset that the page was copied to."""
        size = message.part_bytes
        if len(self.taken) >= self.slots:
            return Outcome.BUSY, 0
        start = self.disk.geometry.payload_base + column(message.offsets)[i]
        data = self.disk.bytes[start : start + size]
        if payload_checksum(data, key, message.part) != self._checksum(key, message.part, size):
            return Outcome.CHECKSUM, 0
        offset = self._next % self.slots * size_class_of(size)
        self._next += 1
        assert offset not in self.taken
        self.taken.append(offset)
        self.file.write_record(key, offset, size, part=message.part, state=RecordState.RESERVED)
        start = self.file.geometry.payload_base + offset
        self.file.bytes[start : start + size] = data
        self.file.write_record(key, offset, size, part=message.part)
        return Outcome.OK, offset

    def _checksum(self, key: PageKey, part: int, size: int) -> int:
        """What the writer hashed."""
        return payload_checksum(payload(key, part, size), key, part)
