"""Host memory that pulls for devices land in: written by an engine's child, copied on by a device.

A room is lent for one group of pages and has a deadline, since its holder waits for a peer. Must
not know who asks.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from kvstore.errors import OutOfSpace
from kvstore.transfer.buffer import sealed_memfd
from kvstore.transfer.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator


class Landing:
    """Rooms of one size in one file, which children map. Thread-safe, but for `close`."""

    def __init__(self, rooms: int, room_bytes: int) -> None:
        """No memory is taken before it is written to. OutOfSpace where there is no such file."""
        self.room_bytes: Final = room_bytes
        self.size_bytes: Final = rooms * room_bytes
        self.fd: Final = sealed_memfd("kvharbor-landing", self.size_bytes)
        self._map = mmap.mmap(self.fd, self.size_bytes)
        self._whole = Memory.of("landing", self._map, writable=True)
        self._is_closed = False
        self._free: SimpleQueue[Memory] = SimpleQueue()
        for at in range(0, self.size_bytes, room_bytes):
            view = self._whole.view[at : at + room_bytes]
            self._free.put(Memory(view, self._whole.address + at))

    @property
    def address(self) -> int:
        """Where the file lies in this process."""
        return self._whole.address

    @contextmanager
    def one(self, deadline_s: float) -> Iterator[Memory]:
        """A room of one's own for a `with`. OutOfSpace when all are in use until the deadline."""
        try:
            room = self._free.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except Empty:
            raise OutOfSpace("every room for pulls of the transfer engine is in use") from None
        try:
            yield room
        finally:
            self._free.put(room)

    def close(self) -> None:
        """Give the memory back; nobody may hold a room any more. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        while not self._free.empty():
            self._free.get().view.release()
        self._whole.view.release()
        with suppress(BufferError):  # a view that a traceback still holds
            self._map.close()
        os.close(self.fd)
