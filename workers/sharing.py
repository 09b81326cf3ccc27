"""Descriptors that cross the Unix socket: segments to clients, clients' buffers to the worker.

A client gets each segment read-only, on an open file description of its own, because locks belong
to the description. The worker maps a client's buffer only if it can never shrink: a truncated
mapping would kill the process. Must not know sessions or pulls.
"""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import OutOfSpace
from kvstore.transfer.buffer import require_sealed
from kvstore.transfer.memory import address_of, populate
from kvstore.wire.messages.transfers import (
    DeviceSegmentShared,
    SegmentsShared,
    SharedChunk,
    SharedSegment,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from workers.tiers.hbm import HbmSegment
    from workers.tiers.tier import MemorySegment

MADV_POPULATE_READ = 22


class ClientBuffer:
    """A client's buffer, mapped read-only."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the memfd `fd`, which is closed either way.

        BadValue unless it is sealed against shrinking and holds `size_bytes`.
        """
        try:
            require_sealed(fd, size_bytes)
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        with memoryview(self._map) as view:
            self.address = address_of(view)
        # The client touched its pages; mapping them now spares the first put 0.1 µs a KiB.
        populate(self.address, size_bytes, MADV_POPULATE_READ)

    def close(self) -> None:
        """Unmap; nothing may be pulled from it any more."""
        self._map.close()


@contextmanager
def shared(segments: Iterable[MemorySegment]) -> Iterator[tuple[SegmentsShared, list[int]]]:
    """The message that introduces the segments, and a fresh descriptor for each.

    The descriptors are closed here afterwards; by then they must have been sent.
    """
    descriptors: list[int] = []
    try:
        named: list[SharedSegment] = []
        for segment in segments:
            descriptors.append(segment.open_for_reader())
            named.append(SharedSegment(segment.id, segment.incarnation, segment.geometry))
        yield SegmentsShared(tuple(named)), descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def shared_device(
    segment: HbmSegment, share: int
) -> Iterator[tuple[DeviceSegmentShared, list[int]]]:
    """The message that lets a client open a segment on a device, and what rides along.

    The records' descriptor is closed here afterwards. OutOfSpace where one message cannot carry as
    many descriptors: the client is to have the pages sent.
    """
    with segment.shared(share) as blocks:
        memory = [descriptor for block in blocks.values() for descriptor in block.descriptors]
        if len(memory) >= limits.DESCRIPTORS_SENT_MAX:
            raise OutOfSpace(f"{segment.id}: {len(memory)} descriptors, too many for a message")
        handles = [(number, block.export()) for number, block in blocks.items()]
        chunks = tuple(SharedChunk(n, h.size_bytes, h.ipc, h.offset) for n, h in handles)
        device, records = segment.device.identity, segment.open_for_reader()
        try:
            message = DeviceSegmentShared(share, segment.geometry, device, chunks)
            yield message, [records, *memory]
        finally:
            os.close(records)
