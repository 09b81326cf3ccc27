"""What segments ask of a file system, and the real one. Every call blocks.

Calls raise OSError as the system does, and SegmentInUse where another process owns a file. Who may
do what with a segment file, and what an error means for it, is decided above.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvstore import limits
from kvstore.errors import SegmentInUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

BLOCK_BYTES: Final = limits.EXTENT_ALIGN_BYTES
"""Places, lengths and memory of a direct channel are multiples of it."""
MODE: Final = 0o600
STATUS_BLOCK_BYTES: Final = 512
"""Unit of st_blocks."""


class Channel(Protocol):
    """A way to a file's bytes. `granule` is what places, lengths and memory are multiples of."""

    granule: int

    def pread(self, views: Sequence[memoryview], at: int) -> int:
        """Fill views one after the other from file offset `at`; the bytes read, maybe fewer."""
        ...

    def pwrite(self, views: Sequence[memoryview], at: int) -> int:
        """Write views one after the other to file offset `at`; the bytes written, maybe fewer."""
        ...


class DiskFile(Protocol):
    """An open file that this process owns until it is closed."""

    @property
    def cached(self) -> Channel:
        """Through the system's page cache, byte by byte; a read sees every write before it."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its length."""
        ...

    @property
    def taken_bytes(self) -> int:
        """What its removal would give back."""
        ...

    @property
    def free_bytes(self) -> int:
        """What its file system has left for us."""
        ...

    def direct(self) -> Channel | None:
        """A channel past the page cache; None where the file system has none. Asked once."""
        ...

    def allocate(self, at: int, length: int) -> None:
        """Have room for a range from now on, and the file long enough. New bytes are zeros."""
        ...

    def next_data(self, at: int) -> int | None:
        """The first place from `at` on that may hold something else than zeros, or None."""
        ...

    def sync(self) -> None:
        """Return when everything written so far would survive a loss of power."""
        ...

    def publish(self, path: Path) -> None:
        """Give a nameless file its name. FileExistsError where the name is taken."""
        ...

    def close(self) -> None:
        """Give the ownership up."""
        ...


File_co = TypeVar("File_co", bound=DiskFile, covariant=True)


class Disk(Protocol[File_co]):
    """Files by name."""

    def open(self, path: Path) -> File_co | None:
        """Own the file of that name, never through a link; None where there is none."""
        ...

    def create(self, folder: Path) -> File_co:
        """Own a new file without a name, gone when it is closed before it is published."""
        ...

    def remove(self, path: Path) -> None:
        """Take a name away; the file lives on while somebody has it open."""
        ...

    def is_named(self, file: DiskFile, path: Path) -> bool:
        """Whether the name leads to this open file."""
        ...


def read_whole(channel: Channel, views: Sequence[memoryview], at: int) -> None:
    """Fill all views. OSError, also (EIO) where the file ends before."""
    _move_whole(channel.pread, channel.granule, views, at)


def write_whole(channel: Channel, views: Sequence[memoryview], at: int) -> None:
    """Write all views. OSError, also (EIO) where nothing moves any more."""
    _move_whole(channel.pwrite, channel.granule, views, at)


def _move_whole(
    move: Callable[[Sequence[memoryview], int], int],
    granule: int,
    views: Sequence[memoryview],
    at: int,
) -> None:
    left = [view for view in views if len(view)]
    while left:
        moved = move(left, at)
        moved -= moved % granule  # the rest of a torn granule is moved again
        if moved <= 0:
            raise OSError(errno.EIO, f"nothing more was moved at {at}")
        at += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]


def next_data(fd: int, at: int) -> int | None:
    """The first place of a file from `at` on that is no hole, or None."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


class _Descriptor:
    """A channel through a descriptor, which stays the caller's."""

    def __init__(self, fd: int, granule: int) -> None:
        self._fd = fd
        self.granule = granule

    def pread(self, views: Sequence[memoryview], at: int) -> int:
        return os.preadv(self._fd, views, at)

    def pwrite(self, views: Sequence[memoryview], at: int) -> int:
        return os.pwritev(self._fd, views, at)


class LocalFile:
    """A file of this machine. `fd` is the descriptor whose flock makes this process its owner."""

    def __init__(self, fd: int) -> None:
        """Take an open, locked descriptor over."""
        self.fd: Final = fd
        self.cached: Channel = _Descriptor(fd, 1)
        self._direct_fd: int | None = None

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return os.fstat(self.fd).st_size

    @property
    def taken_bytes(self) -> int:
        """What its removal would give back."""
        return os.fstat(self.fd).st_blocks * STATUS_BLOCK_BYTES

    @property
    def free_bytes(self) -> int:
        """What its file system has left for us."""
        room = os.fstatvfs(self.fd)
        return room.f_bavail * room.f_frsize

    def direct(self) -> Channel | None:
        """A channel by O_DIRECT: tried, since no file system tells in advance."""
        fd = None
        try:
            # A description of its own: the mode would hold for the cached channel too.
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            with mmap.mmap(-1, BLOCK_BYTES) as block:
                os.preadv(fd, [block], 0)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            return None
        self._direct_fd = fd
        return _Descriptor(fd, BLOCK_BYTES)

    def allocate(self, at: int, length: int) -> None:
        """Have room for a range, by fallocate."""
        os.posix_fallocate(self.fd, at, length)

    def next_data(self, at: int) -> int | None:
        """The first place from `at` on that is no hole, or None."""
        return next_data(self.fd, at)

    def sync(self) -> None:
        """Return when what was written would survive a loss of power."""
        os.fdatasync(self.fd)

    def publish(self, path: Path) -> None:
        """Give a nameless file its name."""
        # With a directory descriptor (ignored for this path) Python follows the magic link.
        os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd, follow_symlinks=True)

    def close(self) -> None:
        """Give the ownership up."""
        if self._direct_fd is not None:
            os.close(self._direct_fd)
        os.close(self.fd)


class LocalDisk:
    """The file systems of this machine."""

    def open(self, path: Path) -> LocalFile | None:
        """Own the file of that name; None where there is none."""
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            file = LocalFile(fd)
            try:
                _own(fd, path)
                if self.is_named(file, path):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # replaced by its last owner between the two calls: look again

    def create(self, folder: Path) -> LocalFile:
        """Own a new file without a name."""
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
        try:
            _own(fd, folder)
        except BaseException:
            os.close(fd)
            raise
        return LocalFile(fd)

    def remove(self, path: Path) -> None:
        """Take a name away."""
        path.unlink()

    def is_named(self, file: DiskFile, path: Path) -> bool:
        """Whether the name leads to this open file."""
        assert isinstance(file, LocalFile)
        try:
            return os.path.samestat(os.fstat(file.fd), os.stat(path))
        except FileNotFoundError:
            return False


def _own(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SegmentInUse(f"{path}: another process owns this segment") from error
