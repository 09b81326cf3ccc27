"""The client's `mooncake` transport against real engines, over loopback."""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from kvstore import limits
from kvstore.errors import BadValue, BufferClosed, ConfigError, Unavailable
from kvstore.page import payload_checksum
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import mooncake
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.context import TransferContext
from kvstore.transfer.memory import Memory
from kvstore.transfer.mooncake_process import EngineProcess, EngineSettings
from kvstore.transfer.transport import IngestSpan, ReadSpan
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.engine import EnginePush
from kvstore.wire.messages.transfers import EngineFound
from tests.contract.engine_worker import PATIENCE_S, EngineWorker, kill, stop
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.mooncake import MooncakeTransport

PAGE: Final = 64 * limits.KIB
PART: Final = 2
GENERATION: Final = 5
KEYS: Final = [bytes((i,)) * 32 for i in range(1, 9)]
OFFSETS: Final = [i * PAGE for i in (0, 1, 2, 9, 8, 3, 30, 31)]
"""Neighbours, a gap, and a step back."""
PLACES: Final = [i * PAGE for i in (0, 1, 2, 3, 5, 4, 9, 8)]


def column(values: Sequence[int]) -> bytes:
    return array("Q", values).tobytes()


@pytest.fixture
def worker() -> Iterator[EngineWorker]:
    each = EngineWorker()
    yield each
    each.close()


def context(worker: EngineWorker) -> TransferContext:
    return TransferContext(Identity(Role.ENGINE), worker.address, (worker.address,))


@pytest.fixture
def transport(worker: EngineWorker) -> Iterator[MooncakeTransport]:
    each = mooncake.open_transport(context(worker), PATIENCE_S)
    yield each
    each.close()


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    each = Buffer(1, 10 * PAGE)
    for key, place in zip(KEYS, PLACES, strict=True):
        each.view[place : place + PAGE] = payload(key, PART, PAGE)
    yield each
    each.close()


def ingest_span(worker: EngineWorker) -> IngestSpan:
    return IngestSpan(
        1, worker.segment, GENERATION, 0, PART, PAGE, 64, bytes(32), b"".join(KEYS),
        column(OFFSETS), tuple(PLACES),
    )  # fmt: skip


def read_span(worker: EngineWorker, places: Sequence[int] = PLACES) -> ReadSpan:
    sums = [payload_checksum(payload(key, PART, PAGE), key, PART) for key in KEYS]
    generations = column([GENERATION] * len(KEYS))
    return ReadSpan(
        worker.segment, PART, PAGE, b"".join(KEYS), column(OFFSETS), generations, column(sums),
        tuple(places),
    )  # fmt: skip


@pytest.fixture
def stored(worker: EngineWorker, transport: MooncakeTransport, buffer: Buffer) -> None:
    outcomes = transport.ingest([ingest_span(worker)], buffer.memory, PATIENCE_S)
    assert outcomes == [bytes(len(KEYS))]


@pytest.fixture
def into() -> Memory:
    return Memory.of("into", bytearray(b"\xff" * 10 * PAGE), writable=True)


def at(memory: Memory, place: int) -> bytes:
    return bytes(memory.view[place : place + PAGE])


@pytest.mark.usefixtures("stored")
def test_what_is_put_lies_in_the_extents_and_is_read_back(
    worker: EngineWorker, transport: MooncakeTransport, into: Memory
) -> None:
    for key, offset in zip(KEYS, OFFSETS, strict=True):
        assert worker.payload(offset, PAGE) == payload(key, PART, PAGE)
    assert transport.read(read_span(worker), into, PATIENCE_S) == bytes(len(KEYS))
    for key, place in zip(KEYS, PLACES, strict=True):
        assert at(into, place) == payload(key, PART, PAGE)
    for untouched in (6, 7):
        assert at(into, untouched * PAGE) == b"\xff" * PAGE


@pytest.mark.usefixtures("stored")
def test_more_than_the_bounce_buffer_holds_is_read_in_pieces(
    worker: EngineWorker,
    transport: MooncakeTransport,
    into: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake, "BOUNCE_BYTES", 3 * PAGE)
    assert transport.read(read_span(worker), into, PATIENCE_S) == bytes(len(KEYS))
    for key, place in zip(KEYS, PLACES, strict=True):
        assert at(into, place) == payload(key, PART, PAGE)


@pytest.mark.usefixtures("stored")
def test_changed_bytes_and_stale_records_are_refused_and_wiped(
    worker: EngineWorker, transport: MooncakeTransport, into: Memory
) -> None:
    worker.overwrite(OFFSETS[1] + 77, b"?")
    worker.retire(OFFSETS[3])
    worker.overwrite(OFFSETS[5], b"another page")
    worker.retire(OFFSETS[5])
    outcomes = transport.read(read_span(worker), into, PATIENCE_S)
    expected = [Outcome.OK] * len(KEYS)
    expected[1], expected[3], expected[5] = Outcome.CHECKSUM, Outcome.STALE, Outcome.STALE
    assert list(outcomes) == expected
    for key, place, outcome in zip(KEYS, PLACES, outcomes, strict=True):
        assert at(into, place) == (bytes(PAGE) if outcome else payload(key, PART, PAGE))


@pytest.mark.usefixtures("stored")
def test_a_replaced_engine_is_asked_for_again(
    worker: EngineWorker, transport: MooncakeTransport, into: Memory
) -> None:
    assert not any(transport.read(read_span(worker), into, PATIENCE_S))
    kill(worker.engine.server_pid)
    assert not any(transport.read(read_span(worker), into, PATIENCE_S))


