"""What a worker of this host and a client do on one device: the worker pulls, the client copies.

Through handles that name memory to another process, over the worker's Unix socket. Every call says
None where that does not lead anywhere, so that its caller takes another way.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from array import array
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue, BufferClosed, KVStoreError, MalformedMessage, OutOfSpace
from kvstore.replica import Tier
from kvstore.transfer.bounce import span_checksums_on_device
from kvstore.transfer.data_links import call, silent_at_s
from kvstore.transfer.device import CPU, Handle
from kvstore.transfer.device_segment import DeviceSegment
from kvstore.transfer.piece_calls import PieceCalls
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.puts import BufferSource
from kvstore.wire.messages.transfers import (
    AttachDeviceBuffer,
    DetachBuffer,
    DeviceSegmentShared,
    ShareDeviceSegment,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.bounce import Bounces
    from kvstore.transfer.data_links import DataLinks
    from kvstore.transfer.device import Block, Device
    from kvstore.transfer.transport import IngestSpan, ReadSpan
    from kvstore.wire.messages.common import SegmentRef

    Place = tuple[str, int, str]
    """Segment, its life, and the device that is asked for."""


_NUMBERS: Final = itertools.count(-1, -1)
"""Of attached blocks, of all transports of a session; a store's buffers have those above 0."""
SHARE_S: Final = 10.0
"""After that a segment is opened anew by who reads from it, so that memory which its worker gives
back does not stay taken because it is open here."""


def _closed() -> None:
    """In the place of a segment that is not open."""


class WorkerDevices:
    """One worker's devices. Thread-safe."""

    def __init__(self, links: DataLinks, left: dict[int, Block]) -> None:
        """Speak over these connections, which stay the caller's.

        `left` are attached blocks whose detach is not answered. Kept, so that nobody frees their
        memory while the worker has it open; detached before the next one is attached.
        """
        self._links = links
        self._left = left
        self._mutex = threading.Lock()
        self._segments: dict[Place, tuple[DeviceSegment | None, float]] = {}
        """With when each was opened, on time.monotonic()."""
        self._shares: dict[int, Callable[[], DeviceSegment | None]] = {}
        """What the worker keeps for us, until we say that it is closed."""
        self._refused: set[str] = set()
        """Devices that the worker does not pull from."""

    def ingest(
        self, spans: Sequence[IngestSpan], block: Block, bounces: Bounces, timeout_s: float
    ) -> list[bytes] | None:
        """`Transport.ingest` out of a block; None where the worker cannot open it."""
        deadline_s = time.monotonic() + timeout_s
        if block.device.identity in self._refused:
            return None
        calls, number = PieceCalls(spans), next(_NUMBERS)
        try:
            handle = block.export()
        except BadValue:
            return None

        def send(link: FrameSocket, request_id: int, piece: IngestSpan, until_s: float) -> None:
            checksums = span_checksums_on_device(piece, block, bounces)
            where = BufferSource(number, array("Q", piece.places).tobytes())
            message = piece.message(checksums, where)
            link.send(FrameKind.REQUEST, request_id, message, deadline_s=until_s)

        attach = AttachDeviceBuffer(
            number, handle.size_bytes, handle.device, handle.ipc, handle.offset
        )
        # What was not answered stays TRANSPORT.
        with suppress(KVStoreError), self._links.link(deadline_s) as link:
            self._detach_left(link, deadline_s)
            try:
                call(link, attach, deadline_s, block.descriptors)
                calls.run(link, send, deadline_s)
                call(link, DetachBuffer(number), deadline_s)
            except BadValue:
                self._refused.add(handle.device)
                return None
            except (BufferClosed, OutOfSpace):  # this block, or this moment
                return None
            except BaseException:
                self._left[number] = block
                raise
        return [bytes(outcomes) for outcomes in calls.outcomes]

    def read(self, span: ReadSpan, into: Block, bounces: Bounces, timeout_s: float) -> bytes | None:
        """`Transport.read` into a block; None for pages that do not lie on its device."""
        if span.segment.tier != Tier.HBM:
            return None
        segment = None
        with suppress(KVStoreError):
            segment = self._segment(span.segment, into.device, bounces, timeout_s)
        return None if segment is None else segment.read(span, into)

    def close(self) -> None:
        """Let every segment go; each is closed when the last read from it ends."""
        with self._mutex:
            self._segments = {}

    def _detach_left(self, link: FrameSocket, deadline_s: float) -> None:
        """Have the worker close what calls before this one left behind."""
        for number in list(self._left):
            call(link, DetachBuffer(number), deadline_s)
            self._left.pop(number, None)

    def _segment(
        self, ref: SegmentRef, device: Device, bounces: Bounces, timeout_s: float
    ) -> DeviceSegment | None:
        place = (ref.segment, ref.incarnation, device.identity)
        deadline_s = time.monotonic() + timeout_s
        # Somebody who waits for the worker may have it.
        if not self._mutex.acquire(timeout=timeout_s):
            return None
        try:
            found, opened_s = self._segments.get(place, (None, -inf))
            now_s = time.monotonic()
            if now_s - opened_s >= SHARE_S:
                # What was open is closed when the last read from it ends.
                self._segments = {k: s for k, s in self._segments.items() if k[0] != ref.segment}
                found = None
                with suppress(BadValue, OutOfSpace):  # nor can it be shared a moment later
                    found = self._open(ref, device, bounces, deadline_s)
                self._segments[place] = found, now_s
            return found
        finally:
            self._mutex.release()

    def _open(
        self, ref: SegmentRef, device: Device, bounces: Bounces, deadline_s: float
    ) -> DeviceSegment | None:
        closed = tuple(share for share, segment in self._shares.items() if segment() is None)
        ask = ShareDeviceSegment(ref.segment, ref.incarnation, closed)
        with self._links.link(silent_at_s(deadline_s)) as link:
            reply = call(link, ask, silent_at_s(deadline_s))
            if not isinstance(reply, DeviceSegmentShared):
                raise MalformedMessage(f"{type(reply).__name__} in answer to ShareDeviceSegment")
            self._shares = {k: s for k, s in self._shares.items() if k not in closed}
            self._shares[reply.share] = _closed
            each = 1 if reply.device == CPU else 0
            descriptors = link.take_fds(1 + each * len(reply.chunks))
        records = descriptors.pop(0)
        blocks: dict[int, Block] = {}
        try:
            if reply.device != device.identity:
                return None
            for chunk in reply.chunks:
                mine, descriptors = descriptors[:each], descriptors[each:]
                handle = Handle(reply.device, chunk.size_bytes, chunk.ipc, chunk.offset)
                blocks[chunk.chunk] = device.open(handle, mine)
            opened = DeviceSegment(reply.geometry, records, blocks, bounces)
            self._shares[reply.share] = weakref.ref(opened)
            return opened
        finally:
            for descriptor in (records, *descriptors):
                os.close(descriptor)
