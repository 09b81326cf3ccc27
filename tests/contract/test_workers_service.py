"""The worker's shell over real sockets: puts, reads, fences, deaths, restarts."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import AccessDenied, BadValue, DeadlineExceeded, Unavailable
from kvstore.record import RecordState
from kvstore.rpc.dialling import dial
from kvstore.rpc.identity import Identity, Role
from kvstore.segment import HEADER_BYTES, unpack_header
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    InventoryRows,
    OfferInventory,
    RegisterWorker,
    RetireExtents,
)
from kvstore.wire.messages.puts import Ingested, Sealed, SealedNoted
from kvstore.wire.messages.reads import GetStatus
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    CheckRecords,
    DetachBuffer,
    FindEngine,
    ReadEnded,
    ReadExtents,
    ReadStarted,
    RecordsChecked,
    SegmentsShared,
    ShareSegments,
)
from tests.contract.worker_rig import Client, Leader, Rig, column, soon, streamed
from tests.fakes import ManualClock
from tests.unit.worker_scripts import CHUNK, EPOCH, GEOMETRY, PAGE, generation
from tests.unit.worker_segments import FLOCK, Pages, memory_folder, sealed_memfd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.wire.messages.base import Message

OFFSETS = (0, PAGE, 2 * PAGE, CHUNK)
OK = Ingested(bytes(4))


@contextmanager
def running(
    folder: Path, leader: Leader, clock: Clock | None = None, secret: bytes | None = None
) -> Iterator[Rig]:
    rig = Rig(folder, leader, clock=clock, secret=secret)
    try:
        leader.await_served()
        yield rig
    finally:
        rig.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.stop()


@pytest.fixture
def rig(folder: Path, leader: Leader) -> Iterator[Rig]:
    with running(folder, leader) as made:
        yield made


def order(
    kind: type[FenceExtents | FreeExtents | RetireExtents | CheckExtents], rig: Rig,
    offsets: tuple[int, ...] = OFFSETS, counter: int = 5,
) -> Message:  # fmt: skip
    generations = column([generation(counter)] * len(offsets))
    packed = column(list(offsets))
    return kind(EPOCH, rig.segment.id, rig.segment.incarnation, PAGE, packed, generations)


def question(kind: type[ReadExtents | CheckRecords], rig: Rig, pages: Pages) -> Message:
    return kind(
        rig.segment.id, rig.segment.incarnation, 0, pages.size, b"".join(pages.keys),
        pages.offsets.tobytes(), column([generation(5)] * len(pages.keys)),
    )  # fmt: skip


def read(client: Client, pages: Pages) -> tuple[bytes, bytes, bytes]:
    """Outcomes before, the bytes, outcomes after."""
    request = client.send(question(ReadExtents, client.rig, pages))
    started = client.reply(request)
    assert isinstance(started, ReadStarted)
    data = bytearray(started.outcomes.count(Outcome.OK) * pages.size)
    client.link.receive_raw_into([memoryview(data)], soon())
    ended = client.reply(request)
    assert isinstance(ended, ReadEnded)
    return started.outcomes, bytes(data), ended.outcomes


def is_silent(client: Client) -> bool:
    """Whether no frame has come."""
    try:
        client.link.receive(0.0)
    except DeadlineExceeded:
        return True
    return False


# --- puts -----------------------------------------------------------------------------------


def test_a_put_by_shared_memory_is_answered_after_the_leader_has_it(
    rig: Rig, leader: Leader
) -> None:
    pages = Pages(OFFSETS)
    leader.on_sealed = lambda _: None
    with rig.client() as client:
        client.attach(1, pages.source)
        request = client.send(pages.ingest(rig.segment))
        report = leader.expect(Sealed)
        assert report.keys == b"".join(pages.keys)
        assert report.checksums == pages.checksums.tobytes()
        assert is_silent(client)
        leader.answer(SealedNoted(bytes(4)))
        assert client.reply(request) == OK
    assert pages.stored(rig.segment) == pages.payloads


def test_a_put_by_stream(rig: Rig) -> None:
    pages = Pages(OFFSETS, size=PAGE - 7)
    with rig.client(rig.tcp) as client:
        assert client.reply(client.stream(pages)) == OK
        assert read(client, pages) == (bytes(4), pages.source, bytes(4))


def test_pipelined_puts_are_all_answered(rig: Rig) -> None:
    pieces = [Pages((i * PAGE,), first_key=i + 1) for i in range(16)]
    with rig.client(rig.tcp) as client:
        requests = [client.stream(piece, counter=5) for piece in pieces]
        answers: dict[int, Message] = {}
        while len(answers) < len(requests):
            frame = client.link.receive(soon())
            answers[frame.request_id] = frame.message
    assert answers == dict.fromkeys(requests, Ingested(bytes(1)))
    assert [piece.stored(rig.segment)[0] for piece in pieces] == [p.payloads[0] for p in pieces]


def test_while_one_seal_is_on_its_way_the_next_pull_copies(rig: Rig, leader: Leader) -> None:
    leader.on_sealed = lambda _: None
    first, second = Pages((0,)), Pages((PAGE,), first_key=2)
    with rig.client(rig.tcp) as client:
        requests = [client.stream(first), client.stream(second)]
        leader.expect(Sealed)
        leader.expect(Sealed)  # the second was copied although the first is not acknowledged
        assert is_silent(client)
        leader.answer(SealedNoted(bytes(1)))
        leader.answer(SealedNoted(bytes(1)))
        assert [client.reply(each) for each in requests] == [Ingested(bytes(1))] * 2


def test_bytes_that_differ_are_refused_and_the_rest_stored(rig: Rig, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    pages.payloads[2] = bytes(PAGE)
    with rig.client(rig.tcp) as client:
        answer = client.reply(client.stream(pages))
    assert answer == Ingested(bytes((0, 0, Outcome.CHECKSUM, 0)))
    assert leader.expect(Sealed).keys == b"".join(pages.keys[i] for i in (0, 1, 3))


def test_a_closed_plan_leaves_nothing_behind(rig: Rig, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    leader.on_sealed = lambda _: SealedNoted(bytes((Outcome.PLAN_CLOSED,)) * 4)
    with rig.client() as client:
        assert client.ingest(pages) == Ingested(bytes((Outcome.PLAN_CLOSED,)) * 4)
    assert pages.records(rig.segment) == [None] * 4


def test_a_leader_that_refuses_the_report_is_a_transport_failure(rig: Rig, leader: Leader) -> None:
    leader.on_sealed = lambda _: Failure("unavailable", "its inventory is first")
    with rig.client() as client:
        assert client.ingest(Pages(OFFSETS)) == Ingested(bytes((Outcome.TRANSPORT,)) * 4)
    assert len(rig.state.pulls.unreported) == 1


def test_a_repeated_put_gets_the_first_ones_result(rig: Rig, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        assert client.ingest(pages) == OK
        assert client.call(pages.ingest(rig.segment)) == OK
    with rig.client(rig.tcp) as other:  # by another way, and the bytes are read past
        assert other.reply(other.stream(pages)) == OK
        assert read(other, pages)[0] == bytes(4)
    assert [leader.expect(Sealed) for _ in range(3)]


def test_a_refused_stream_leaves_the_connection_usable(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client(rig.tcp) as client:
        stale = msgspec.structs.replace(pages.ingest(rig.segment), incarnation=1)
        answer = client.call(streamed(stale), raw=[pages.source])
        assert answer == Ingested(bytes((Outcome.STALE,)) * 4)
        assert client.reply(client.stream(pages)) == OK


def test_a_stream_of_unknown_length_ends_the_connection(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    message = streamed(pages.ingest(rig.segment))
    with rig.client(rig.tcp) as client:
        client.send(msgspec.structs.replace(message, part_bytes=1 << 40), raw=[pages.source])
        with pytest.raises(Unavailable):
            client.link.receive(soon())
    with rig.client(rig.tcp) as client:
        bad = msgspec.structs.replace(message, checksums=b"")
        request = client.send(bad, raw=[pages.source])
        assert isinstance(client.reply(request), Failure)
        with pytest.raises(Unavailable):
            client.link.receive(soon())


def test_a_client_that_dies_in_mid_stream_frees_its_extents(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client(rig.tcp) as client:
        client.stream(pages, upto=PAGE + 100)
    with rig.client() as client:  # its pull waits for the first one's end
        again = Pages(OFFSETS, first_key=70)
        assert client.ingest(again, counter=6) == OK
    assert again.stored(rig.segment) == again.payloads


def test_a_fence_ends_a_silent_writers_pull_before_it_is_confirmed(
    rig: Rig, leader: Leader
) -> None:
    pages = Pages(OFFSETS)
    with rig.client(rig.tcp) as client:
        client.stream(pages, upto=PAGE + 100)  # and then nothing
        while not rig.state.pulls.running:
            pass
        answer = leader.command(order(FenceExtents, rig))
        assert answer == ExtentsConfirmed(EPOCH, bytes(4))
        assert pages.records(rig.segment) == [None] * 4
        with pytest.raises(Unavailable):
            client.link.receive(soon())
    with rig.client() as client:
        late = client.ingest(pages)
        assert late == Ingested(bytes((Outcome.FENCED,)) * 4)
        assert client.call(pages.ingest(rig.segment, counter=6)) == OK


# --- buffers --------------------------------------------------------------------------------


def test_a_buffer_that_is_not_attached_is_a_lost_source(rig: Rig) -> None:
    with rig.client() as client:
        answer = client.call(Pages(OFFSETS).ingest(rig.segment))
        assert answer == Ingested(bytes((Outcome.SOURCE_LOST,)) * 4)


def test_connections_of_one_session_share_its_buffers(rig: Rig) -> None:
    pages, identity = Pages(OFFSETS), Identity(Role.ENGINE)
    with rig.client(identity=identity) as first, rig.client(identity=identity) as second:
        first.attach(1, pages.source)
        assert second.call(pages.ingest(rig.segment)) == OK
        assert second.call(DetachBuffer(1)) == Done()
        lost = first.call(pages.ingest(rig.segment))
        assert lost == Ingested(bytes((Outcome.SOURCE_LOST,)) * 4)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_an_unsealed_buffer_is_refused(rig: Rig, seals: int) -> None:
    with rig.client() as client:
        with pytest.raises(BadValue, match="F_SEAL_SHRINK"):
            client.call(AttachBuffer(1, PAGE), fds=[sealed_memfd(bytes(PAGE), seals)])
        assert client.ingest(Pages(OFFSETS)) == OK  # the connection lives


def test_a_buffer_shorter_than_it_says_is_refused(rig: Rig) -> None:
    with rig.client() as client, pytest.raises(BadValue, match="size_bytes"):
        client.call(AttachBuffer(1, PAGE + 1), fds=[sealed_memfd(bytes(PAGE))])


def test_an_attachment_without_a_descriptor_ends_the_connection(rig: Rig) -> None:
    with rig.client() as client, pytest.raises(Unavailable):
        client.call(AttachBuffer(1, PAGE))


def test_pages_outside_the_buffer_are_refused(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        client.attach(1, pages.source[:-1])
        with pytest.raises(BadValue, match=r"source\.offsets"):
            client.call(pages.ingest(rig.segment))
        message = pages.ingest(rig.segment)
        source = msgspec.structs.replace(message.source, offsets=bytes(8))
        with pytest.raises(BadValue, match=r"source\.offsets"):
            client.call(msgspec.structs.replace(message, source=source))


def test_memory_is_shared_over_the_unix_socket_only(rig: Rig) -> None:
    with rig.client(rig.tcp) as client:
        for message in (ShareSegments(), AttachBuffer(1, PAGE)):
            with pytest.raises(BadValue, match="Unix socket"):
                client.call(message)


def test_what_no_worker_answers_is_refused(rig: Rig) -> None:
    with rig.client() as client:
        for message in (GetStatus(), FindEngine(rig.segment.id, rig.segment.incarnation)):
            with pytest.raises(BadValue):
                client.call(message)


# --- reads ----------------------------------------------------------------------------------


def shared(client: Client) -> int:
    """The descriptor of the worker's segment."""
    reply = client.call(ShareSegments())
    assert isinstance(reply, SegmentsShared)
    assert reply.segments[0].incarnation == client.rig.segment.incarnation
    return client.link.take_fds(1)[0]


