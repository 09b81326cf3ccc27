"""One suite for every transport: what Transport promises, kept by the fake and the real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.transfer import stream_reads, transport
from kvstore.transfer.buffer import Buffer
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.puts import Ingest, Ingested
from tests.contract.fake_worker import FakeWorker
from tests.fakes import LoopbackTransport, payload
from tests.unit.segment_files import INCARNATION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message

from tests.contract.transport_ways import (
    CHAIN,
    PAGES,
    PLACES,
    SIZE,
    TIMEOUT_S,
    Way,
    ingest_span,
    reply,
)

REAL = ("shm", "tcp", "shm hbm", "tcp hbm", "shm nvme", "tcp nvme")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[FakeWorker]:
    with FakeWorker(tmp_path) as made:
        yield made


@pytest.fixture(params=["loopback", *REAL])
def way(request: pytest.FixtureRequest, worker: FakeWorker) -> Iterator[Way]:
    made = Way(request.param, worker)
    yield made
    made.transport.close()


@pytest.fixture(params=REAL)
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
    monkeypatch.setattr(stream_reads, "READ_PIECE_BYTES", piece_bytes)
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
    monkeypatch.setattr(transport, "FIRST_PIECE_BYTES", piece_bytes)
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
    monkeypatch.setattr(transport, "FIRST_PIECE_BYTES", SIZE)
    monkeypatch.setattr("kvstore.transfer.piece_calls.PIECES_IN_FLIGHT_MAX", 1)
    honest = [1]

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
    assert outcomes == bytes(1) + bytes([Outcome.TRANSPORT] * (PAGES - 1))


def test_an_ingest_without_time_is_not_waited_for(real: Way, source: Buffer) -> None:
    real.worker.say = lambda link, frame: isinstance(frame.message, Ingest)
    (outcomes,) = real.transport.ingest([ingest_span(real.worker, real.kind)], source.memory, 0.05)
    assert outcomes == bytes([Outcome.TRANSPORT] * PAGES)
