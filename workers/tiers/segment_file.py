"""The life of a segment file, whatever medium it lies on.

Made whole or not at all, one owner at a time, a new incarnation at each start (I11). Owns the
judgement of a file that lies there already. Must not know what is in the record tables.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvstore import limits
from kvstore.errors import BadValue, ConfigError, CorruptPage, OutOfSpace, SegmentInUse
from kvstore.ids import Incarnation, first_incarnation
from kvstore.segment import HEADER_BYTES, HEADER_MAGIC, SegmentHeader, pack_header, unpack_header
from workers.tiers.disk import DiskFile, read_whole, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.ids import SegmentId
    from kvstore.segment import Geometry
    from workers.tiers.disk import Disk

LOG: Final = logging.getLogger(__name__)
ALLOCATE_STEP_BYTES: Final = 256 * limits.MIB
LINEAGE_BYTES: Final = 5

File = TypeVar("File", bound=DiskFile)


@dataclass(frozen=True)
class Medium:
    """What to tell an operator whose folder does not do."""

    folder: str
    more_room: str
    remedy: str
    """What to do about a file that is in the way."""


@dataclass(frozen=True)
class OwnedFile(Generic[File]):
    """A segment file that this process owns, its header already that of the new life."""

    file: File
    header: SegmentHeader
    known: Incarnation | None
    """The last life, whose records may be taken over; None for a new file."""


def own_segment_file(
    disk: Disk[File],
    path: Path,
    cluster: str,
    segment: SegmentId,
    geometry: Geometry,
    medium: Medium,
) -> OwnedFile[File]:
    """Own the file at `path`: the one that lies there, or a new one.

    A file of another version or size is replaced by an empty one. Raises SegmentInUse when another
    process owns it, OutOfSpace with both numbers when the file system is too small, ConfigError
    when the file is not this cluster's segment of that name or the folder does not do.
    """
    with _said(path, "cannot be opened", medium.remedy):
        file = disk.open(path)
    if file is not None:
        with contextlib.ExitStack() as undo:
            undo.callback(file.close)
            header = _usable_header(file, path, cluster, segment, geometry, medium)
            if header is not None:
                raised = SegmentHeader(
                    cluster, segment, Incarnation(header.incarnation + 1), geometry
                )
                # The header first, and durably: a life that had begun to rewrite its records
                # never comes twice, not even after a loss of power (I11).
                _write_header(file, path, raised)
                undo.pop_all()
                return OwnedFile(file, raised, header.incarnation)
            _require_room(file, path, geometry, medium, returned=file.taken_bytes)
            with _said(path, "cannot be replaced"):
                disk.remove(path)
        # Closed by now: its room must be free before the new file is made.
    header = SegmentHeader(cluster, segment, fresh_incarnation(), geometry)
    made = _make(disk, path, header, medium)
    try:
        with _said(path, "cannot be made"):
            made.publish(path)
    except BaseException:
        made.close()
        raise
    return OwnedFile(made, header, None)


def nameless_segment_file(
    disk: Disk[File],
    folder: Path,
    cluster: str,
    segment: SegmentId,
    geometry: Geometry,
    medium: Medium,
) -> OwnedFile[File]:
    """A new file that nobody can open by name, and that is gone with the last who has it open.

    Raises as `own_segment_file` does.
    """
    header = SegmentHeader(cluster, segment, fresh_incarnation(), geometry)
    return OwnedFile(_make(disk, folder / segment, header, medium), header, None)


def _usable_header(
    file: DiskFile,
    path: Path,
    cluster: str,
    segment: SegmentId,
    geometry: Geometry,
    medium: Medium,
) -> SegmentHeader | None:
    """The header of a file whose pages can be kept; None when it is ours but to be replaced."""
    length = file.size_bytes
    data = bytearray(min(HEADER_BYTES, length))
    with _said(path, "cannot be read"):
        read_whole(file.cached, [memoryview(data)], 0)
    if not data.startswith(HEADER_MAGIC):
        raise ConfigError(f"{path}: exists and is not a segment of a kvharbor pool{medium.remedy}")
    try:
        header = unpack_header(bytes(data))
    except (CorruptPage, BadValue) as error:
        LOG.warning("%s: %s; it is replaced by an empty segment", path, error)
        return None
    if (header.cluster, header.segment) != (cluster, segment):
        raise ConfigError(
            f"{path}: holds segment {header.segment} of cluster {header.cluster}, "
            f"want {segment} of {cluster}{medium.remedy}"
        )
    if header.geometry != geometry or length != geometry.file_bytes:
        LOG.warning(
            "%s: has %d bytes for pages, %d are asked for; it is replaced by an empty segment",
            path, header.geometry.payload_bytes, geometry.payload_bytes,
        )  # fmt: skip
        return None
    return header


def fresh_incarnation() -> Incarnation:
    """The first life of a new segment: one that none of that name can have had before."""
    return first_incarnation(int.from_bytes(os.urandom(LINEAGE_BYTES), "little"))


def _make(disk: Disk[File], path: Path, header: SegmentHeader, medium: Medium) -> File:
    """Make a whole segment file, already owned, without a name; `path` is for errors."""
    try:
        file = disk.create(path.parent)
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: cannot hold a segment: {error.strerror}; want {medium.folder}"
        ) from error
    try:
        _allocate(file, path, header.geometry, medium)
        _write_header(file, path, header)
    except BaseException:
        file.close()
        raise
    return file


def _write_header(file: DiskFile, path: Path, header: SegmentHeader) -> None:
    with _said(path, "cannot be written"):
        write_whole(file.cached, [memoryview(pack_header(header))], 0)
        file.sync()


def _require_room(
    file: DiskFile, path: Path, geometry: Geometry, medium: Medium, returned: int = 0
) -> None:
    """OutOfSpace unless header and payload fit, with `returned` bytes more than are free now."""
    free, want = file.free_bytes + returned, HEADER_BYTES + geometry.payload_bytes
    if free < want:
        raise OutOfSpace(
            f"{path.parent} has {free} bytes free, the segment needs {want}: {medium.more_room}"
        )


def _allocate(file: DiskFile, path: Path, geometry: Geometry, medium: Medium) -> None:
    """Take the room of header and payload; tables are taken as chunks are cut."""
    _require_room(file, path, geometry, medium)
    with _said(path, "cannot be made"):
        file.allocate(0, HEADER_BYTES)
        for start in range(geometry.payload_base, geometry.file_bytes, ALLOCATE_STEP_BYTES):
            file.allocate(start, min(ALLOCATE_STEP_BYTES, geometry.file_bytes - start))


@contextlib.contextmanager
def _said(path: Path, what: str, remedy: str = "") -> Iterator[None]:
    """Errors of the system as ours, with the file named."""
    try:
        yield
    except FileExistsError as error:
        raise SegmentInUse(f"{path}: another process has just made this segment") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutOfSpace(f"{path}: {what}: its file system has run out of space") from error
        raise ConfigError(f"{path}: {what}: {error.strerror or error}{remedy}") from error
