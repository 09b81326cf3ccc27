"""Mapped memory as the place of record tables (see `workers.record_table.RecordArea`)."""

from __future__ import annotations

import os

from workers.tiers.disk import next_data


class MappedRecords:
    """The first part of a mapped file, which may be sparse."""

    def __init__(self, fd: int, view: memoryview) -> None:
        """`view` is the mapped file from its beginning; both stay the caller's."""
        self._fd = fd
        self._view = view

    def look(self, at: int, length: int) -> memoryview:
        """A view of bytes whose memory is there."""
        return self._view[at : at + length]

    def load(self, at: int, length: int) -> bytes:
        """A copy, past the mapping: reading a hole through it would take memory."""
        return os.pread(self._fd, length, at)

    def store(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Write where memory is there."""
        self._view[at : at + len(data)] = data

    def allocate(self, at: int, length: int) -> None:
        """Have memory. Without it a full /dev/shm would kill the process at the first write."""
        os.posix_fallocate(self._fd, at, length)

    def next_data(self, at: int) -> int | None:
        """The first place from `at` on that is no hole, or None."""
        return next_data(self._fd, at)