def test_a_reader_maps_the_segment_and_finds_the_page(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        assert client.ingest(pages) == OK
        fd = shared(client)
    with mmap.mmap(fd, GEOMETRY.file_bytes, prot=mmap.PROT_READ) as mapped:
        header = unpack_header(mapped[:HEADER_BYTES])
        assert header.incarnation == rig.segment.incarnation
        for offset, payload in zip(OFFSETS, pages.payloads, strict=True):
            start = GEOMETRY.payload_base + offset
            assert mapped[start : start + PAGE] == payload
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_records_can_be_checked_without_bytes(rig: Rig, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        client.ingest(pages)
        assert client.call(question(CheckRecords, rig, pages)) == RecordsChecked(bytes(4))
        retired = leader.command(order(RetireExtents, rig, OFFSETS[:2]))
        assert retired == ExtentsConfirmed(EPOCH, bytes(2))
        stale = bytes((Outcome.STALE, Outcome.STALE, 0, 0))
        assert client.call(question(CheckRecords, rig, pages)) == RecordsChecked(stale)
        assert read(client, pages)[0] == stale
    states = [record.state for record in pages.records(rig.segment) if record]
    assert states == [RecordState.REMOVED] * 2 + [RecordState.SEALED] * 2


def test_a_held_extent_is_busy_and_counted_until_the_reader_is_gone(
    rig: Rig, leader: Leader
) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client, rig.client() as other:
        client.ingest(pages)
        fd, another = shared(client), shared(other)
        start = GEOMETRY.payload_base + PAGE
        wanted = FLOCK.pack(fcntl.F_RDLCK, 0, start, PAGE, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        # A second session's unlock frees nothing of the first: they share no description.
        fcntl.fcntl(another, fcntl.F_OFD_SETLK, wanted)
        fcntl.fcntl(another, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, 0, start, PAGE, 0))
        os.close(another)
        busy = bytes((0, Outcome.BUSY, 0, 0))
        assert leader.command(order(FreeExtents, rig)) == ExtentsConfirmed(EPOCH, busy)
        while leader.beats.get(timeout=20).held_extents != 1:
            pass
        assert pages.stored(rig.segment)[1] == pages.payloads[1]  # the reader's bytes stay
        new = Pages((PAGE,), first_key=60)
        assert client.ingest(new, counter=6) == Ingested(bytes((Outcome.BUSY,)))
        os.close(fd)
        assert client.call(new.ingest(rig.segment, counter=7)) == Ingested(bytes(1))


def test_a_flipped_byte_is_found_by_a_check(rig: Rig, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        client.ingest(pages)
    rig.segment.payload[PAGE + 9] ^= 4
    answer = leader.command(order(CheckExtents, rig, (*OFFSETS, 3 * PAGE)))
    want = bytes((0, Outcome.CHECKSUM, 0, 0, Outcome.STALE))
    assert answer == ExtentsConfirmed(EPOCH, want)


# --- strangers ------------------------------------------------------------------------------


def test_random_bytes_end_only_their_own_connection(rig: Rig) -> None:
    host, _, port = rig.tcp.rpartition(":")
    for noise in (b"\0" * 64, os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
            while stranger.recv(4096):  # the challenge, then the end
                pass
    with rig.client(rig.tcp) as client:
        assert client.reply(client.stream(Pages(OFFSETS))) == OK


def test_a_wrong_secret_or_cluster_is_refused(folder: Path) -> None:
    secret = b"a secret of some length"
    leader = Leader(secret=secret)
    try:
        with running(folder, leader, secret=secret) as rig:
            for identity in (
                Identity(Role.ENGINE, secret=b"another secret entirely"),
                Identity(Role.ENGINE),
                Identity(Role.ENGINE, secret=secret, cluster="elsewhere"),
            ):
                with pytest.raises(AccessDenied):
                    dial(rig.tcp, identity, soon())
            with rig.client(rig.tcp) as client:
                assert client.reply(client.stream(Pages(OFFSETS))) == OK
    finally:
        leader.stop()


# --- leaders and lives ----------------------------------------------------------------------


def test_a_restart_offers_its_pages_under_a_new_life(folder: Path, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    with running(folder, leader) as rig, rig.client() as client:
        assert client.ingest(pages) == OK
        was = rig.segment.incarnation
    leader.wants_rows = True
    with running(folder, leader) as rig:
        assert rig.segment.incarnation == was + 1
        offer = leader.expect(OfferInventory)
        while offer.incarnation == was:
            offer = leader.expect(OfferInventory)
        assert [chunk.chunk_start for chunk in offer.chunks] == [0, CHUNK]
        rows = [leader.expect(InventoryRows) for _ in offer.chunks]
        assert sorted(len(each.rows) for each in rows) == [192, 3 * 192]
        with rig.client(rig.tcp) as client:
            assert read(client, pages) == (bytes(4), pages.source, bytes(4))
            stale = msgspec.structs.replace(question(CheckRecords, rig, pages), incarnation=was)
            assert client.call(stale) == RecordsChecked(bytes((Outcome.STALE,)) * 4)


def test_a_new_leader_is_found_and_told_what_the_old_one_did_not_hear(
    folder: Path, leader: Leader
) -> None:
    pages = Pages(OFFSETS)
    with running(folder, leader) as rig, rig.client() as client:
        leader.on_sealed = lambda _: None
        client.attach(1, pages.source)
        request = client.send(pages.ingest(rig.segment))
        report = leader.expect(Sealed)
        leader.stop()
        assert client.reply(request) == Ingested(bytes((Outcome.TRANSPORT,)) * 4)
        successor = Leader(EPOCH + 1, leader.address)
        try:
            successor.await_served()
            assert successor.expect(Sealed) == report
            late = client.call(pages.ingest(rig.segment))
            assert late == Ingested(bytes((Outcome.FENCED,)) * 4)  # I10: a plan of the old epoch
        finally:
            successor.stop()


def test_a_silent_leader_fences_the_worker_but_not_its_readers(folder: Path) -> None:
    leader, clock = Leader(), ManualClock()
    leader.answers_beats = False
    pages = Pages(OFFSETS)
    try:
        with running(folder, leader, clock) as rig, rig.client() as client:
            assert client.ingest(pages) == OK
            clock.advance(leader.lost_after_s / 2)
            late = client.call(Pages((8 * PAGE,), first_key=50).ingest(rig.segment))
            assert late == Ingested(bytes((Outcome.FENCED,)))
            assert read(client, pages) == (bytes(4), pages.source, bytes(4))
    finally:
        leader.stop()


def test_heartbeats_go_on_while_data_flows(rig: Rig, leader: Leader) -> None:
    with rig.client(rig.tcp) as client:
        client.stream(Pages(OFFSETS), upto=100)  # a pull that hangs
        while leader.beats.get(timeout=20).pulls_in_flight != 1:
            pass
        leader.beats.get(timeout=20)


def test_a_worker_that_is_refused_at_first_says_so(folder: Path) -> None:
    leader = Leader(secret=b"a secret of some length")
    rig = Rig(folder, leader)
    try:
        assert isinstance(rig.refusals.get(timeout=20), AccessDenied)
    finally:
        rig.stop()
        leader.stop()


def test_stopping_ends_clients_that_do_nothing_and_pulls_that_hang(
    folder: Path, leader: Leader
) -> None:
    rig = Rig(folder, leader)
    leader.await_served()
    host, _, port = rig.tcp.rpartition(":")
    with (
        rig.client() as idle,
        rig.client(rig.tcp) as hanging,
        socket.create_connection((host, int(port))) as silent,
    ):
        hanging.stream(Pages(OFFSETS), upto=100)
        while not rig.state.pulls.running:
            pass
        rig.stop()
        for client in (idle, hanging):
            with pytest.raises(Unavailable):
                client.link.receive(soon())
        while silent.recv(4096):
            pass
    assert not os.path.exists(folder / "w.sock")


def test_the_worker_registers_as_itself(folder: Path, leader: Leader) -> None:
    with running(folder, leader) as rig:
        said = leader.expect(RegisterWorker)
        assert (said.worker, said.host) == ("w", "host")
        assert said.segments[0].incarnation == rig.segment.incarnation
        assert said.segments[0].geometry == GEOMETRY
