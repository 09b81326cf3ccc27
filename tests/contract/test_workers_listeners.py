"""Threads that let clients in and serve them: what ends one of them is heard, or ends no more."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Unavailable
from kvstore.wire.messages.transfers import ShareSegments
from tests.contract.scripted_leader import PATIENCE_S
from tests.contract.worker_rig import pool

if TYPE_CHECKING:
    from tests.contract.worker_rig import Rig


class Bug(Exception):
    """What nobody expects."""


def buggy(*_: object) -> None:
    raise Bug


def heard(rig: Rig) -> BaseException:
    """What would have ended the process."""
    found = rig.bugs.get(timeout=PATIENCE_S)
    rig.bugs = SimpleQueue()
    return found


@pytest.mark.parametrize("place", ["_greet", "_begin"])
def test_a_bug_that_would_keep_clients_out_is_heard(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:

    def broken(sock: socket.socket) -> None:
        sock.close()
        raise Bug

    with pool() as rig:
        monkeypatch.setattr(rig.listeners, place, broken)
        host, _, port = rig.tcp.rpartition(":")
        with socket.create_connection((host, int(port))):
            assert isinstance(heard(rig), Bug)
        monkeypatch.undo()


def test_a_bug_in_a_clients_request_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what this client has begun would wait for ever."""
    with pool() as rig, rig.client() as client:
        monkeypatch.setattr("workers.data_session.shared", buggy)
        client.send(ShareSegments())
        assert isinstance(heard(rig), Bug)


def test_what_the_system_refuses_to_a_client_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with pool() as rig:
        with rig.client() as client, monkeypatch.context() as patched:
            patched.setattr("workers.data_session.shared", refused)
            with pytest.raises(Unavailable):
                client.call(ShareSegments())
        with rig.client() as client:
            client.send(ShareSegments())
    assert "the system refused: [Errno 24] Too many open files" in caplog.text


def test_without_a_thread_for_it_a_client_is_turned_away_and_the_next_is_let_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "worker-data":
            raise RuntimeError("can't start new thread")
        start(self)

    with pool() as rig:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            with pytest.raises(Unavailable), rig.client():
                pass
        with rig.client() as client:
            client.send(ShareSegments())
    assert "a connection was not served: can't start new thread" in caplog.text
