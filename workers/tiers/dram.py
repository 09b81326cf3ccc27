"""DRAM segments: files in /dev/shm (or another memory file system), mapped and touched.

Owns the mapping. How a file is owned and replaced is `workers.tiers.segment_file`'s, the records
inside are `workers.record_table`'s.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import ConfigError
from kvstore.replica import Tier
from kvstore.transfer.memory import address_of, populate
from workers.locks import ExtentLocks
from workers.record_table import Found, RecordTable
from workers.tiers.disk import LocalDisk
from workers.tiers.mapped_records import MappedRecords
from workers.tiers.segment_file import Medium, nameless_segment_file, own_segment_file

if TYPE_CHECKING:
    from kvstore.ids import SegmentId
    from kvstore.segment import Geometry, SegmentHeader
    from workers.tiers.disk import LocalFile

POPULATE_STEP_BYTES: Final = 256 * limits.MIB
MADV_HUGEPAGE: Final = 14
MADV_POPULATE_WRITE: Final = 23
HUGE_PAGES_OF_FILES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MEDIUM: Final = Medium(
    folder="a folder of a memory file system such as /dev/shm",
    more_room="make it larger (in a container: --shm-size) or lend less",
    remedy="; remove it (a standalone pool: `kvharbor wipe`, or `kvharbor up --fresh`)",
)


class DramSegment:
    """One mapped segment file (see `workers.tiers.tier.Segment`)."""

    tier: Final = Tier.DRAM

    def __init__(self, file: LocalFile, header: SegmentHeader) -> None:
        """Own a file with this header, already in its new life."""
        self.id: Final = header.segment
        self.incarnation: Final = header.incarnation
        self.geometry: Final = header.geometry
        self._file = file
        # An open file description of its own: the locks of readers are tested against it, and
        # children that inherit the ownership must not be able to drop them.
        self._lock_fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(file.fd, self.geometry.file_bytes)
        self._whole = memoryview(self._map)
        self.payload: Final = self._whole[self.geometry.payload_base :]
        self.payload_address: Final = address_of(self.payload)
        self.records: Final = RecordTable(MappedRecords(file.fd, self._whole), self.geometry)
        self.locks: Final = ExtentLocks(self._lock_fd, self.geometry.payload_base)

    @property
    def ownership(self) -> int:
        """The descriptor whose flock makes this process the owner."""
        return self._file.fd

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
        self._file.close()


def open_dram(
    path: Path, cluster: str, segment: SegmentId, geometry: Geometry, *, huge_pages: bool = False
) -> tuple[DramSegment, Found]:
    """Own the segment file at `path`: the one that lies there, with its pages, or a new one.

    A file of another size is replaced by an empty one. Raises SegmentInUse when another process
    owns it, OutOfSpace with both numbers when the memory file system is too small, ConfigError
    when the file is not this cluster's segment of that name.
    """
    owned = own_segment_file(LocalDisk(), path, cluster, segment, geometry, MEDIUM)
    opened = DramSegment(owned.file, owned.header)
    try:
        found = opened.records.take_over(owned.known, opened.incarnation)
        if huge_pages:
            opened.use_huge_pages()
        opened.populate()
    except BaseException:
        opened.close()
        raise
    return opened, found


def nameless_dram(
    folder: Path, cluster: str, segment: SegmentId, geometry: Geometry
) -> DramSegment:
    """An empty segment that is gone when its last user closes it, however this process ends.

    Raises OutOfSpace with both numbers, or ConfigError, when `folder` does not do.
    """
    owned = nameless_segment_file(LocalDisk(), folder, cluster, segment, geometry, MEDIUM)
    opened = DramSegment(owned.file, owned.header)
    try:
        opened.populate()
    except BaseException:
        opened.close()
        raise
    return opened
