"""A worker reduced to what the `mooncake` transport asks of one: its engine, a file, a dict.

Answers FindEngine, CheckRecords and Ingest on a real data connection. Pages that it was given by
Ingest are SEALED; `retire` takes one back. No state machine, no records in the file, no master.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import threading
import time
from array import array
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import KVStoreError, Unavailable
from kvstore.page import payload_checksum
from kvstore.rpc.dialling import accept
from kvstore.rpc.failure import failure_of
from kvstore.rpc.identity import ListenerIdentity
from kvstore.segment import Geometry
from kvstore.transfer.mooncake_process import EngineSettings
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.puts import EngineSource, Ingest, Ingested
from kvstore.wire.messages.transfers import CheckRecords, FindEngine, RecordsChecked
from tests.fakes import keys_of
from workers.engine_child import EngineChild, EngineSegment

if TYPE_CHECKING:
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.messages.base import Message

GEOMETRY: Final = Geometry(16 * limits.MIB, 4 * limits.MIB)
SEGMENT: Final = "s"
INCARNATION: Final = 7
PATIENCE_S: Final = 20.0


def stop(pid: int) -> None:
    """Stop a child of this process; returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def kill(pid: int) -> None:
    """Kill a child of this process; returns when it has ended, unreaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class EngineWorker:
    """Serves until closed. One thread accepts, one serves each connection."""

    def __init__(self) -> None:
        """Listen on loopback, with an empty segment."""
        self._fd = os.memfd_create("engine-worker")
        os.ftruncate(self._fd, GEOMETRY.file_bytes)
        self.file = mmap.mmap(self._fd, GEOMETRY.file_bytes)
        self.engine = EngineChild(EngineSettings(), [EngineSegment(SEGMENT, self._fd, GEOMETRY)])
        self._sealed: dict[int, bytes] = {}
        """Key by payload offset."""
        self.sources: list[EngineSource] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._identity = ListenerIdentity("test")
        self._links: list[FrameSocket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> Address:
        """Where clients find it."""
        host, port = self._listener.getsockname()
        return Address("mooncake", f"{host}:{port}", 0)

    @property
    def segment(self) -> SegmentRef:
        """Its segment, as the master would name it."""
        addresses = (self.address,)
        return SegmentRef(SEGMENT, INCARNATION, "dram", GEOMETRY, "w", "here", addresses)

    def payload(self, offset: int, nbytes: int) -> bytes:
        """What lies there."""
        start = GEOMETRY.payload_base + offset
        return self.file[start : start + nbytes]

    def overwrite(self, offset: int, data: bytes) -> None:
        """Put other bytes there, as a bad disk or a bug would."""
        start = GEOMETRY.payload_base + offset
        self.file[start : start + len(data)] = data

    def retire(self, offset: int) -> None:
        """The page there is no longer SEALED."""
        del self._sealed[offset]

    def close(self) -> None:
        """End everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for link in self._links:
            link.shutdown()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()
        self.engine.close()
        self.file.close()
        os.close(self._fd)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            link, _ = accept(sock, self._identity, time.monotonic() + PATIENCE_S)
            self._links.append(link)
            thread = threading.Thread(target=self._serve, args=(link,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, link: FrameSocket) -> None:
        try:
            while True:
                frame = link.receive()
                try:
                    reply = self._answer(frame.message)
                except KVStoreError as error:
                    reply = failure_of(error)
                link.send(FrameKind.REPLY, frame.request_id, reply)
        except Unavailable:
            link.close()

    def _answer(self, message: Message) -> Message:
        match message:
            case FindEngine(segment, incarnation):
                if (segment, incarnation) != (SEGMENT, INCARNATION):
                    raise Unavailable("another life")
                return self.engine.find(segment)
            case CheckRecords(keys=keys, offsets=offsets):
                pages = zip(keys_of(keys), array("Q", offsets), strict=True)
                return RecordsChecked(
                    bytes(
                        Outcome.OK if self._sealed.get(offset) == key else Outcome.STALE
                        for key, offset in pages
                    )
                )
            case Ingest():
                return self._ingest(message)
        raise AssertionError(message)

    def _ingest(self, message: Ingest) -> Ingested:
        assert isinstance(message.source, EngineSource)
        self.sources.append(message.source)
        try:
            self.engine.copy().run(
                SEGMENT, message.source, message.offsets, message.part_bytes,
                time.monotonic() + PATIENCE_S,
            )  # fmt: skip
        except Unavailable:
            return Ingested(bytes((Outcome.TRANSPORT,)) * (len(message.offsets) // 8))
        outcomes = bytearray()
        columns = zip(
            keys_of(message.keys), array("Q", message.offsets), array("Q", message.checksums),
            strict=True,
        )  # fmt: skip
        for key, offset, checksum in columns:
            found = payload_checksum(self.payload(offset, message.part_bytes), key, message.part)
            outcomes.append(Outcome.OK if found == checksum else Outcome.CHECKSUM)
            self._sealed[offset] = key
        return Ingested(bytes(outcomes))
