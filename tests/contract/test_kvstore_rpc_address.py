"""What the kernel is told of connections, held against a host that vanishes."""

from __future__ import annotations

import errno
import socket
import time

import pytest

from kvstore.rpc.address import is_cut_off, tune
from tests.vanishing import vanish

PATIENCE_S = 10.0


def test_a_host_that_vanishes_with_a_question_on_its_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.rpc.address.UNACKNOWLEDGED_MAX_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=PATIENCE_S) as ours,
        listener.accept()[0] as theirs,
    ):
        tune(ours)
        vanish(theirs)
        ours.sendall(b"question")
        with pytest.raises(TimeoutError) as ended:
            ours.recv(1)
        assert ended.value.errno == errno.ETIMEDOUT  # the kernel's verdict, not our patience


def test_who_confirms_nothing_is_cut_off_and_who_only_answers_nothing_is_not() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as busy,
        socket.create_connection(listener.getsockname()) as gone,
        listener.accept()[0],
        listener.accept()[0] as theirs,
    ):
        vanish(theirs)
        for each in (busy, gone):
            each.sendall(b"question")
        ends_s = time.monotonic() + PATIENCE_S
        while not is_cut_off(gone):
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        assert not is_cut_off(busy)
    assert not is_cut_off(gone)  # it is closed
    ours, other = socket.socketpair()
    with ours, other:
        ours.sendall(b"question")
        assert not is_cut_off(ours)
