"""DRAM segments: files in /dev/shm (or another memory file system), owned, mapped and touched.

Owns a file's life: made whole or not at all, never truncated, one owner at a time by flock, a new
incarnation at each start. The records inside are `workers.record_table`'s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, ConfigError, CorruptPage, OutOfSpace, SegmentInUse
from kvstore.ids import Incarnation
from kvstore.replica import Tier
from kvstore.segment import HEADER_BYTES, HEADER_MAGIC, SegmentHeader, pack_header, unpack_header
from kvstore.transfer.memory import address_of, populate
from workers.locks import ExtentLocks
from workers.record_table import Found, RecordTable

if TYPE_CHECKING:
    from kvstore.ids import SegmentId
    from kvstore.segment import Geometry

LOG: Final = logging.getLogger(__name__)
MODE: Final = 0o600
POPULATE_STEP_BYTES: Final = 256 * limits.MIB
MADV_HUGEPAGE: Final = 14
MADV_POPULATE_WRITE: Final = 23
HUGE_PAGES_OF_FILES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
REMEDY: Final = "; remove it (a standalone pool: `kvharbor wipe`, or `kvharbor up --fresh`)"
BLOCK_BYTES: Final = 512
"""Unit of st_blocks."""
FRESH_INCARNATION_BITS: Final = 40
RESTART_BITS: Final = 20
"""A first incarnation is random above this many bits, which are left for restarts."""


class DramSegment:
    """One mapped segment file (see `workers.tiers.tier.Segment`)."""

    tier: Final = Tier.DRAM

    def __init__(self, fd: int, header: SegmentHeader) -> None:
        """Own the locked descriptor `fd` of a file with this header, already in its new life."""
        self.id: Final = header.segment
        self.incarnation: Final = header.incarnation
        self.geometry: Final = header.geometry
        self.ownership: Final = fd
        # An open file description of its own: the locks of readers are tested against it, and
        # children that inherit the ownership must not be able to drop them.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(fd, self.geometry.file_bytes)
        self._whole = memoryview(self._map)
        self.payload: Final = self._whole[self.geometry.payload_base :]
        self.payload_address: Final = address_of(self.payload)
        self.records: Final = RecordTable(fd, self._whole, self.geometry)
        self.locks: Final = ExtentLocks(self._lock_fd, self.geometry.payload_base)

    def open_for_reader(self) -> int:
        """A read-only descriptor of its own open file description; the caller's to close."""
        # Through the descriptor, never by name: the name may be another file's by now.
        return os.open(f"/proc/self/fd/{self.ownership}", os.O_RDONLY | os.O_CLOEXEC)

    def use_huge_pages(self) -> None:
        """Ask for huge pages; ConfigError where the system does not give them to shared memory."""
        try:
            setting = HUGE_PAGES_OF_FILES.read_text()
        except OSError:
            setting = "[absent]"
        if not any(f"[{word}]" in setting for word in ("advise", "always", "within_size", "force")):
            raise ConfigError(
                f"huge pages were asked for, but {HUGE_PAGES_OF_FILES} says {setting.strip()}: "
                "want advise"
            )
        self._map.madvise(MADV_HUGEPAGE)

    def populate(self) -> None:
        """Touch every page now, so that no put pays for it. Takes about 0.1 s a GiB and more."""
        size = len(self.payload)
        for start in range(0, size, POPULATE_STEP_BYTES):
            step = min(POPULATE_STEP_BYTES, size - start)
            if not populate(self.payload_address + start, step, MADV_POPULATE_WRITE):
                for at in range(start, start + step, mmap.PAGESIZE):
                    self.payload[at] = self.payload[at]

    def close(self) -> None:
        """Unmap and give the ownership up; nothing may use the segment any more."""
        self.payload.release()
        self._whole.release()
        with contextlib.suppress(BufferError):
            # A view that is still held, by a traceback in a log, keeps the mapping and with it
            # the ownership until it is gone.
            self._map.close()
        os.close(self._lock_fd)
        os.close(self.ownership)


