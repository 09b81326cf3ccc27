"""A forked child makes a session of its own and leaves its parent's connection alone."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Unavailable
from kvstore.rpc.connection import Connection
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.link import MasterLink
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import GetStatus, Probe, Probed
from tests.contract.rpc_server import PATIENCE_S, RunningServer

if TYPE_CHECKING:
    from collections.abc import Callable

BLUE = ListenerIdentity("blue", epoch=3)
ONE = Probed(b"\1")


def in_child(body: Callable[[], bool]) -> bool:
    """Fork, run `body` in the child, and return what it says; False when it raises."""
    with warnings.catch_warnings():
        # Newer Pythons warn of forking beside threads, which is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def engine(name: str) -> Identity:
    return Identity(Role.ENGINE, name=name)


@pytest.fixture
def server() -> RunningServer:
    return RunningServer(BLUE)


def test_a_child_has_a_session_of_its_own(server: RunningServer) -> None:
    with server, closing(MasterLink([server.address], engine("engine"))) as link:
        probe = Probe(b"", bytes(32))
        assert link.call(probe, PATIENCE_S) == ONE
        assert server.opened.get(timeout=PATIENCE_S) == "engine"

        def child() -> bool:
            fine = link.call(probe, PATIENCE_S) == ONE and link.call(probe, PATIENCE_S) == ONE
            link.close()
            return fine

        assert in_child(child)
        assert server.opened.get(timeout=PATIENCE_S) == "engine"
        assert server.closed.get(timeout=PATIENCE_S) == "engine"
        # The parent's connection is the first one still.
        assert link.call(probe, PATIENCE_S) == ONE
        assert server.opened.empty()
        assert server.closed.empty()
        parent, forked = (hello.session for hello in server.hellos)
        assert parent == link.identity.session != forked


def test_a_child_may_close_the_link_without_ending_the_parents(server: RunningServer) -> None:
    with server, closing(MasterLink([server.address], engine("engine"))) as link:
        probe = Probe(b"", bytes(32))
        assert link.call(probe, PATIENCE_S) == ONE

        def child() -> bool:
            link.close()
            return True

        assert in_child(child)
        assert link.call(probe, PATIENCE_S) == ONE
        assert len(server.hellos) == 1


def test_a_fork_beside_calls_in_flight_does_not_hang_the_child(server: RunningServer) -> None:
    with server, closing(MasterLink([server.address], engine("engine"))) as link:
        probe = Probe(b"", bytes(32))
        answers: list[object] = []
        threads = [
            threading.Thread(target=lambda: answers.append(link.call(GetStatus(), PATIENCE_S)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        held = [server.held.get(timeout=PATIENCE_S) for _ in threads]
        assert in_child(lambda: link.call(probe, PATIENCE_S) == ONE)
        for each in held:
            server.held.put(each)
        server.release(3, Done())
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == [Done()] * 3


def test_a_fork_while_another_thread_dials_does_not_hang_the_child(server: RunningServer) -> None:
    dialling, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def dial(address: str, identity: Identity, timeout_s: float) -> Connection:
        if os.getpid() == parent:
            dialling.set()
            assert go_on.wait(PATIENCE_S)
        return Connection.open(address, identity, timeout_s)

    with server, closing(MasterLink([server.address], engine("engine"), dial=dial)) as link:
        thread = threading.Thread(target=link.call, args=(Probe(b"", b""), PATIENCE_S))
        thread.start()
        assert dialling.wait(PATIENCE_S)
        assert in_child(lambda: link.call(Probe(b"", bytes(32)), PATIENCE_S) == ONE)
        go_on.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_child_keeps_no_copy_of_sockets_or_of_descriptors_that_came_over_them() -> None:
    one, other = socket.socketpair()
    with closing(FrameSocket(one)) as ours, closing(FrameSocket(other)) as theirs:
        with open(os.devnull) as null:
            theirs.send(FrameKind.REQUEST, 1, Done(), [null.fileno()] * 3)
        ours.receive()
        count = len(os.listdir("/proc/self/fd"))

        def child() -> bool:
            # Both sockets and the three descriptors.
            return len(os.listdir("/proc/self/fd")) == count - 5 and ours.fileno() == -1

        assert in_child(child)
        theirs.send(FrameKind.REQUEST, 2, Done())
        assert ours.receive().request_id == 2
        for fd in ours.take_fds(3):
            os.close(fd)


def test_a_bare_connection_is_refused_in_the_child(server: RunningServer) -> None:
    with server, closing(Connection.open(server.address, engine("e"), PATIENCE_S)) as opened:

        def child() -> bool:
            try:
                opened.call(Probe(b"", b""), PATIENCE_S)
            except Unavailable:
                return not opened.is_open
            return False

        assert in_child(child)
        assert opened.call(Probe(b"", bytes(32)), PATIENCE_S) == ONE
