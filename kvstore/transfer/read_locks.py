"""Shared OFD byte-range locks that keep a worker from reusing extents that are being viewed.

Locks belong to an open file description, and unlocking a range unlocks it for all of this
process, so views are counted per extent: nested views of one page share its lock. Freed by the
kernel when the process dies. Every descriptor is this session's own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_FLOCK: Final = struct.Struct("@hhqqi0q")
"""struct flock on 64-bit Linux: type, whence, start, length, pid (0 for these locks)."""

_OPEN: Final[weakref.WeakSet[ReadLocks]] = weakref.WeakSet()


def lock_range(fd: int, kind: int, start: int, length: int) -> bool:
    """Set fcntl.F_RDLCK, F_WRLCK or F_UNLCK on a range; False when another holder forbids it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def neighbours(starts: Iterable[int], length: int) -> Iterator[tuple[int, int]]:
    """(start, length) of ranges of `length` bytes, those that touch made one."""
    first = last = -1
    for start in sorted(starts):
        if start == last:
            last += length
            continue
        if first >= 0:
            yield first, last - first
        first, last = start, start + length
    if first >= 0:
        yield first, last - first


class ReadLocks:
    """Counted read locks on the extents of one segment file. Thread-safe.

    Owns the file's descriptor: closing it drops every lock, so it stays until the last view ended.
    A forked child closes its copy at once; there every extent is refused.
    """

    def __init__(self, fd: int) -> None:
        """Take over `fd`."""
        self._fd = fd
        self._mutex = threading.Lock()
        self._views: dict[int, int] = {}
        self._closing = False
        _OPEN.add(self)

    def acquire(self, starts: Sequence[int], length: int) -> list[bool]:
        """Hold each extent [start, start + length) of the file; False where its owner refuses.

        The worker takes a range exclusively only to overwrite it, so a refused one is gone.
        """
        with self._mutex:
            if self._closing:
                return [False] * len(starts)
            fresh = {start for start in starts if start not in self._views}
            for start, total in list(neighbours(fresh, length)):
                if not lock_range(self._fd, fcntl.F_RDLCK, start, total):
                    fresh -= self._refused_among(range(start, start + total, length), length)
            held: list[bool] = []
            for start in starts:
                count = self._views.get(start, 0)
                held.append(count > 0 or start in fresh)
                if held[-1]:
                    self._views[start] = count + 1
            return held

    def _refused_among(self, starts: Iterable[int], length: int) -> set[int]:
        """Lock the extents of a refused stretch one by one; those that stay refused."""
        return {s for s in starts if not lock_range(self._fd, fcntl.F_RDLCK, s, length)}

    def release(self, starts: Sequence[int], length: int) -> None:
        """Undo one `acquire` that was granted for each of these."""
        with self._mutex:
            if self._fd < 0:
                return  # A forked child: the locks, and their end, are the parent's.
            ended: list[int] = []
            for start in starts:
                count = self._views[start] - 1
                assert count >= 0, start
                if count:
                    self._views[start] = count
                else:
                    del self._views[start]
                    ended.append(start)
            for start, total in neighbours(ended, length):
                lock_range(self._fd, fcntl.F_UNLCK, start, total)
            self._close_if_done()

    def close(self) -> None:
        """Refuse new views; the descriptor goes with the last one. Safe to repeat."""
        with self._mutex:
            self._closing = True
            self._close_if_done()

    @property
    def extents(self) -> int:
        """Extents that are held now."""
        return len(self._views)

    def _close_if_done(self) -> None:
        if self._closing and not self._views and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _forget_inherited(self) -> None:
        """In a forked child: close the copy. Unlocking would unlock the parent's."""
        self._mutex = threading.Lock()
        self._closing = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _forget_inherited() -> None:
    for each in list(_OPEN):
        each._forget_inherited()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_forget_inherited)
