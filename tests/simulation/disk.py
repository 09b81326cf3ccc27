"""A segment on a disk of the simulation: what is not synced is lost with the power, calls may fail.

The medium and its faults are tests.fake_disk's; how errors end a segment's service, and how parts
are read and verified, is the worker's own code.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import OutOfSpace
from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RecordState
from kvstore.replica import Tier
from kvstore.segment import HEADER_BYTES
from kvstore.wire.messages.common import Outcome
from tests.fake_disk import FakeDisk, FakeFile
from tests.simulation.store import SegmentStore
from workers.record_table import RecordTable
from workers.tiers.disk import BLOCK_BYTES
from workers.tiers.guarded_file import GuardedFile, OutOfService, ServiceState
from workers.tiers.part_io import PartFile, PartRead, PartToRead, runs, wipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from kvstore.record import Record
    from kvstore.segment import Geometry
    from workers.record_table import Found
    from workers.tiers.io_threads import IoThreads

FOLDER: Final = Path("/d")


class _OneThread:
    """Stands in for the disk's threads: in virtual time there is one."""

    def aligned(self, length: int) -> memoryview:
        """Memory for one call."""
        return memoryview(bytearray(length))


class DiskStore(SegmentStore):
    """A segment file on a disk of its own."""

    tier = Tier.NVME

    def __init__(self, segment: SegmentId, geometry: Geometry) -> None:
        """A new file, in no life yet."""
        super().__init__(segment, geometry)
        self.disk = FakeDisk()
        self._path = FOLDER / segment
        made = self.disk.create(FOLDER)
        made.allocate(0, HEADER_BYTES)
        made.allocate(geometry.payload_base, geometry.payload_bytes)
        made.publish(self._path)
        made.close()
        self._open()

    def _open(self) -> None:
        opened = self.disk.open(self._path)
        assert opened is not None, self._path
        self._opened: FakeFile = opened
        self.file = GuardedFile(self.segment, opened, lambda: True)
        self.records = RecordTable(self.file, self.geometry)

    @property
    def service(self) -> ServiceState:
        """What it still does."""
        return self.file.service

    @property
    def is_writable(self) -> bool:
        """Whether its owner can change records now."""
        return self.service is ServiceState.SERVING

    @property
    def is_ailing(self) -> bool:
        """Whether it fails, or has failed in this life."""
        errors = (self.disk.read_error, self.disk.write_error)
        return not self.is_writable or any(error is not None for error in errors)

    def begin_life(self) -> Found:
        """An owner starts, on a disk that works."""
        self.disk.end_process()
        self.disk.read_error = self.disk.write_error = self.disk.sync_error = None
        self._open()
        known = self.incarnation
        self.incarnation = Incarnation(known + 1)
        found = self.records.take_over(known, self.incarnation)
        self.file.sync()
        self.damaged &= {record.offset for record in found.adopted}
        return found

    def look(self, at: int, length: int) -> bytes:
        """What lies at a file offset."""
        return bytes(self._opened.inode.data[at : at + length])

    def flip(self, at: int, bit: int) -> None:
        """A fault: one bit of the byte at a file offset turns over, on the medium."""
        self._opened.inode.flip(at * 8 + bit)

    def close(self) -> None:
        """Nothing of the system's is held."""

    # --- the owner's work ---------------------------------------------------------------------

    def write_block(self, offset: int, data: bytes) -> None:
        """Write whole blocks of the payload area. OutOfService where the disk takes none."""
        self.file.write_payload([memoryview(data)], self.geometry.payload_base + offset)

    def change(self, changes: Callable[[], None]) -> Outcome:
        """Change records, durably: OK, or TRANSPORT where that is not possible."""
        try:
            changes()
            self.file.sync()
        except OutOfService:
            return Outcome.TRANSPORT
        return Outcome.OK

    def read(self, parts: Sequence[PartToRead]) -> list[PartRead]:
        """Bring parts, each verified, as workers.tiers.nvme does."""
        threads: IoThreads = _OneThread()  # type: ignore[assignment]  # all that is asked of them
        file = PartFile(self.file, self.records, self.geometry, self.incarnation, threads)
        found = [PartRead(Outcome.TRANSPORT)] * len(parts)
        for stretch in runs(self.geometry, [part.extent for part in parts]):
            stop = stretch.page + stretch.count
            with suppress(OutOfService, OutOfSpace):
                found[stretch.page : stop] = file.read_run(stretch, parts[stretch.page : stop])
        for part, each in zip(parts, found, strict=True):
            if each.record is None:
                wipe(part.into)
        return found

    # --- faults -------------------------------------------------------------------------------

    def fail_writes(self) -> None:
        """The next write finds a broken disk."""
        self.disk.write_error = errno.EIO

    def fail_reads(self) -> None:
        """The next read finds a broken disk."""
        self.disk.read_error = errno.EIO

    def lose_power(self, random: Random, is_right: Callable[[Record], bool]) -> int:
        """Of what was not synced some blocks are lost; how many.

        A page that is sealed no more, or still is but without its bytes, counts as damaged.
        """
        inode = self._opened.inode
        unsynced = {block: self._block(block) for block in inode.unsynced}
        sealed = self._sealed()
        self.disk.lose_power(random)
        lost = {block for block, data in unsynced.items() if self._block(block) != data}
        left = self._sealed()
        self.damaged |= {offset for offset, was in sealed.items() if left.get(offset) != was}
        for record in left.values():
            if lost & self._blocks_of(record) and not is_right(record):
                self.damaged.add(record.offset)
        return len(lost)

    def _sealed(self) -> dict[int, Record]:
        records = self.all_records()
        return {each.offset: each for each in records if each.state is RecordState.SEALED}

    def _block(self, block: int) -> bytes:
        return self.look(block * BLOCK_BYTES, BLOCK_BYTES)

    def _blocks_of(self, record: Record) -> set[int]:
        at = self.geometry.payload_base + record.offset
        return set(range(at // BLOCK_BYTES, -(-(at + record.stored_bytes) // BLOCK_BYTES)))