@pytest.mark.usefixtures("stored")
def test_a_stopped_engine_ends_the_read_by_its_deadline_and_nothing_comes_later(
    worker: EngineWorker, transport: MooncakeTransport, into: Memory
) -> None:
    assert not any(transport.read(read_span(worker), into, PATIENCE_S))
    stopped = worker.engine.server_pid
    stop(stopped)
    outcomes = transport.read(read_span(worker), into, 0.3)
    assert set(outcomes) == {Outcome.TRANSPORT}
    os.kill(stopped, signal.SIGCONT)
    # The engine has answered somebody since, so it could have answered the first read too.
    other = Memory.of("into", bytearray(10 * PAGE), writable=True)
    assert not any(transport.read(read_span(worker), other, PATIENCE_S))
    for place in PLACES:
        assert at(into, place) == bytes(PAGE)


def test_another_life_of_the_segment_is_not_read(
    worker: EngineWorker, transport: MooncakeTransport, into: Memory
) -> None:
    life = worker.segment.incarnation + 1
    segment = msgspec.structs.replace(worker.segment, incarnation=life)
    span = msgspec.structs.replace(read_span(worker), segment=segment)
    assert set(transport.read(span, into, PATIENCE_S)) == {Outcome.TRANSPORT}
    assert at(into, 0) == bytes(PAGE)


@pytest.mark.usefixtures("stored")
def test_a_closed_buffer_is_served_no_more(worker: EngineWorker, buffer: Buffer) -> None:
    source = worker.sources[-1]
    buffer.close()
    with pytest.raises(Unavailable):
        worker.engine.copy().run("s", source, column(OFFSETS), PAGE, time.monotonic() + PATIENCE_S)
    with pytest.raises(BufferClosed):
        _ = buffer.memory


@pytest.mark.usefixtures("stored")
def test_a_peer_cannot_write_into_a_buffer(worker: EngineWorker, buffer: Buffer) -> None:
    before = bytes(buffer.view)
    source = worker.sources[-1]
    address = array("Q", source.addresses)[0]
    stranger = EngineProcess(EngineSettings())
    fd = os.memfd_create("stranger")
    try:
        os.ftruncate(fd, PAGE)
        region, _ = stranger.map(fd, 0, PAGE, writable=True, served=False)
        push = EnginePush(source.peer, region, PAGE, address)
        assert not stranger.push(push, time.monotonic() + PATIENCE_S)
    finally:
        os.close(fd)
        stranger.close()
    assert bytes(buffer.view) == before


def test_an_engine_that_cannot_be_loaded_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    mooncake.require()
    # What a missing system library does to the child: it ends before it answers.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="does not start"):
        mooncake.require()


def test_memory_that_is_no_buffer_is_refused(
    worker: EngineWorker, transport: MooncakeTransport, into: Memory
) -> None:
    with pytest.raises(BadValue, match="source"):
        transport.ingest([ingest_span(worker)], into, PATIENCE_S)


def test_nobody_at_the_address_is_said_when_the_transport_is_opened(worker: EngineWorker) -> None:
    nobody = Address("mooncake", "127.0.0.1:1", 0)
    with pytest.raises(Unavailable):
        mooncake.open_transport(
            TransferContext(Identity(Role.ENGINE), nobody, (nobody,)), PATIENCE_S
        )


@pytest.mark.usefixtures("stored")
def test_a_closed_transport_answers_transport_and_others_go_on(
    worker: EngineWorker, transport: MooncakeTransport, buffer: Buffer, into: Memory
) -> None:
    other = mooncake.open_transport(context(worker), PATIENCE_S)
    other.close()
    other.close()
    assert set(other.read(read_span(worker), into, PATIENCE_S)) == {Outcome.TRANSPORT}
    assert other.ingest([ingest_span(worker)], buffer.memory, PATIENCE_S) == [
        bytes((Outcome.TRANSPORT,)) * len(KEYS)
    ]
    assert not any(transport.read(read_span(worker), into, PATIENCE_S))


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("found", "want"),
    [
        (EngineFound("127.0.0.1:1", 0, bytes(8)), Outcome.TRANSPORT),
        (EngineFound("127.0.0.1:1", 1 << 20, bytes(7)), Outcome.TRANSPORT),
        (EngineFound("127.0.0.1:1", 1 << 20, bytes(8)), Outcome.STALE),
        (EngineFound("127.0.0.1:1", 1 << 40, b""), Outcome.STALE),
    ],
)
def test_what_a_worker_serves_nowhere_is_not_read(
    worker: EngineWorker,
    transport: MooncakeTransport,
    into: Memory,
    monkeypatch: pytest.MonkeyPatch,
    found: EngineFound,
    want: Outcome,
) -> None:
    monkeypatch.setattr(worker.engine, "find", lambda _: found)
    assert set(transport.read(read_span(worker), into, PATIENCE_S)) == {want}
    assert [at(into, place) for place in PLACES] == [bytes(PAGE)] * len(PLACES)


def test_a_file_that_cannot_be_mapped_leaves_nothing_open_in_the_child() -> None:
    process, fd = EngineProcess(EngineSettings()), os.memfd_create("short")
    try:
        os.ftruncate(fd, PAGE)
        before = len(os.listdir(f"/proc/{process.child_pid}/fd"))
        with pytest.raises(Unavailable):
            process.map(fd, 1, PAGE - 1, writable=False, served=True)  # not where a page begins
        assert process.alive
        assert len(os.listdir(f"/proc/{process.child_pid}/fd")) == before
    finally:
        os.close(fd)
        process.close()
