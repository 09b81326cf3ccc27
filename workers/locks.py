"""The owner's side of the byte-range locks that readers of views hold (I4, I6b).

Open-file-description locks on the payload's file offsets: a reader's shared lock keeps the owner
from overwriting, and ends with the reader however it dies. The owner's exclusive lock is held from
before the first byte until the last. Must not know why an extent is wanted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from workers.events import Stretch

_FLOCK: Final = struct.Struct("@hhqqi0q")
"""struct flock on 64-bit Linux: type, whence, start, length, pid (0 for these locks)."""
_REFUSED: Final = (errno.EAGAIN, errno.EACCES)


class ExtentLocks:
    """Exclusive locks on extents, through a descriptor that nobody else has."""

    def __init__(self, fd: int, payload_base: int) -> None:
        """Lock through `fd`, which stays the caller's and is never shared."""
        self._fd = fd
        self._base = payload_base

    def try_lock(self, stretch: Stretch, size_class: int) -> bytes:
        """Lock a stretch's extents; one byte an extent: 1 locked, 0 a reader holds it."""
        if self._try(stretch.offset, stretch.count * size_class):
            return b"\1" * stretch.count
        offsets = range(stretch.offset, stretch.offset + stretch.count * size_class, size_class)
        return bytes(self._try(offset, size_class) for offset in offsets)

    def unlock(self, stretch: Stretch, size_class: int) -> None:
        """Give a stretch's extents back to readers, as far as they were locked."""
        self._set(fcntl.F_UNLCK, stretch.offset, stretch.count * size_class)

    def _try(self, offset: int, length: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, offset, length)
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        return True

    def _set(self, kind: int, offset: int, length: int) -> None:
        request = _FLOCK.pack(kind, os.SEEK_SET, self._base + offset, length, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
