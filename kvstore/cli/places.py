"""Where a standalone pool keeps what: data folder, segment folder, lock. Owns their names.

The data folder holds the metadata, logs, sockets and announcements. Segments lie in a folder of
their own in /dev/shm, and one on each disk that the pool was ever given; its name follows from user
and data folder, so that a pool that was killed finds its pages again, and pools of other data
folders never meet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import folder_lock
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARED_MEMORY: Final = Path("/dev/shm")


class Places(msgspec.Struct, frozen=True):
    """The folders of one standalone pool."""

    data_dir: Path
    segment_dir: Path

    def log(self, part: str) -> Path:
        """What master or worker wrote to its standard error in its last life."""
        return self.data_dir / f"{part}.log"

    @property
    def disk_list(self) -> Path:
        """The pool's folders on disks, a line each, so that a wipe finds them all."""
        return self.data_dir / "disks"

    def disk_folder(self, folder: Path) -> Path:
        """This pool's own folder in a folder of a disk."""
        return folder.resolve() / self.segment_dir.name

    def disk_folders(self) -> list[Path]:
        """The pool's folders on all disks that it was ever given; some may be away."""
        try:
            listed = [Path(line) for line in self.disk_list.read_text().splitlines()]
        except FileNotFoundError:
            return []
        # They are removed as a whole: only by the name that we give.
        return [folder for folder in listed if folder.name == self.segment_dir.name]


def places_of(data_dir: Path) -> Places:
    """The places of the pool with this data folder; makes nothing."""
    resolved = data_dir.resolve()
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:12]
    return Places(resolved, SHARED_MEMORY / f"kvharbor-{os.geteuid()}-{digest}")


def prepare(places: Places) -> None:
    """Make both folders. ConfigError when one cannot be made, or is not this user's alone."""
    for folder in (places.data_dir, places.segment_dir):
        try:
            folder.mkdir(mode=0o700, parents=folder == places.data_dir, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder {folder}: cannot be made: {error.strerror}") from error
    # Anybody may make folders in /dev/shm: one that waited there for us is not ours.
    _require_ours(places.segment_dir)


def prepare_disks(places: Places, folders: Sequence[Path]) -> None:
    """Make the pool's folders on disks. ConfigError as for `prepare`."""
    known = [*places.disk_folders(), *folders]
    fresh = places.disk_list.with_suffix(".new")
    fresh.write_text("".join(f"{folder}\n" for folder in dict.fromkeys(known)))
    fresh.rename(places.disk_list)  # before they are made: none is ever forgotten
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError as error:
            why = f"{error.strerror}: make {folder.parent}, or mount its disk"
            raise ConfigError(f"folder {folder}: cannot be made: {why}") from error
        except OSError as error:
            raise ConfigError(f"folder {folder}: cannot be made: {error.strerror}") from error
        _require_ours(folder)


def lock(places: Places) -> int:
    """Take the pool's lock; returns its descriptor, which holds it until every copy is closed.

    SegmentInUse, naming the process, when another pool runs from this data folder.
    """
    return folder_lock.hold(places.data_dir / "lock", "a pool")


def wipe(places: Places) -> int:
    """Remove segments, metadata and logs of a pool whose lock is held; returns bytes freed."""
    freed = wipe_segments(places)
    for pattern in ("metadata.db*", "*.json", "*.jsonl", "*.log", "*.sock", places.disk_list.name):
        for path in places.data_dir.glob(pattern):
            freed += path.lstat().st_blocks * 512
            path.unlink()
    return freed


def wipe_segments(places: Places) -> int:
    """Remove the segments alone, in memory and on disks; returns bytes freed."""
    folders = [each for each in (places.segment_dir, *places.disk_folders()) if each.exists()]
    for folder in folders:
        _require_ours(folder)  # all of them, before anything is removed
    return sum(_wipe_folder(folder) for folder in folders)


def _wipe_folder(folder: Path) -> int:
    try:
        freed = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
        shutil.rmtree(folder)
    except OSError as error:
        raise ConfigError(f"folder {folder}: cannot be removed: {error.strerror}") from error
    return freed


def forget_strange_segments(places: Places, epoch: int, disks: Sequence[Path] = ()) -> int:
    """Remove segments of a pool whose metadata is gone; returns bytes freed.

    `disks` are the pool's folders on the disks that it uses now.

    A pool's epoch only rises. One that is not above the last says that the metadata began anew;
    generations would repeat, and the pages' namespaces are not known any more. The epoch lies
    beside the segments: those on a disk outlive the ones in memory.
    """
    return sum(_forget_strange(folder, epoch) for folder in (places.segment_dir, *disks))


def _forget_strange(folder: Path, epoch: int) -> int:
    epoch_file = folder / "epoch"
    try:
        last = int(epoch_file.read_text())
    except (OSError, ValueError):
        last = 0
    _require_ours(folder)
    freed = _wipe_folder(folder) if epoch <= last else 0
    fresh = epoch_file.with_suffix(".new")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        fresh.write_text(f"{epoch}\n")
        fresh.rename(epoch_file)  # a kill leaves the old epoch or the new one
    except OSError as error:
        raise ConfigError(f"{epoch_file}: cannot be written: {error.strerror}") from error
    return freed


def _require_ours(folder: Path) -> None:
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"folder {folder}: want one of user {os.geteuid()} with mode 0700, found "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}: remove it"
        )
