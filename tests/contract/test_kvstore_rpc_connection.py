"""The blocking connection against a real server: pipelining, deadlines, errors, endings."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import (
    BadValue,
    DeadlineExceeded,
    MalformedMessage,
    OutOfSpace,
    Unavailable,
)
from kvstore.rpc.connection import Connection
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.link import MasterLink
from kvstore.wire.framing import PROTOCOL_VERSION, Frame, FrameKind
from kvstore.wire.messages.hello import Done, Welcome
from kvstore.wire.messages.namespaces import NamespaceOpened
from kvstore.wire.messages.reads import GetStatus, Probe, Probed, Remove
from tests.contract.rpc_server import LOOPS, PATIENCE_S, RunningServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.wire.messages.base import Message

ENGINE = Identity(Role.ENGINE, name="engine")
BLUE = ListenerIdentity("blue", epoch=3)


@pytest.fixture(params=["tcp", "unix"])
def connection(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Connection, RunningServer]]:
    address = "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/s"
    with (
        RunningServer(BLUE, address) as server,
        closing(Connection.open(server.address, ENGINE, PATIENCE_S)) as opened,
    ):
        yield opened, server


@contextmanager
def scripted() -> Iterator[tuple[Connection, FrameSocket]]:
    """A connection and the bare other end of it."""
    ours, theirs = socket.socketpair()
    with (
        closing(FrameSocket(theirs, PROTOCOL_VERSION)) as peer,
        closing(
            Connection(FrameSocket(ours, PROTOCOL_VERSION), Welcome(1, 0, b"", "", b""))
        ) as opened,
    ):
        yield opened, peer


def test_calls_are_answered(connection: tuple[Connection, RunningServer]) -> None:
    opened, _ = connection
    assert opened.epoch == 3
    for count in (0, 1, 256, 4096):
        assert opened.call(Probe(b"", bytes(32 * count)), PATIENCE_S) == Probed(b"\1" * count)
    assert opened.in_flight == 0
    assert opened.is_open


def test_the_largest_messages_pass(connection: tuple[Connection, RunningServer]) -> None:
    opened, _ = connection
    keys = bytes((limits.FRAME_BYTES_MAX - 4096) // 32 * 32)
    answer = opened.call(Probe(b"", keys), PATIENCE_S)
    assert answer == Probed(b"\1" * (len(keys) // 32))
    with pytest.raises(BadValue, match="Probe"):
        opened.call(Probe(b"", bytes(limits.FRAME_BYTES_MAX)), PATIENCE_S)
    assert opened.is_open


def test_failures_are_raised_as_the_errors_they_name(
    connection: tuple[Connection, RunningServer],
) -> None:
    opened, _ = connection
    with pytest.raises(OutOfSpace, match="nothing can be removed now") as caught:
        opened.call(Remove(b"", b"", 1.0), PATIENCE_S)
    assert caught.value.retry_after_s == 0.25
    assert opened.is_open


def test_replies_find_their_requests_in_any_order(
    connection: tuple[Connection, RunningServer],
) -> None:
    opened, server = connection
    ids = [opened.start(GetStatus()) for _ in range(50)]
    quick = opened.call(Probe(b"", bytes(32)), PATIENCE_S)
    assert quick == Probed(b"\1")
    server.release(50)
    for request_id in sorted(ids, key=lambda each: each % 7):
        assert opened.finish(request_id, PATIENCE_S) == NamespaceOpened(b"", request_id)
    assert opened.in_flight == 0


def test_threads_share_a_connection(connection: tuple[Connection, RunningServer]) -> None:
    opened, server = connection
    with ThreadPoolExecutor(12) as pool:
        held = [pool.submit(opened.call, GetStatus(), PATIENCE_S) for _ in range(4)]
        work = [
            pool.submit(opened.call, Probe(b"", bytes(32 * (n % 9))), PATIENCE_S)
            for n in range(400)
        ]
        for n, each in enumerate(work):
            assert each.result() == Probed(b"\1" * (n % 9))
        server.release(4)
        answers = [each.result() for each in held]
    assert all(isinstance(answer, NamespaceOpened) for answer in answers)
    assert opened.in_flight == 0


def test_a_late_reply_is_dropped_and_later_calls_go_on(
    connection: tuple[Connection, RunningServer],
) -> None:
    opened, server = connection
    with pytest.raises(DeadlineExceeded):
        opened.call(GetStatus(), 0.01)
    assert opened.is_open
    server.release(1)
    assert opened.call(Probe(b"", bytes(32)), PATIENCE_S) == Probed(b"\1")
    assert opened.in_flight == 0


def test_a_call_without_time_left_ends_at_once(
    connection: tuple[Connection, RunningServer],
) -> None:
    opened, _ = connection
    for timeout_s in (0.0, -0.5, -1.0):
        with pytest.raises(DeadlineExceeded):
            opened.call(GetStatus(), timeout_s)
    assert opened.call(Probe(b"", b""), PATIENCE_S) == Probed(b"")


def test_a_reader_whose_deadline_passes_hands_the_reading_on() -> None:
    with scripted() as (opened, peer), ThreadPoolExecutor(2) as pool:
        impatient = pool.submit(opened.call, GetStatus(), 0.3)
        assert peer.receive().request_id == 1
        patient = pool.submit(opened.call, GetStatus(), PATIENCE_S)
        assert peer.receive().request_id == 2
        with pytest.raises(DeadlineExceeded):
            impatient.result()
        peer.send(FrameKind.REPLY, 2, Done())
        assert patient.result() == Done()


def test_a_follower_whose_deadline_passes_leaves_the_reader_alone() -> None:
    with scripted() as (opened, peer), ThreadPoolExecutor(2) as pool:
        reader = pool.submit(opened.call, GetStatus(), PATIENCE_S)
        assert peer.receive().request_id == 1
        with pytest.raises(DeadlineExceeded):
            opened.call(GetStatus(), 0.01)
        assert peer.receive().request_id == 2
        peer.send(FrameKind.REPLY, 2, Done())
        peer.send(FrameKind.REPLY, 1, Probed(b"r"))
        assert reader.result() == Probed(b"r")
        assert opened.in_flight == 0


def test_too_many_requests_in_flight_are_refused(
    connection: tuple[Connection, RunningServer],
) -> None:
    opened, server = connection
    ids = [opened.start(GetStatus()) for _ in range(limits.REQUESTS_IN_FLIGHT_MAX)]
    with pytest.raises(OutOfSpace, match="1024 requests"):
        opened.start(GetStatus())
    server.release(len(ids), Done())
    assert {opened.finish(request_id, PATIENCE_S) for request_id in ids} == {Done()}
    assert opened.call(Probe(b"", b""), PATIENCE_S) == Probed(b"")


def test_a_peer_that_goes_away_fails_all_calls_with_the_reason(
    connection: tuple[Connection, RunningServer],
) -> None:
    opened, server = connection
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(opened.call, GetStatus(), PATIENCE_S) for _ in range(3)]
        for _ in waiting:
            server.held.get(timeout=PATIENCE_S)
        with pytest.raises(Unavailable, match="closed the connection"):
            opened.call(Done(), PATIENCE_S)
        for each in waiting:
            with pytest.raises(Unavailable, match="closed the connection"):
                each.result()
    assert not opened.is_open
    with pytest.raises(Unavailable, match="closed the connection"):
        opened.call(Probe(b"", b""), PATIENCE_S)
    assert server.closed.get(timeout=PATIENCE_S) == "engine"


def test_closing_wakes_whoever_waits() -> None:
    with scripted() as (opened, peer), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(opened.call, GetStatus(), PATIENCE_S) for _ in range(2)]
        for _ in waiting:
            peer.receive()
        opened.close()
        for each in waiting:
            with pytest.raises(Unavailable, match="this side closed"):
                each.result()
        opened.close()
        with pytest.raises(Unavailable, match="this side closed"):
            opened.start(GetStatus())


def test_a_closed_connection_holds_no_descriptor() -> None:
    with scripted() as (opened, peer), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opened.call, GetStatus(), PATIENCE_S)
        peer.receive()
        opened.close()
        with pytest.raises(Unavailable):
            waiting.result()
        with pytest.raises(Unavailable, match="closed the connection"):
            peer.receive(time.monotonic() + PATIENCE_S)


def send_garbage(peer: FrameSocket) -> None:
    peer.send_packed(b"\xff" * 64)


def send_request(peer: FrameSocket) -> None:
    peer.send(FrameKind.REQUEST, 1, Done())


def send_half_a_frame(peer: FrameSocket) -> None:
    peer.send_packed(b"\x20\x00\x00\x00\x01\x00\x02\x00")
    peer.close()


@pytest.mark.parametrize("misbehave", [send_garbage, send_request, send_half_a_frame])
def test_a_peer_that_breaks_the_protocol_is_left(misbehave: object) -> None:
    assert callable(misbehave)
    with scripted() as (opened, peer):
        first, second = opened.start(GetStatus()), opened.start(GetStatus())
        misbehave(peer)
        for request_id in (first, second):
            with pytest.raises((MalformedMessage, Unavailable)):
                opened.finish(request_id, PATIENCE_S)
        assert not opened.is_open


def test_a_peer_that_does_not_read_ends_the_call_at_its_deadline() -> None:
    with scripted() as (opened, _):
        large = Probe(b"", bytes(limits.FRAME_BYTES_MAX - 4096))
        with pytest.raises(DeadlineExceeded, match="does not take"):
            opened.call(large, 0.05)
        # A part of the frame is out, so nothing else can be sent.
        assert not opened.is_open


def test_an_interrupted_reader_breaks_the_connection_but_not_the_others() -> None:
    class Interrupted(BaseException):
        pass

    class InterruptibleSocket(FrameSocket):
        def receive(self, deadline_s: float | None = None) -> Frame:
            frame = super().receive(deadline_s)
            if isinstance(frame.message, Done):
                raise Interrupted
            return frame

    ours, theirs = socket.socketpair()
    with (
        closing(FrameSocket(theirs, PROTOCOL_VERSION)) as peer,
        closing(
            Connection(InterruptibleSocket(ours, PROTOCOL_VERSION), Welcome(1, 0, b"", "", b""))
        ) as opened,
        ThreadPoolExecutor(2) as pool,
    ):
        reader = pool.submit(opened.call, GetStatus(), PATIENCE_S)
        peer.receive()
        follower = pool.submit(opened.call, GetStatus(), PATIENCE_S)
        peer.receive()
        peer.send(FrameKind.REPLY, 1, Done())
        with pytest.raises(Interrupted):
            reader.result()
        with pytest.raises(Unavailable, match="Interrupted"):
            follower.result()
        assert not opened.is_open


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_many_connections_of_many_threads(loop: str) -> None:
    calls = 40

    def client(number: int) -> int:
        identity = Identity(Role.ENGINE, name=str(number))
        with closing(Connection.open(server.address, identity, PATIENCE_S)) as opened:
            for n in range(calls):
                answer: Message = opened.call(Probe(b"", bytes(32 * n)), PATIENCE_S)
                assert answer == Probed(b"\1" * n)
        return calls

    with RunningServer(BLUE, loop=loop) as server, ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(client, range(24))) == 24 * calls
        gone = {server.closed.get(timeout=PATIENCE_S) for _ in range(24)}
    assert gone == {str(number) for number in range(24)}


@pytest.mark.parametrize("address", ["unix:{}/nobody", "127.0.0.1:1"])
def test_that_nobody_listens_is_told_also_by_a_try_that_comes_too_late(
    tmp_path: Path, address: str
) -> None:
    """Else the last try of many would hide what came of all others."""
    with pytest.raises(Unavailable, match="cannot reach"):
        Connection.open(address.format(tmp_path), ENGINE, -1.0)


def test_a_link_survives_the_restart_of_its_master(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/master"
    probe, one = Probe(b"", bytes(32)), Probed(b"\1")
    with closing(MasterLink([address], ENGINE)) as link:
        with RunningServer(BLUE, address):
            assert link.call(probe, PATIENCE_S) == one
            assert link.epoch == 3
        with RunningServer(replace(BLUE, epoch=4), address) as server:
            assert link.call(probe, PATIENCE_S) == one
            assert link.epoch == 4
            assert server.hellos[0].session == link.identity.session
        with pytest.raises(DeadlineExceeded, match="cannot reach"):
            link.call(probe, 0.1)
        # A master that was restored from an older state is not believed.
        with RunningServer(BLUE, address), pytest.raises(DeadlineExceeded, match="epoch 3, but 4"):
            link.call(probe, 1.0)
