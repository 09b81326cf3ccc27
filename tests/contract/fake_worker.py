"""A worker's data side as far as clients see it, in threads, over a hand-made segment file.

It pulls and serves honestly unless a test gives it something else to say. Not a test.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError
from kvstore.page import payload_checksum
from kvstore.record import RECORD_BYTES, is_sealed_as
from kvstore.rpc.address import bind, bound_address
from kvstore.rpc.dialling import accept
from kvstore.rpc.identity import ListenerIdentity
from kvstore.segment import size_class_of
from kvstore.transfer.transport import column
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.puts import BufferSource, Ingest, Ingested
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    DetachBuffer,
    ReadEnded,
    ReadExtents,
    ReadStarted,
    ReleaseStaged,
    SegmentsShared,
    SharedSegment,
    ShareSegments,
    StageExtents,
)
from tests.contract import fake_staging
from tests.fakes import keys_of
from tests.unit.segment_files import INCARNATION, SegmentFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message

    Say = Callable[[FrameSocket, Frame], bool]
    """Answers a request in place of the honest worker; False leaves it to that one."""


class FakeWorker:
    """Listens on a Unix and a TCP socket; one thread a connection."""

    def __init__(self, folder: Path) -> None:
        """Bind both sockets."""
        self.file = SegmentFile()
        self.tier = "dram"
        self.staging = fake_staging.FakeStaging(self.file)
        self.incarnation = INCARNATION
        self.say: Say = lambda link, frame: False
        self.seen: list[Message] = []
        self.buffers: dict[tuple[bytes, int], mmap.mmap] = {}
        self._sockets = [bind(f"unix:{folder}/fake.sock", None), bind("127.0.0.1:0", None)]
        self.unix = str(folder / "fake.sock")
        self.tcp = bound_address(self._sockets[1])
        self._links: list[FrameSocket] = []
        self._threads = [self._start(self._accept, sock) for sock in self._sockets]

    def address(self, transport: str) -> Address:
        """How to reach it by one transport."""
        return Address(transport, self.unix if transport == "shm" else self.tcp, 0)

    def ref(self, transport: str, incarnation: int | None = None) -> SegmentRef:
        """Its segment, reachable by one transport."""
        return SegmentRef(
            "s", incarnation or self.incarnation, self.tier, self.file.geometry, "w", "h",
            (self.address(transport),),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        for each in self.buffers.values():
            each.close()
        self.file.close()
        self.staging.close()

    def hang_up(self) -> None:
        """End every connection."""
        for link in list(self._links):
            link.shutdown()

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="fake-worker")
        thread.start()
        return thread

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            self._threads.append(self._start(self._serve, sock))

    def _serve(self, sock: socket.socket) -> None:
        with suppress(KVStoreError, OSError):
            link, hello = accept(sock, ListenerIdentity("test"), time.monotonic() + 5)
            self._links.append(link)
            try:
                while True:
                    frame = link.receive()
                    self.seen.append(frame.message)
                    if not self.say(link, frame):
                        self._answer(link, frame, hello.session)
            finally:
                link.close()

    def _answer(self, link: FrameSocket, frame: Frame, session: bytes) -> None:
        match frame.message:
            case ShareSegments():
                self._share(link, frame.request_id)
            case AttachBuffer(number, size_bytes):
                (fd,) = link.take_fds(1)
                self.buffers[session, number] = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
                os.close(fd)
                link.send(FrameKind.REPLY, frame.request_id, Done())
            case DetachBuffer(number):
                held = self.buffers.pop((session, number), None)
                if held is not None:
                    held.close()
                link.send(FrameKind.REPLY, frame.request_id, Done())
            case Ingest() as message:
                self._ingest(link, frame.request_id, message, session)
            case ReadExtents() as message:
                self._read(link, frame.request_id, message)
            case StageExtents() as message:
                staged = self.staging.stage(message, self._sealed(message))
                link.send(FrameKind.REPLY, frame.request_id, staged)
            case ReleaseStaged() as message:
                self.staging.release(message)
                link.send(FrameKind.REPLY, frame.request_id, Done())

    def _share(self, link: FrameSocket, request_id: int) -> None:
        is_disk = self.tier == "nvme"
        file, name = (self.staging.file, fake_staging.NAME) if is_disk else (self.file, "s")
        fd = file.open()
        named = SharedSegment(name, INCARNATION if is_disk else self.incarnation, file.geometry)
        link.send(FrameKind.REPLY, request_id, SegmentsShared((named,)), (fd,))
        os.close(fd)

    def _ingest(self, link: FrameSocket, request_id: int, message: Ingest, session: bytes) -> None:
        size, pages = message.part_bytes, len(message.offsets) // 8
        if isinstance(message.source, BufferSource):
            held = self.buffers.get((session, message.source.buffer))
            if held is None:
                failure = Failure("buffer_closed", "not attached")
                link.send(FrameKind.REPLY, request_id, failure)
                return
            places = column(message.source.offsets)
            payloads = [bytes(held[place : place + size]) for place in places]
        else:
            into = bytearray(pages * size)
            link.receive_raw_into([into])
            payloads = [bytes(into[i * size : (i + 1) * size]) for i in range(pages)]
        outcomes = bytearray()
        rows = zip(
            keys_of(message.keys), column(message.offsets), column(message.checksums), payloads,
            strict=True,
        )  # fmt: skip
        for key, offset, checksum, data in rows:
            right = payload_checksum(data, key, message.part) == checksum
            outcomes.append(Outcome.OK if right else Outcome.CHECKSUM)
            start = self.file.geometry.payload_base + offset
            self.file.bytes[start : start + size] = data
        link.send(FrameKind.REPLY, request_id, Ingested(bytes(outcomes)))

    def _read(self, link: FrameSocket, request_id: int, message: ReadExtents) -> None:
        outcomes = self._sealed(message)
        base, size = self.file.geometry.payload_base, message.part_bytes
        raw = [
            self.file.bytes[base + offset : base + offset + size]
            for offset, outcome in zip(column(message.offsets), outcomes, strict=True)
            if outcome == Outcome.OK
        ]
        link.send(FrameKind.REPLY, request_id, ReadStarted(outcomes), raw=raw)
        link.send(FrameKind.REPLY, request_id, ReadEnded(self._sealed(message)))

    def _sealed(self, message: ReadExtents | StageExtents) -> bytes:
        """One Outcome a page, by the records."""
        size_class = size_class_of(message.part_bytes)
        outcomes = bytearray()
        rows = zip(
            keys_of(message.keys), column(message.offsets), column(message.generations), strict=True
        )
        for key, offset, generation in rows:
            start = self.file.geometry.record_offset(offset, size_class)
            sealed = is_sealed_as(
                self.file.bytes[start : start + RECORD_BYTES], key, message.part, generation,
                message.incarnation,
            )  # fmt: skip
            same = message.incarnation == self.incarnation
            outcomes.append(Outcome.OK if sealed and same else Outcome.STALE)
        return bytes(outcomes)
