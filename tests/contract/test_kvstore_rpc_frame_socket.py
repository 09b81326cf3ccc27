"""Frames, raw bytes and descriptors over real socket pairs, whole or refused."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import DeadlineExceeded, MalformedMessage, Unavailable
from kvstore.rpc.address import LOCAL_SEND_BYTES, bind, bound_address, tune
from kvstore.rpc.dialling import accept, dial
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.wire.framing import FrameKind, pack_frame
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Probe, Probed
from kvstore.wire.messages.transfers import AttachBuffer
from tests.contract.rpc_server import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Ends = tuple[FrameSocket, FrameSocket]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one, other = tcp_pair() if request.param == "tcp" else socket.socketpair()
    with closing(FrameSocket(one)) as ours, closing(FrameSocket(other)) as theirs:
        yield ours, theirs


@pytest.fixture
def unix_ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with closing(FrameSocket(one)) as ours, closing(FrameSocket(other)) as theirs:
        yield ours, theirs


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frames_arrive_in_order(ends: Ends) -> None:
    ours, theirs = ends
    for number in range(200):
        ours.send(FrameKind.REQUEST, number, Probe(b"", bytes(number)))
    for number in range(200):
        frame = theirs.receive(soon())
        assert (frame.request_id, frame.message) == (number, Probe(b"", bytes(number)))


@pytest.mark.parametrize("page_bytes", [1, 1000, 4096, 65_536, 1 << 20])
def test_raw_bytes_follow_their_frame_whole(ends: Ends, page_bytes: int) -> None:
    ours, theirs = ends
    count = max(2, min(1500, (4 << 20) // page_bytes))
    source = bytearray(os.urandom(count * page_bytes))
    pages = [memoryview(source)[i * page_bytes :][:page_bytes] for i in range(count)]
    target = bytearray(len(source))
    places = [memoryview(target)[i * page_bytes :][:page_bytes] for i in range(count)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ours.send, FrameKind.REPLY, 1, Done(), raw=pages, deadline_s=soon())
        assert theirs.receive(soon()).message == Done()
        theirs.receive_raw_into(places, soon())
        sending.result()
    ours.send(FrameKind.REPLY, 2, Probed(b"after"))
    assert theirs.receive(soon()).message == Probed(b"after")
    assert source == target


def test_buffers_of_any_item_type_travel_as_bytes(ends: Ends) -> None:
    ours, theirs = ends
    numbers = array.array("Q", range(100))
    ours.send(FrameKind.REPLY, 1, Done(), raw=[memoryview(numbers), b"", bytearray(b"end")])
    theirs.receive(soon())
    target = array.array("Q", bytes(800))
    rest = bytearray(3)
    theirs.receive_raw_into([memoryview(target), bytearray(), rest], soon())
    assert target == numbers
    assert rest == b"end"


def test_a_deadline_in_mid_frame_loses_nothing(ends: Ends) -> None:
    ours, theirs = ends
    frame = pack_frame(FrameKind.REPLY, 7, Probed(bytes(1000)), version=0)
    ours.send_packed(frame[:500])
    with pytest.raises(DeadlineExceeded):
        theirs.receive(time.monotonic() + 0.01)
    ours.send_packed(frame[500:])
    assert theirs.receive(soon()).request_id == 7


def test_a_deadline_that_has_passed_still_takes_what_is_there(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(FrameKind.REPLY, 1, Done())
    ours.send(FrameKind.REPLY, 2, Done())
    # The bytes are in the kernel once a later wait has seen them.
    assert theirs.receive(soon()).request_id == 1
    assert theirs.receive(time.monotonic() - 1).request_id == 2
    with pytest.raises(DeadlineExceeded):
        theirs.receive(time.monotonic() - 1)


def test_spinning_does_not_change_what_is_received(ends: Ends) -> None:
    ours, theirs = ends
    theirs.spin_s = 0.001
    ours.send(FrameKind.REPLY, 1, Done())
    assert theirs.receive(soon()).message == Done()
    with pytest.raises(DeadlineExceeded):
        theirs.receive(time.monotonic() + 0.005)
    timer = threading.Timer(0.01, ours.send, (FrameKind.REPLY, 2, Done()))
    timer.start()
    assert theirs.receive(soon()).request_id == 2
    timer.join()


def test_a_peer_that_takes_nothing_ends_the_send(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = ends
    much = bytes(64 * limits.MIB)
    with pytest.raises(DeadlineExceeded, match="does not take"):
        ours.send(FrameKind.REPLY, 1, Done(), raw=[much], deadline_s=time.monotonic() + 0.05)
    monkeypatch.setattr(limits, "SEND_STALL_MAX_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="does not take"):
        ours.send(FrameKind.REPLY, 1, Done(), raw=[much])


def test_a_peer_that_stops_in_mid_transfer_ends_it(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(FrameKind.REPLY, 1, Done(), raw=[bytes(10)])
    theirs.receive(soon())
    with pytest.raises(DeadlineExceeded):
        theirs.receive_raw_into([bytearray(20)], stall_s=0.05)


def test_a_peer_that_goes_away_in_mid_transfer(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(FrameKind.REPLY, 1, Done(), raw=[bytes(10)])
    ours.close()
    theirs.receive(soon())
    with pytest.raises(Unavailable, match="in mid-transfer"):
        theirs.receive_raw_into([bytearray(20)], soon())
    # More than any socket buffer takes.
    with pytest.raises(Unavailable):
        theirs.send(FrameKind.REPLY, 1, Done(), raw=[bytes(64 * limits.MIB)], deadline_s=soon())


def test_the_end_of_the_stream_is_unavailable(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(FrameKind.REPLY, 1, Done())
    ours.close()
    assert theirs.receive(soon()).message == Done()
    with pytest.raises(Unavailable, match="closed the connection"):
        theirs.receive(soon())
    for use in (ours.receive, lambda: ours.send(FrameKind.REPLY, 1, Done())):
        with pytest.raises(Unavailable, match="connection lost"):
            use()
    assert ours.fileno() == -1


def test_a_shutdown_wakes_who_waits(ends: Ends) -> None:
    ours, _ = ends
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.receive)
        ours.shutdown()
        with pytest.raises(Unavailable):
            waiting.result(PATIENCE_S)


def test_strangers_are_malformed(ends: Ends) -> None:
    ours, theirs = ends
    ours.send_packed(b"SSH-2.0-OpenSSH_9.2\r\n")
    with pytest.raises(MalformedMessage):
        theirs.receive(soon())


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def test_descriptors_travel_with_their_frame_in_order(unix_ends: Ends) -> None:
    ours, theirs = unix_ends
    before = open_descriptors()
    sent = [memfd(b"%d" % number) for number in range(6)]
    ours.send(FrameKind.REQUEST, 1, AttachBuffer(1, 4), sent[:1])
    ours.send(FrameKind.REQUEST, 2, Done())
    ours.send(FrameKind.REQUEST, 3, AttachBuffer(2, 4), sent[1:], raw=[b"raw"])
    for fd in sent:
        os.close(fd)
    got: list[int] = []
    for number, count in ((1, 1), (2, 0), (3, 5)):
        assert theirs.receive(soon()).request_id == number
        got += theirs.take_fds(count)
    raw = bytearray(3)
    theirs.receive_raw_into([raw], soon())
    assert raw == b"raw"
    assert [os.pread(fd, 9, 0) for fd in got] == [b"%d" % number for number in range(6)]
    assert not any(os.get_inheritable(fd) for fd in got)
    with pytest.raises(MalformedMessage, match="0 descriptors came, want 1"):
        theirs.take_fds(1)
    for fd in got:
        os.close(fd)
    assert open_descriptors() == before


def test_descriptors_nobody_took_are_closed_with_the_connection(unix_ends: Ends) -> None:
    ours, theirs = unix_ends
    fd = memfd(b"x")
    before = open_descriptors()
    ours.send(FrameKind.REQUEST, 1, AttachBuffer(1, 4), [fd] * 5)
    theirs.receive(soon())
    assert open_descriptors() == before + 5
    theirs.close()
    assert open_descriptors() == before - 1
    os.close(fd)


def test_a_flood_of_descriptors_ends_the_connection(unix_ends: Ends) -> None:
    ours, theirs = unix_ends
    fd = memfd(b"x")
    before = open_descriptors()
    for number in range(3):
        ours.send(FrameKind.REQUEST, number, Done(), [fd] * 120)
    for _ in range(limits.DESCRIPTORS_WAITING_MAX // 120):
        theirs.receive(soon())
    with pytest.raises(MalformedMessage, match="too many descriptors"):
        theirs.receive(soon())
    theirs.close()
    ours.close()
    assert open_descriptors() == before - 2
    os.close(fd)


def test_descriptors_for_one_who_takes_none_are_dropped(unix_ends: Ends) -> None:
    ours, theirs = unix_ends
    theirs.takes_fds = False
    fd = memfd(b"x")
    before = open_descriptors()
    ours.send(FrameKind.REQUEST, 1, AttachBuffer(1, 4), [fd] * 5)
    assert theirs.receive(soon()).message == AttachBuffer(1, 4)
    assert open_descriptors() == before
    with pytest.raises(MalformedMessage, match="0 descriptors came, want 1"):
        theirs.take_fds(1)
    os.close(fd)


def test_descriptors_over_tcp_are_our_bug() -> None:
    one, other = tcp_pair()
    with closing(FrameSocket(one)) as ours, other, pytest.raises(AssertionError):
        ours.send(FrameKind.REQUEST, 1, AttachBuffer(1, 4), [other.fileno()])


def test_what_is_under_way_within_a_host_fits_its_caches() -> None:
    one, other = tcp_pair()
    with one, other:
        tune(one)
        twice = 2 * LOCAL_SEND_BYTES  # the kernel counts its own bookkeeping too
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= twice


ENGINE = Identity(Role.ENGINE, name="engine")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_both_blocking_ends_greet_each_other(kind: str, tmp_path: Path) -> None:
    identity = Identity(Role.WORKER, "acme", "w", b"secret")
    listener = ListenerIdentity("blue", b"secret", epoch=9)
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s"
    with bind(address, None) as listening, ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(dial, bound_address(listening), identity, soon())
        accepted, hello = accept(listening.accept()[0], listener, soon())
        dialled, welcome = dialling.result(PATIENCE_S)
    with closing(dialled), closing(accepted):
        assert (hello.role, hello.tenant, hello.name) == ("worker", "acme", "w")
        assert (welcome.epoch, welcome.version) == (9, dialled.version)
        dialled.send(FrameKind.REQUEST, 1, Probe(b"", bytes(limits.HELLO_BYTES_MAX * 2)))
        assert accepted.receive(soon()).request_id == 1
        accepted.send(FrameKind.REPLY, 1, Done())
        assert dialled.receive(soon()).message == Done()


def test_a_refusal_is_the_same_on_both_sides() -> None:
    before = open_descriptors()
    with bind("127.0.0.1:0", None) as listening, ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(dial, bound_address(listening), ENGINE, soon())
        with pytest.raises(Exception, match="wrong cluster secret") as refused:
            accept(listening.accept()[0], ListenerIdentity("blue", b"secret"), soon())
        with pytest.raises(type(refused.value), match="wrong cluster secret"):
            dialling.result(PATIENCE_S)
    assert open_descriptors() == before


@pytest.mark.parametrize("said", [b"", b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n"])
def test_an_accepted_stranger_is_closed(said: bytes) -> None:
    one, other = tcp_pair()
    with one:
        one.sendall(said)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises((MalformedMessage, Unavailable)):
            accept(other, ListenerIdentity("blue"), soon())
        assert other.fileno() == -1


def test_a_silent_dialler_is_given_up() -> None:
    one, other = tcp_pair()
    with one, pytest.raises(DeadlineExceeded):
        accept(other, ListenerIdentity("blue"), time.monotonic() + 0.01)


def test_no_time_left_to_dial() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded, match="no greeting"):
            dial(f"127.0.0.1:{port}", ENGINE, time.monotonic() - 1)
