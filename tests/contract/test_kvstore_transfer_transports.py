"""One suite for every transport: what Transport promises, kept by the fake and the real ones."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import KVStoreError, Unavailable
from kvstore.page import PageChain
from kvstore.record import RecordState
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import shm, tcp, transport
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.context import TransferContext
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import IngestSpan
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.puts import Ingest, Ingested
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    DetachBuffer,
    ReadEnded,
    ReadExtents,
    ReadStarted,
    SegmentsShared,
    SharedSegment,
    ShareSegments,
)
from tests.contract.fake_worker import FakeWorker
from tests.fakes import LoopbackTransport, payload
from tests.unit.segment_files import INCARNATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.transport import ReadSpan, Transport
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message

SIZE = 8192
PAGES = 6
TIMEOUT_S = 5.0
CHAIN = PageChain(payload(b"keys", 0, 32 * PAGES))
PLACES = tuple(i * SIZE for i in range(PAGES))


class Way:
    """A transport under test, and the pages behind it."""

    def __init__(self, kind: str, worker: FakeWorker) -> None:
        self.kind = kind
        self.worker = worker
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


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[FakeWorker]:
    with FakeWorker(tmp_path) as made:
        yield made


@pytest.fixture(params=["loopback", "shm", "tcp"])
def way(request: pytest.FixtureRequest, worker: FakeWorker) -> Iterator[Way]:
    made = Way(request.param, worker)
    yield made
    made.transport.close()


@pytest.fixture(params=["shm", "tcp"])
def real(request: pytest.FixtureRequest, worker: FakeWorker) -> Iterator[Way]:
    made = Way(request.param, worker)
    yield made
    made.transport.close()


@pytest.fixture
def source() -> Iterator[Buffer]:
    made = Buffer(1, PAGES * SIZE)
    for key, place in zip(CHAIN, PLACES, strict=True):
        made.view[place : place + SIZE] = payload(key, 0, SIZE)
    yield made
    made.close()


# What every transport promises.


@pytest.mark.parametrize("piece_bytes", [1, 2 * SIZE, 1 << 30])
def test_reads_bring_verified_bytes(
    way: Way, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "READ_PIECE_BYTES", piece_bytes)
    assert way.read(way.stored()) == bytes(PAGES)


def test_damaged_and_freed_pages_are_told_apart_and_wiped(way: Way) -> None:
    span = way.stored()
    way.flip(1)
    way.free(4)
    want = bytearray(PAGES)
    want[1], want[4] = Outcome.CHECKSUM, Outcome.STALE
    assert way.read(span) == bytes(want)


def test_another_generation_is_stale(way: Way) -> None:
    span = msgspec.structs.replace(way.stored(), generations=bytes(8 * PAGES))
    assert way.read(span) == bytes([Outcome.STALE] * PAGES)


@pytest.mark.parametrize("piece_bytes", [1, 2 * SIZE, 1 << 30])
def test_ingested_pages_can_be_read(
    way: Way, source: Buffer, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = transport.pieces_of.__defaults__
    monkeypatch.setattr(transport.pieces_of, "__defaults__", (piece_bytes,))
    assert defaults is not None
    spans = [ingest_span(way.worker, way.kind)]
    assert way.transport.ingest(spans, source.memory, TIMEOUT_S) == [bytes(PAGES)]
    if isinstance(way.transport, LoopbackTransport):
        assert way.transport.pages["s", 0][3] == payload(CHAIN.key(0), 0, SIZE)
        return
    base = way.worker.file.geometry.payload_base
    for key, place in zip(CHAIN, PLACES, strict=True):
        stored = way.worker.file.bytes[base + place : base + place + SIZE]
        assert stored == payload(key, 0, SIZE)


def test_spans_have_outcomes_of_their_own(way: Way, source: Buffer) -> None:
    whole = ingest_span(way.worker, way.kind)
    spans = [whole.cut(0, 2), whole.cut(2, 3), whole.cut(3, PAGES)]
    outcomes = way.transport.ingest(spans, source.memory, TIMEOUT_S)
    assert outcomes == [bytes(2), bytes(1), bytes(3)]


def test_a_closed_transport_answers_transport(way: Way, source: Buffer) -> None:
    span = way.stored()
    way.transport.close()
    way.transport.close()
    assert way.read(span) == bytes([Outcome.TRANSPORT] * PAGES)
    (outcomes,) = way.transport.ingest(
        [ingest_span(way.worker, way.kind)], source.memory, TIMEOUT_S
    )
    assert outcomes == bytes([Outcome.TRANSPORT] * PAGES)


# What the real ones make of a worker that dies, lies or begins anew.


def test_the_checksums_are_the_writers_own(real: Way, source: Buffer) -> None:
    real.transport.ingest([ingest_span(real.worker, real.kind)], source.memory, TIMEOUT_S)
    sums = [m.checksums for m in real.worker.seen if isinstance(m, Ingest)]
    want = real.worker.file.span(CHAIN, PLACES, SIZE, PLACES).checksums
    assert b"".join(sums) == want


def test_another_life_of_the_segment_is_stale(real: Way) -> None:
    span = real.stored()
    later = msgspec.structs.replace(span, segment=real.worker.ref(real.kind, INCARNATION + 1))
    assert real.read(later) == bytes([Outcome.STALE] * PAGES)
    # Once the worker has begun that life, and its records say so, it is read.
    real.worker.incarnation = INCARNATION + 1
    assert real.read(later) == bytes([Outcome.STALE] * PAGES)


def test_a_worker_that_hung_up_between_calls_is_dialled_again(real: Way, source: Buffer) -> None:
    span = real.stored()
    assert real.read(span) == bytes(PAGES)
    real.worker.hang_up()
    assert real.read(span) == bytes(PAGES)
    real.transport.ingest([ingest_span(real.worker, real.kind)], source.memory, TIMEOUT_S)
    real.worker.hang_up()
    real.worker.buffers.clear()
    # The worker has forgotten the buffer too: the first try finds out, the second attaches it.
    spans = [ingest_span(real.worker, real.kind)]
    real.transport.ingest(spans, source.memory, TIMEOUT_S)
    assert real.transport.ingest(spans, source.memory, TIMEOUT_S) == [bytes(PAGES)]


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


@pytest.mark.parametrize(
    ("message", "want"),
    [
        (Failure("fenced", "self-fenced"), Outcome.FENCED),
        (Failure("stale_epoch", "old"), Outcome.FENCED),
        (Failure("buffer_closed", "unknown"), Outcome.SOURCE_LOST),
        (Failure("unavailable", "not now"), Outcome.TRANSPORT),
        (Failure("no such code", "from the future"), Outcome.TRANSPORT),
        (Done(), Outcome.TRANSPORT),
        (Ingested(bytes(PAGES + 1)), Outcome.TRANSPORT),
        (Ingested(b""), Outcome.TRANSPORT),
    ],
)
def test_refusals_and_nonsense_about_an_ingest(
    real: Way, source: Buffer, message: Message, want: Outcome
) -> None:
    real.worker.say = reply(message, Ingest)
    (outcomes,) = real.transport.ingest(
        [ingest_span(real.worker, real.kind)], source.memory, TIMEOUT_S
    )
    assert outcomes == bytes([want] * PAGES)


def test_an_ingest_cut_off_keeps_what_was_answered(
    real: Way, source: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.pieces_of, "__defaults__", (2 * SIZE,))
    monkeypatch.setattr("kvstore.transfer.piece_calls.PIECES_IN_FLIGHT_MAX", 1)
    honest = [2]

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, Ingest):
            honest[0] -= 1
            if honest[0] < 0:
                link.shutdown()
                return True
        return False

    real.worker.say = say
    (outcomes,) = real.transport.ingest(
        [ingest_span(real.worker, real.kind)], source.memory, TIMEOUT_S
    )
    assert outcomes == bytes(4) + bytes([Outcome.TRANSPORT] * 2)


def test_an_ingest_without_time_is_not_waited_for(real: Way, source: Buffer) -> None:
    real.worker.say = lambda link, frame: isinstance(frame.message, Ingest)
    (outcomes,) = real.transport.ingest([ingest_span(real.worker, real.kind)], source.memory, 0.05)
    assert outcomes == bytes([Outcome.TRANSPORT] * PAGES)


def read_answers() -> Sequence[Message]:
    """What no worker says to ReadExtents."""
    return (
        Failure("bad_value", "no"),
        Done(),
        ReadStarted(b""),
        ReadStarted(bytes(PAGES + 1)),
        ReadEnded(bytes(PAGES)),
        Ingested(bytes(PAGES)),
    )


@pytest.mark.parametrize("message", read_answers(), ids=repr)
def test_refusals_and_nonsense_about_a_read_over_a_stream(
    worker: FakeWorker, message: Message
) -> None:
    way = Way("tcp", worker)
    span = way.stored()
    worker.say = reply(message, ReadExtents)
    assert way.read(span) == bytes([Outcome.TRANSPORT] * PAGES)
    way.transport.close()


def test_a_stream_cut_in_mid_payload_leaves_nothing_behind(worker: FakeWorker) -> None:
    way = Way("tcp", worker)
    span = way.stored()

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, ReadExtents):
            part = [payload(CHAIN.key(0), 0, SIZE), b"half a page"]
            link.send(FrameKind.REPLY, frame.request_id, ReadStarted(bytes(PAGES)), raw=part)
            link.shutdown()
            return True
        return False

    worker.say = say
    assert way.read(span) == bytes([Outcome.TRANSPORT] * PAGES)
    way.transport.close()


def test_a_page_that_changed_while_it_was_sent_is_stale(worker: FakeWorker) -> None:
    way = Way("tcp", worker)
    span = way.stored()

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, ReadExtents):
            raw = [payload(key, 0, SIZE) for key in CHAIN]
            link.send(FrameKind.REPLY, frame.request_id, ReadStarted(bytes(PAGES)), raw=raw)
            ended = bytes(PAGES - 1) + bytes([Outcome.STALE])
            link.send(FrameKind.REPLY, frame.request_id, ReadEnded(ended))
            return True
        return False

    worker.say = say
    assert way.read(span) == bytes(PAGES - 1) + bytes([Outcome.STALE])
    way.transport.close()


# Shared memory alone.


@pytest.mark.parametrize("say", [hang_up_on(ShareSegments), reply(Done(), ShareSegments)])
def test_a_worker_that_shares_nothing_cannot_be_opened(
    worker: FakeWorker, say: Callable[[FrameSocket, Frame], bool]
) -> None:
    worker.say = say
    with pytest.raises(KVStoreError):
        Way("shm", worker)


def test_fewer_descriptors_than_segments_are_refused(worker: FakeWorker) -> None:
    shared = SharedSegment("s", 1, worker.file.geometry)
    worker.say = reply(SegmentsShared((shared,)), ShareSegments)
    with pytest.raises(KVStoreError, match="0 descriptors came, want 1"):
        Way("shm", worker)


def test_a_path_that_leads_nowhere_is_another_host(tmp_path: Path) -> None:
    address = Address("shm", str(tmp_path / "nobody"), 0)
    context = TransferContext(Identity(Role.ENGINE), address, (address,))
    with pytest.raises(Unavailable):
        shm.open_transport(context, TIMEOUT_S)


def test_buffers_are_attached_once_and_let_go_when_they_close(
    worker: FakeWorker, source: Buffer
) -> None:
    way = Way("shm", worker)
    for _ in range(3):
        way.transport.ingest([ingest_span(worker, "shm")], source.memory, TIMEOUT_S)
    assert sum(isinstance(m, AttachBuffer) for m in worker.seen) == 1
    source.close()
    assert worker.seen[-1] == DetachBuffer(1)
    assert not worker.buffers
    way.transport.close()


def test_a_buffer_that_was_only_dropped_is_let_go_with_the_next(worker: FakeWorker) -> None:
    way = Way("shm", worker)
    dropped = Buffer(5, PAGES * SIZE)
    way.transport.ingest([ingest_span(worker, "shm")], dropped.memory, TIMEOUT_S)
    del dropped
    next_one = Buffer(6, PAGES * SIZE)
    way.transport.ingest([ingest_span(worker, "shm")], next_one.memory, TIMEOUT_S)
    assert [m for m in worker.seen if isinstance(m, DetachBuffer)] == [DetachBuffer(5)]
    assert [number for _, number in worker.buffers] == [6]
    next_one.close()
    way.transport.close()
