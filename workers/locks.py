"""The owner's side of the byte-range locks that readers of views hold (I4, I6b).

Open-file-description locks on the payload's file offsets: a reader's shared lock keeps the owner
from overwriting, and ends with the reader however it dies. The owner's exclusive lock is held from
before the first byte until the last. Must not know why an extent is wanted.
"""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

from kvstore.transfer.read_locks import lock_range

if TYPE_CHECKING:
    from workers.events import Stretch


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
        length = stretch.count * size_class
        lock_range(self._fd, fcntl.F_UNLCK, self._base + stretch.offset, length)

    def _try(self, offset: int, length: int) -> bool:
        return lock_range(self._fd, fcntl.F_WRLCK, self._base + offset, length)
