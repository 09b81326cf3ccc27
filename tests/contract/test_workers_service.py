"""Puts over real sockets: when they are answered, and what their sources may do meanwhile."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import BadValue, Unavailable
from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import ExtentsConfirmed, FenceExtents
from kvstore.wire.messages.puts import Ingested, Sealed, SealedNoted
from kvstore.wire.messages.reads import GetStatus
from kvstore.wire.messages.transfers import AttachBuffer, DetachBuffer, FindEngine, ShareSegments
from tests.contract.worker_rig import OFFSETS, Rig, is_silent, order, pool, read, soon, streamed
from tests.unit.worker_scripts import EPOCH, PAGE
from tests.unit.worker_segments import Pages, sealed_memfd
from workers.stream_source import StreamSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.base import Message

OK = Ingested(bytes(4))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with pool() as made:
        yield made


def test_a_put_by_shared_memory_is_answered_after_the_leader_has_it(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    rig.leader.on_sealed = lambda _: None
    with rig.client() as client:
        client.attach(1, pages.source)
        request = client.send(pages.ingest(rig.segment))
        report = rig.leader.expect(Sealed)
        assert report.keys == b"".join(pages.keys)
        assert report.checksums == pages.checksums.tobytes()
        assert is_silent(client)
        rig.leader.answer(SealedNoted(bytes(4)))
        assert client.reply(request) == OK
    assert pages.stored(rig.segment) == pages.payloads


def test_a_put_by_stream(rig: Rig) -> None:
    pages = Pages(OFFSETS, size=PAGE - 7)
    with rig.client(rig.tcp) as client:
        assert client.reply(client.stream(pages)) == OK
        assert read(client, pages) == (bytes(4), pages.source, bytes(4))


def test_a_put_by_stream_of_pages_that_come_in_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamSource, "group_bytes", 1000)
    pages = Pages((0, 2 * PAGE), size=PAGE + 7)
    with rig.client(rig.tcp) as client:
        assert client.reply(client.stream(pages)) == Ingested(bytes(2))
        assert read(client, pages) == (bytes(2), pages.source, bytes(2))


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


def test_while_one_seal_is_on_its_way_the_next_pull_copies(rig: Rig) -> None:
    rig.leader.on_sealed = lambda _: None
    first, second = Pages((0,)), Pages((PAGE,), first_key=2)
    with rig.client(rig.tcp) as client:
        requests = client.two_streams(first, second)
        rig.leader.expect(Sealed)
        rig.leader.expect(Sealed)  # the second was copied although the first is not acknowledged
        assert is_silent(client)
        rig.leader.answer(SealedNoted(bytes(1)))
        rig.leader.answer(SealedNoted(bytes(1)))
        assert [client.reply(each) for each in requests] == [Ingested(bytes(1))] * 2


def test_bytes_that_differ_are_refused_and_the_rest_stored(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    pages.payloads[2] = bytes(PAGE)
    with rig.client(rig.tcp) as client:
        answer = client.reply(client.stream(pages))
    assert answer == Ingested(bytes((0, 0, Outcome.CHECKSUM, 0)))
    assert rig.leader.expect(Sealed).keys == b"".join(pages.keys[i] for i in (0, 1, 3))


def test_a_closed_plan_leaves_nothing_behind(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    rig.leader.on_sealed = lambda _: SealedNoted(bytes((Outcome.PLAN_CLOSED,)) * 4)
    with rig.client() as client:
        assert client.ingest(pages) == Ingested(bytes((Outcome.PLAN_CLOSED,)) * 4)
    assert pages.records(rig.segment) == [None] * 4


def test_a_leader_that_refuses_the_report_is_a_transport_failure(rig: Rig) -> None:
    rig.leader.on_sealed = lambda _: Failure("unavailable", "its inventory is first")
    with rig.client() as client:
        assert client.ingest(Pages(OFFSETS)) == Ingested(bytes((Outcome.TRANSPORT,)) * 4)
    assert len(rig.state.pulls.unreported) == 1


def test_a_repeated_put_gets_the_first_ones_result(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        assert client.ingest(pages) == OK
        assert client.call(pages.ingest(rig.segment)) == OK
    with rig.client(rig.tcp) as other:  # by another way, and the bytes are read past
        assert other.reply(other.stream(pages)) == OK
        assert read(other, pages)[0] == bytes(4)
    for _ in range(3):
        rig.leader.expect(Sealed)


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


def test_a_fence_ends_a_silent_writers_pull_before_it_is_confirmed(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client(rig.tcp) as client:
        client.stream(pages, upto=PAGE + 100)  # and then nothing
        while not rig.state.pulls.running:
            pass
        answer = rig.leader.command(order(FenceExtents, rig))
        assert answer == ExtentsConfirmed(EPOCH, bytes(4))
        assert pages.records(rig.segment) == [None] * 4
        with pytest.raises(Unavailable):
            client.link.receive(soon())
    with rig.client() as client:
        late = client.ingest(pages)
        assert late == Ingested(bytes((Outcome.FENCED,)) * 4)
        assert client.call(pages.ingest(rig.segment, counter=6)) == OK


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
