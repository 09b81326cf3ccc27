"""Moves pages between workers and a caller's memory on a device, the best way that there is.

Where a worker of this host can reach the same device, nothing passes the host but what is hashed.
Elsewhere pages go through host memory. Must not know plans.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.client.performer import BY_MAPPING, Mover
from kvstore.replica import Tier
from kvstore.transfer.bounce import read_to_device, wipe
from kvstore.transfer.device import Move
from kvstore.transfer.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvstore.transfer.bounce import Bounces
    from kvstore.transfer.buffer import Buffer
    from kvstore.transfer.choice import Choice
    from kvstore.transfer.device import Block
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import IngestSpan, Reader, ReadSpan, Transport
    from kvstore.wire.messages.common import SegmentRef

    TakeBuffer = Callable[[int], AbstractContextManager[Buffer]]
    """A buffer of at least so many bytes, for a `with`."""


AHEAD: Final = 1 << 30
"""Puts a rank of a choice before every other, but for last resorts, which stay behind."""


class DeviceMover(Mover):
    """Moves pages between workers and one block."""

    def __init__(
        self, choice: Choice, block: Block, bounces: Bounces, take_buffer: TakeBuffer
    ) -> None:
        """The block is source of ingests and destination of reads; `bounces` are its device's.

        For the thread of the model: what it has asked of the device is waited for before the block
        is read or written, in whichever thread that happens.
        """
        super().__init__(choice)
        self._await_model = block.device.asked()
        self._block = block
        self._bounces = bounces
        self._take_buffer = take_buffer

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        """As for host memory, but that a device of this host comes first."""
        rank = super().rank(segment, timeout_s)
        if segment.tier == Tier.HBM and rank is not None:
            near = self._choice.rank(segment, timeout_s, BY_MAPPING)
            return rank - AHEAD if near == rank else rank
        return rank

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        """See Mover.ingest. Unavailable where the device fails."""
        self._await_model()
        return super().ingest(spans, timeout_s)

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        """See Mover.read. Unavailable where the device fails."""
        self._await_model()
        return super().read(spans, timeout_s, others)

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Zero what a read delivered."""
        wipe(self._block, places, size_bytes, self._bounces)

    def _ingest_by(
        self, way: Transport, spans: Sequence[IngestSpan], timeout_s: float
    ) -> list[bytes]:
        deadline_s = time.monotonic() + timeout_s
        if isinstance(way, ShmTransport):
            pulled = way.devices.ingest(spans, self._block, self._bounces, timeout_s)
            if pulled is not None:
                return pulled
        return [self._ingest_through_host(way, span, deadline_s) for span in spans]

    def _ingest_through_host(self, way: Transport, span: IngestSpan, deadline_s: float) -> bytes:
        size, outcomes = span.part_bytes, b""
        with self._take_buffer(size) as buffer:
            step = buffer.size_bytes // size
            for first in range(0, len(span), step):
                piece = span.cut(first, min(first + step, len(span)))
                ats = range(0, len(piece) * size, size)
                rows = zip(ats, piece.places, strict=True)
                self._block.copy_to(buffer.memory, [Move(at, place, size) for at, place in rows])
                piece = msgspec.structs.replace(piece, places=tuple(ats))
                left_s = max(0.0, deadline_s - time.monotonic())
                outcomes += way.ingest([piece], buffer.memory, left_s)[0]
        return outcomes

    def _read_by(self, way: Reader, span: ReadSpan, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        if isinstance(way, ShmTransport):
            found = way.devices.read(span, self._block, self._bounces, timeout_s)
            if found is not None:
                return found

        def read(piece: ReadSpan, room: Memory) -> bytes:
            return way.read(piece, room, max(0.0, deadline_s - time.monotonic()))

        with self._take_buffer(span.part_bytes) as buffer:
            return read_to_device(read, span, self._block, buffer.memory)
