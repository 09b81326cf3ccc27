"""Where a standalone pool keeps what: data folder, segment folder, lock. Owns their names.

The data folder holds the metadata, logs, sockets and announcements. Segments lie in a folder of
their own in /dev/shm, whose name follows from user and data folder, so that a pool that was killed
finds its pages again, and pools of other data folders never meet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Final

import msgspec

from kvstore.errors import ConfigError, SegmentInUse

SHARED_MEMORY: Final = Path("/dev/shm")
LOCK_PATIENCE_S: Final = 3.0
"""How long the parts of a pool whose `up` was killed may take to be gone."""

LOCK_POLL_S: Final = 0.02


class Places(msgspec.Struct, frozen=True):
    """The folders of one standalone pool."""

    data_dir: Path
    segment_dir: Path

    def log(self, part: str) -> Path:
        """What master or worker wrote to its standard error in its last life."""
        return self.data_dir / f"{part}.log"

    @property
    def epoch_file(self) -> Path:
        """The epoch under which the segments were last used, beside them."""
        return self.segment_dir / "epoch"


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


def lock(places: Places) -> int:
    """Take the pool's lock; returns its descriptor, which holds it until every copy is closed.

    SegmentInUse, naming the process, when another pool runs from this data folder.
    """
    path = places.data_dir / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from error
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while not _locked(descriptor):
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        if Path("/proc", holder or "none").exists() or time.monotonic() >= deadline:
            os.close(descriptor)
            raise SegmentInUse(
                f"data folder {places.data_dir}: a pool runs from it (process {holder})"
            )
        time.sleep(LOCK_POLL_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wipe(places: Places) -> int:
    """Remove segments, metadata and logs of a pool whose lock is held; returns bytes freed."""
    freed = wipe_segments(places)
    for pattern in ("metadata.db*", "*.json", "*.jsonl", "*.log", "*.sock"):
        for path in places.data_dir.glob(pattern):
            freed += path.lstat().st_blocks * 512
            path.unlink()
    return freed


def wipe_segments(places: Places) -> int:
    """Remove the segments alone; returns bytes freed."""
    if not places.segment_dir.exists():
        return 0
    _require_ours(places.segment_dir)
    freed = sum(path.lstat().st_blocks * 512 for path in places.segment_dir.rglob("*"))
    shutil.rmtree(places.segment_dir)
    return freed


def forget_strange_segments(places: Places, epoch: int) -> int:
    """Remove segments of a pool whose metadata is gone; returns bytes freed.

    A pool's epoch only rises. One that is not above the last says that the metadata began anew;
    generations would repeat, and the pages' namespaces are not known any more.
    """
    try:
        last = int(places.epoch_file.read_text())
    except (OSError, ValueError):
        last = 0
    freed = 0
    if epoch <= last:
        freed = wipe_segments(places)
        prepare(places)
    fresh = places.epoch_file.with_suffix(".new")
    fresh.write_text(f"{epoch}\n")
    fresh.rename(places.epoch_file)  # a kill leaves the old epoch or the new one
    return freed


def _require_ours(folder: Path) -> None:
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"folder {folder}: want one of user {os.geteuid()} with mode 0700, found "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}: remove it"
        )
