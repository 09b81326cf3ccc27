"""The `shm` transport: worker and client on one host share memory.

Reached through the worker's Unix socket only: that is what "one host" means. The worker hands over
read-only descriptors of its segments; this side hands over its buffers as sealed memfds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue, ConfigError, KVStoreError, MalformedMessage
from kvstore.replica import Tier
from kvstore.transfer.data_links import DataLinks, call, silent_at_s
from kvstore.transfer.mapped_segment import HeldSpan, MappedSegment
from kvstore.transfer.piece_calls import PieceCalls
from kvstore.transfer.staged_reads import StagedRead
from kvstore.transfer.stream_reads import read_streamed
from kvstore.transfer.transport import IngestSpan, all_of, span_checksums
from kvstore.transfer.worker_devices import WorkerDevices
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import BufferSource
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    DetachBuffer,
    SegmentsShared,
    ShareSegments,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.buffer import Buffer
    from kvstore.transfer.context import TransferContext
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.staged_reads import TakeStaged
    from kvstore.transfer.transport import ReadSpan
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef

DETACH_TIMEOUT_S: Final = 5.0


def require() -> None:
    """ConfigError where shared memory cannot be handed over."""
    if sys.platform != "linux":
        raise ConfigError(f"transport shm: needs Linux, this is {sys.platform}")


def open_transport(context: TransferContext, timeout_s: float) -> ShmTransport:
    """Reach the worker and map what it shares. Unavailable when it is not on this host."""
    transport = ShmTransport(context)
    try:
        transport.share(time.monotonic() + timeout_s)
    except BaseException:
        transport.close()
        raise
    return transport


class ShmTransport:
    """One worker of this host. Thread-safe."""

    def __init__(self, context: TransferContext) -> None:
        """Reach for nothing yet."""
        self._links = DataLinks(f"unix:{context.address.where}", context.identity)
        self.devices: Final = WorkerDevices(self._links, context.left)
        """The way to memory of devices, without the host."""
        self._mutex = threading.Lock()
        self._segments: dict[str, MappedSegment] = {}
        self._attaching = threading.Lock()
        self._attached: set[int] = set()
        self._forgotten: list[int] = []
        """Numbers of buffers that are gone, closed or not: the worker need not map them."""

    def share(self, deadline_s: float) -> None:
        """Map the segments of this worker that are new, or have begun a new life, to us."""
        with self._mutex, self._links.link(silent_at_s(deadline_s)) as link:
            reply = call(link, ShareSegments(), silent_at_s(deadline_s))
            if not isinstance(reply, SegmentsShared):
                raise MalformedMessage(f"{type(reply).__name__} in answer to ShareSegments")
            fds = link.take_fds(len(reply.segments))
            for shared in reply.segments:
                fd = fds.pop(0)
                held = self._segments.get(shared.segment)
                if held is not None and held.incarnation == shared.incarnation:
                    os.close(fd)
                    continue
                try:
                    mapped = MappedSegment(shared.segment, shared.incarnation, shared.geometry, fd)
                except KVStoreError:
                    for unused in fds:
                        os.close(unused)
                    raise
                self._segments[shared.segment] = mapped
                if held is not None:
                    held.close()

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """See Transport.read."""
        deadline_s = time.monotonic() + timeout_s
        if span.segment.tier == Tier.NVME:
            return self._read_staged(span, into, deadline_s)
        if span.segment.tier == Tier.HBM:
            return read_streamed(self._links, span, into, deadline_s)
        try:
            mapped = self._mapped(span.segment, deadline_s)
        except KVStoreError:
            into.wipe(span.places, span.part_bytes)
            return all_of(Outcome.TRANSPORT, len(span))
        if mapped is None:
            into.wipe(span.places, span.part_bytes)
            return all_of(Outcome.STALE, len(span))
        return mapped.read(span, into)

    def hold(self, span: ReadSpan, timeout_s: float) -> tuple[bytes, list[HeldSpan]]:
        """Lock and verify pages where they lie, without copying; see MappedSegment.hold.

        One Outcome byte a page; those that are OK are in the last of the held spans that has them.
        """
        deadline_s = time.monotonic() + timeout_s
        if span.segment.tier == Tier.NVME:
            return self._hold_staged(span, deadline_s)
        try:
            mapped = self._mapped(span.segment, deadline_s)
        except KVStoreError:
            return all_of(Outcome.TRANSPORT, len(span)), []
        if mapped is None:
            return all_of(Outcome.STALE, len(span)), []
        held = mapped.hold(span)
        return bytes(held.outcomes), [held]

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """See Transport.ingest. The source must be a Buffer's memory: workers pull from it."""
        buffer = source.buffer
        if buffer is None:
            raise BadValue("source", source, "a buffer of this store")
        calls = PieceCalls(spans)
        deadline_s = time.monotonic() + timeout_s

        def send(link: FrameSocket, request_id: int, piece: IngestSpan, until_s: float) -> None:
            checksums = span_checksums(piece, source.view)
            where = BufferSource(buffer.number, array("Q", piece.places).tobytes())
            message = piece.message(checksums, where)
            link.send(FrameKind.REQUEST, request_id, message, deadline_s=until_s)

        try:
            with self._links.link(deadline_s) as link:
                if buffer.number not in self._attached:
                    self._attach(link, buffer, deadline_s)
                calls.run(link, send, deadline_s)
        except KVStoreError:
            # The worker forgets buffers with the last connection of a session.
            self._attached.clear()
        if Outcome.SOURCE_LOST in b"".join(calls.outcomes):
            # A worker that began anew knows nothing of this buffer: the next try attaches it.
            self._attached.discard(buffer.number)
        return [bytes(outcomes) for outcomes in calls.outcomes]

    def close(self) -> None:
        """See Transport.close."""
        self._links.close()
        self.devices.close()
        with self._mutex:
            segments, self._segments = self._segments, {}
        for mapped in segments.values():
            mapped.close()

    def _mapped(self, ref: SegmentRef, deadline_s: float) -> MappedSegment | None:
        """The mapping of this life of the segment; None when the worker has another one (I11)."""
        mapped = self._segments.get(ref.segment)
        if mapped is None or mapped.incarnation != ref.incarnation:
            # One that began anew without its old pages may have a lower number than before.
            self.share(deadline_s)
            mapped = self._segments.get(ref.segment)
        return mapped if mapped is not None and mapped.incarnation == ref.incarnation else None

    def _read_staged(self, span: ReadSpan, into: Memory, deadline_s: float) -> bytes:
        """Copy pages of a disk out of the memory that the worker stages them in."""

        def copy(staged: ReadSpan) -> bytes:
            mapped = self._mapped(staged.segment, deadline_s)
            gone = all_of(Outcome.STALE, len(staged))
            return gone if mapped is None else mapped.read(staged, into)

        outcomes = self._staged(span, copy, deadline_s)
        into.wipe([p for p, o in zip(span.places, outcomes, strict=True) if o], span.part_bytes)
        return outcomes

    def _hold_staged(self, span: ReadSpan, deadline_s: float) -> tuple[bytes, list[HeldSpan]]:
        """Lock pages of a disk in the memory that the worker stages them in.

        The lock alone keeps them from then on: they are released as if they had been copied.
        """
        found: list[HeldSpan] = []

        def hold(staged: ReadSpan) -> bytes:
            mapped = self._mapped(staged.segment, deadline_s)
            found.append(HeldSpan(staged) if mapped is None else mapped.hold(staged))
            return bytes(found[-1].outcomes)

        return self._staged(span, hold, deadline_s), found

    def _staged(self, span: ReadSpan, take: TakeStaged, deadline_s: float) -> bytes:
        """Have `take` read every page where the worker stages it; one Outcome byte a page."""
        read = StagedRead(span, take, deadline_s)
        with suppress(KVStoreError), self._links.link(silent_at_s(deadline_s)) as link:
            read.run(link)
        return bytes(read.outcomes)

    def _attach(self, link: FrameSocket, buffer: Buffer, deadline_s: float) -> None:
        """Have the worker map the buffer, once a session."""
        with self._attaching:
            if buffer.number in self._attached:
                return
            while self._forgotten:
                number = self._forgotten.pop()
                self._attached.discard(number)
                _expect_done(call(link, DetachBuffer(number), deadline_s))
            message = AttachBuffer(buffer.number, buffer.size_bytes)
            _expect_done(call(link, message, deadline_s, (buffer.descriptor(),)))
            self._attached.add(buffer.number)
            buffer.on_close(self._detach)
            weakref.finalize(buffer, self._forgotten.append, buffer.number).atexit = False

    def _detach(self, number: int) -> None:
        """Have the worker unmap a buffer that is closing. A worker that is gone has done so."""
        self._attached.discard(number)
        deadline_s = time.monotonic() + DETACH_TIMEOUT_S
        with suppress(KVStoreError), self._links.link(deadline_s) as link:
            _expect_done(call(link, DetachBuffer(number), deadline_s))


def _expect_done(reply: Message) -> None:
    if not isinstance(reply, Done):
        raise MalformedMessage(f"{type(reply).__name__}, want Done")
