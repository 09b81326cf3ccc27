"""A transport under test and the pages behind it, for the contract tests of transports."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from kvstore.page import PageChain
from kvstore.record import RecordState
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import shm, tcp
from kvstore.transfer.context import TransferContext
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import IngestSpan
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from tests.fakes import LoopbackTransport, payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.transport import ReadSpan, Transport
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message
    from tests.contract.fake_worker import FakeWorker

SIZE = 8192
PAGES = 6
TIMEOUT_S = 5.0
CHAIN = PageChain(payload(b"keys", 0, 32 * PAGES))
PLACES = tuple(i * SIZE for i in range(PAGES))


class Way:
    """A transport under test, and the pages behind it."""

    def __init__(self, kind: str, worker: FakeWorker) -> None:
        """`kind` is a transport, and after a space the tier of the segment that it reads."""
        self.kind, _, tier = kind.partition(" ")
        self.worker = worker
        worker.tier = tier or "dram"
        self.transport = self._open()
        self.into = Memory.of("into", bytearray(b"\xee" * (PAGES * SIZE)), writable=True)

    def _open(self) -> Transport:
        if self.kind == "loopback":
            return LoopbackTransport()
        address = self.worker.address(self.kind)
        context = TransferContext(Identity(Role.ENGINE), address, (address,))
        if self.kind == "shm":
            return shm.open_transport(context, TIMEOUT_S)
        return tcp.open_transport(context, TIMEOUT_S)

    def stored(self) -> ReadSpan:
        """Store every page; the span that reads them."""
        offsets = self.worker.file.store(CHAIN, SIZE)
        if isinstance(self.transport, LoopbackTransport):
            for key, offset in zip(CHAIN, offsets, strict=True):
                held = (key, 0, offset + 1, payload(key, 0, SIZE))
                self.transport.pages["s", offset] = held
        span = self.worker.file.span(CHAIN, offsets, SIZE, PLACES)
        return msgspec.structs.replace(span, segment=self.worker.ref(self.kind))

    def flip(self, page: int) -> None:
        """Damage one stored page."""
        self.worker.file.flip(page * SIZE)
        if isinstance(self.transport, LoopbackTransport):
            key, part, generation, data = self.transport.pages["s", page * SIZE]
            damaged = bytes([data[0] ^ 1]) + data[1:]
            self.transport.pages["s", page * SIZE] = (key, part, generation, damaged)

    def free(self, page: int) -> None:
        """Give one stored page's extent away."""
        self.worker.file.write_record(CHAIN.key(page), page * SIZE, SIZE, state=RecordState.FREE)
        if isinstance(self.transport, LoopbackTransport):
            del self.transport.pages["s", page * SIZE]

    def read(self, span: ReadSpan) -> bytes:
        """Read; every OK page's bytes are in place, every other place is zero."""
        outcomes = self.transport.read(span, self.into, TIMEOUT_S)
        for i, place in enumerate(span.places):
            found = bytes(self.into.view[place : place + SIZE])
            good = outcomes[i] == Outcome.OK
            assert found == (payload(CHAIN.key(i), 0, SIZE) if good else bytes(SIZE)), i
        return outcomes


def ingest_span(worker: FakeWorker, kind: str, pages: int = PAGES) -> IngestSpan:
    """A plan for the first pages of the chain."""
    offsets = array("Q", (i * SIZE for i in range(pages))).tobytes()
    return IngestSpan(
        1, worker.ref(kind), 99, 7, 0, SIZE, 64, bytes(32), CHAIN.packed[: 32 * pages], offsets,
        PLACES[:pages],
    )  # fmt: skip


def reply(message: Message, to: type[Message]) -> Callable[[FrameSocket, Frame], bool]:
    """Say this to every request of one type."""

    def say(link: FrameSocket, frame: Frame) -> bool:
        if type(frame.message) is not to:
            return False
        link.send(FrameKind.REPLY, frame.request_id, message)
        return True

    return say


def hang_up_on(kind: type[Message]) -> Callable[[FrameSocket, Frame], bool]:
    """End the connection at the first request of one type."""

    def say(link: FrameSocket, frame: Frame) -> bool:
        if type(frame.message) is kind:
            link.shutdown()
            return True
        return False

    return say