def open_dram(
    path: Path, cluster: str, segment: SegmentId, geometry: Geometry, *, huge_pages: bool = False
) -> tuple[DramSegment, Found]:
    """Own the segment file at `path`: the one that lies there, with its pages, or a new one.

    A file of another size is replaced by an empty one. Raises SegmentInUse when another process
    owns it, OutOfSpace with both numbers when the memory file system is too small, ConfigError
    when the file is not this cluster's segment of that name.
    """
    found = Found([])
    fd = _open_owned(path)
    header = None if fd is None else _usable_header(fd, path, cluster, segment, geometry)
    if fd is not None and header is None:
        try:
            _require_room(fd, path, geometry, returned=os.fstat(fd).st_blocks * BLOCK_BYTES)
            path.unlink()
        finally:
            os.close(fd)  # the memory must be free before the new file is made
    if fd is None or header is None:
        header = SegmentHeader(cluster, segment, fresh_incarnation(), geometry)
        opened = DramSegment(_create(path, header), header)
    else:
        known = header.incarnation
        header = SegmentHeader(cluster, segment, Incarnation(known + 1), geometry)
        # The header first: a life that had begun to rewrite its records never comes twice (I11).
        os.pwrite(fd, pack_header(header), 0)
        opened = DramSegment(fd, header)
        found = opened.records.take_over(known, header.incarnation)
    try:
        if huge_pages:
            opened.use_huge_pages()
        opened.populate()
    except BaseException:
        opened.close()
        raise
    return opened, found


def _open_owned(path: Path) -> int | None:
    """The descriptor of the file at `path`, locked for this process; None when there is none."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror}{REMEDY}") from error
        try:
            _own(fd, path)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # replaced by its last owner between the two calls: look again


def _own(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SegmentInUse(f"{path}: another process owns this segment") from error


def _usable_header(
    fd: int, path: Path, cluster: str, segment: SegmentId, geometry: Geometry
) -> SegmentHeader | None:
    """The header of a file whose pages can be kept; None when it is ours but to be replaced."""
    data = os.pread(fd, HEADER_BYTES, 0)
    if not data.startswith(HEADER_MAGIC):
        raise ConfigError(f"{path}: exists and is not a segment of a kvharbor pool{REMEDY}")
    try:
        header = unpack_header(data)
    except (CorruptPage, BadValue) as error:
        LOG.warning("%s: %s; it is replaced by an empty segment", path, error)
        return None
    if (header.cluster, header.segment) != (cluster, segment):
        raise ConfigError(
            f"{path}: holds segment {header.segment} of cluster {header.cluster}, "
            f"want {segment} of {cluster}{REMEDY}"
        )
    length = os.fstat(fd).st_size
    if header.geometry != geometry or length != geometry.file_bytes:
        LOG.warning(
            "%s: has %d bytes for pages, %d are asked for; it is replaced by an empty segment",
            path, header.geometry.payload_bytes, geometry.payload_bytes,
        )  # fmt: skip
        return None
    return header


def fresh_incarnation() -> Incarnation:
    """The first life of a new segment: one that none of that name can have had before."""
    drawn = int.from_bytes(os.urandom(FRESH_INCARNATION_BITS // 8), "little")
    return Incarnation((drawn << RESTART_BITS) + 1)


def _create(path: Path, header: SegmentHeader) -> int:
    """Make a whole segment file, already owned, and only then give it its name."""
    geometry = header.geometry
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: cannot hold a segment: {error.strerror}; want a folder of a memory "
            "file system such as /dev/shm"
        ) from error
    try:
        _own(fd, path)
        _allocate(fd, path, geometry)
        os.pwrite(fd, pack_header(header), 0)
        # With a directory descriptor (ignored for this path) Python follows the magic link.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError as error:
        os.close(fd)
        raise SegmentInUse(f"{path}: another process has just made this segment") from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_room(fd: int, path: Path, geometry: Geometry, returned: int = 0) -> None:
    """OutOfSpace unless header and payload fit, with `returned` bytes more than are free now."""
    room = os.fstatvfs(fd)
    free, want = room.f_bavail * room.f_frsize + returned, HEADER_BYTES + geometry.payload_bytes
    if free < want:
        raise OutOfSpace(
            f"{path.parent} has {free} bytes free, the segment needs {want}: make it larger (in a "
            "container: --shm-size) or lend less"
        )


def _allocate(fd: int, path: Path, geometry: Geometry) -> None:
    """Take the memory of header and payload; tables are taken as chunks are cut."""
    _require_room(fd, path, geometry)
    try:
        os.posix_fallocate(fd, 0, HEADER_BYTES)
        for start in range(geometry.payload_base, geometry.file_bytes, POPULATE_STEP_BYTES):
            step = min(POPULATE_STEP_BYTES, geometry.file_bytes - start)
            os.posix_fallocate(fd, start, step)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OutOfSpace(
            f"{path.parent} ran out of space below {geometry.payload_bytes} bytes"
        ) from error
