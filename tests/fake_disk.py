"""A disk in memory whose every fault can be had: errors, short and torn writes, loss of power.

Keeps for each file what would survive a loss of power beside what reads see. Not a test.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import SegmentInUse
from workers.tiers.disk import BLOCK_BYTES

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.fakes import ManualClock
    from workers.tiers.disk import DiskFile


class Killed(BaseException):
    """The process ends here, as by kill -9: what was written stays, nothing more is done."""


class Inode:
    """The bytes of one file, now and after a loss of power."""

    def __init__(self) -> None:
        """An empty file."""
        self.data = bytearray()
        self.durable = bytearray()
        self.unsynced: set[int] = set()
        """Blocks written since the last sync."""
        self.written: set[int] = set()
        """Blocks that are no holes."""
        self.allocated: set[int] = set()
        self.is_owned = False

    def grow(self, size: int) -> None:
        """Lengthen by zeros, durably."""
        more = bytes(max(0, size - len(self.data)))
        self.data += more
        self.durable += more

    def write(self, at: int, piece: bytes) -> None:
        """Write what reads see at once."""
        self.grow(at + len(piece))
        self.data[at : at + len(piece)] = piece
        blocks = set(range(at // BLOCK_BYTES, -(-(at + len(piece)) // BLOCK_BYTES)))
        self.unsynced |= blocks
        self.written |= blocks
        self.allocated |= blocks

    def sync(self) -> None:
        """Make what reads see durable."""
        for block in self.unsynced:
            span = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            self.durable[span] = self.data[span]
        self.unsynced.clear()

    def flip(self, bit: int) -> None:
        """Change one bit on the medium."""
        self.data[bit // 8] ^= 1 << bit % 8
        self.durable[bit // 8] ^= 1 << bit % 8


class FakeDisk:
    """Folders and files by name, with a capacity. Faults are fields to set, for all its files.

    `kill_after` counts down the changes of files that still happen; the next raises Killed.
    """

    def __init__(self, capacity_bytes: int = 1 << 30, clock: ManualClock | None = None) -> None:
        """An empty disk with one folder, /d."""
        self.capacity_bytes = capacity_bytes
        self.folders = {Path("/d")}
        self.names: dict[Path, Inode] = {}
        self.has_direct = True
        self.is_read_only = False
        self.read_error: int | None = None
        self.write_error: int | None = None
        self.sync_error: int | None = None
        self.move_bytes_max: int | None = None
        """Reads and writes move at most so much at once."""
        self.misdirect_bytes = 0
        """The next payload-sized write lands so far from its place."""
        self.kill_after: int | None = None
        self.seconds_a_call = 0.0
        self.answers = threading.Event()
        """While it is clear, calls hang."""
        self.answers.set()
        self.trace: list[tuple[int, bytes]] = []
        """Every write, in order: (file offset, bytes)."""
        self._clock = clock
        self._mutex = threading.Lock()

    # --- Disk ---------------------------------------------------------------------------------

    def open(self, path: Path) -> FakeFile | None:
        """See `Disk`."""
        inode = self.names.get(path)
        if inode is None:
            return None
        self._require_writable(path)
        if inode.is_owned:
            raise SegmentInUse(f"{path}: another process owns this segment")
        return FakeFile(self, inode)

    def create(self, folder: Path) -> FakeFile:
        """See `Disk`."""
        if folder not in self.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._require_writable(folder)
        return FakeFile(self, Inode())

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        del self.names[path]

    def is_named(self, file: DiskFile, path: Path) -> bool:
        """See `Disk`."""
        assert isinstance(file, FakeFile)
        return self.names.get(path) is file.inode

    # --- what tests do to it ------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """What is left of the capacity."""
        taken = sum(len(inode.allocated) for inode in self.names.values()) * BLOCK_BYTES
        return max(0, self.capacity_bytes - taken)

    def vanish(self, folder: Path) -> None:
        """Take a folder away, with every name in it."""
        self.folders.discard(folder)
        self.names = {path: node for path, node in self.names.items() if path.parent != folder}

    def end_process(self) -> None:
        """Nobody owns anything any more, and nobody is killed any more."""
        self.kill_after = None
        for inode in self.names.values():
            inode.is_owned = False

    def lose_power(self, draw: random.Random, kept: float = 0.5) -> None:
        """End the process and keep each unsynced block with the probability `kept`."""
        self.end_process()
        for inode in self.names.values():
            for block in sorted(inode.unsynced):
                span = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
                if draw.random() < kept:
                    inode.durable[span] = inode.data[span]
            inode.unsynced.clear()
            inode.data = bytearray(inode.durable)

    # --- for its files ------------------------------------------------------------------------

    def spend(self) -> None:
        """Hang, or let virtual time pass, as a slow disk does."""
        self.answers.wait()
        if self._clock is not None:
            self._clock.advance(self.seconds_a_call)

    def change(self) -> None:
        """Count a change; Killed when the process does not live to see it."""
        with self._mutex:
            if self.kill_after is not None:
                if self.kill_after == 0:
                    raise Killed
                self.kill_after -= 1

    def place(self, at: int, length: int) -> int:
        """Where a write lands."""
        if length < BLOCK_BYTES:
            return at
        at += self.misdirect_bytes
        self.misdirect_bytes = 0
        return at

    def _require_writable(self, path: Path) -> None:
        if self.is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


class FakeFile:
    """An open file of a FakeDisk; both its channels."""

    def __init__(self, disk: FakeDisk, inode: Inode) -> None:
        """Own the file."""
        self.inode: Final = inode
        self._disk = disk
        self.cached = FakeChannel(disk, inode, 1)
        inode.is_owned = True

    @property
    def size_bytes(self) -> int:
        """See `DiskFile`."""
        return len(self.inode.data)

    @property
    def taken_bytes(self) -> int:
        """See `DiskFile`."""
        return len(self.inode.allocated) * BLOCK_BYTES

    @property
    def free_bytes(self) -> int:
        """See `DiskFile`."""
        return self._disk.free_bytes

    def direct(self) -> FakeChannel | None:
        """See `DiskFile`."""
        if not self._disk.has_direct:
            return None
        return FakeChannel(self._disk, self.inode, BLOCK_BYTES)

    def allocate(self, at: int, length: int) -> None:
        """See `DiskFile`."""
        self._disk.change()
        blocks = range(at // BLOCK_BYTES, -(-(at + length) // BLOCK_BYTES))
        most = self._disk.free_bytes // BLOCK_BYTES + len(self.inode.allocated)
        missing = most + 1 if len(blocks) > most else len(set(blocks) - self.inode.allocated)
        if missing * BLOCK_BYTES > self._disk.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.inode.allocated |= set(blocks)
        self.inode.grow(at + length)

    def next_data(self, at: int) -> int | None:
        """See `DiskFile`."""
        first = at // BLOCK_BYTES
        blocks = [block for block in self.inode.written if block >= first]
        return max(at, min(blocks) * BLOCK_BYTES) if blocks else None

    def sync(self) -> None:
        """See `DiskFile`."""
        self._disk.change()
        self._disk.spend()
        _raise(self._disk.sync_error)
        self.inode.sync()

    def publish(self, path: Path) -> None:
        """See `DiskFile`."""
        self._disk.change()
        if path in self._disk.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._disk.names[path] = self.inode

    def close(self) -> None:
        """See `DiskFile`."""
        self.inode.is_owned = False


class FakeChannel:
    """Bytes of one file, with the disk's faults."""

    def __init__(self, disk: FakeDisk, inode: Inode, granule: int) -> None:
        """See `Channel`."""
        self.granule = granule
        self._disk = disk
        self._inode = inode

    def pread(self, views: Sequence[memoryview], at: int) -> int:
        """See `Channel`."""
        self._disk.spend()
        _raise(self._disk.read_error)
        self._require_aligned(views, at)
        left = self._at_once(views)
        done = 0
        for view in views:
            piece = self._inode.data[at + done : at + done + min(len(view), left - done)]
            view[: len(piece)] = piece
            done += len(piece)
        return done

    def pwrite(self, views: Sequence[memoryview], at: int) -> int:
        """See `Channel`."""
        self._disk.change()
        self._disk.spend()
        _raise(errno.EROFS if self._disk.is_read_only else self._disk.write_error)
        self._require_aligned(views, at)
        piece = b"".join(views)[: self._at_once(views)]
        self._disk.trace.append((at, piece))
        self._inode.write(self._disk.place(at, len(piece)), piece)
        return len(piece)

    def _at_once(self, views: Sequence[memoryview]) -> int:
        asked = sum(len(view) for view in views)
        most = self._disk.move_bytes_max
        return asked if most is None else min(asked, most)

    def _require_aligned(self, views: Sequence[memoryview], at: int) -> None:
        if at % self.granule or any(len(view) % self.granule for view in views):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _raise(number: int | None) -> None:
    if number is not None:
        raise OSError(number, os.strerror(number))
