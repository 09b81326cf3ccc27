"""What the kernel is told of connections, held against a host that vanishes."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

import pytest

from kvstore.rpc.address import tune

PATIENCE_S = 10.0
SO_ATTACH_FILTER = 26
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: return 0 bytes


def vanish(sock: socket.socket) -> None:
    """Have the kernel drop whatever arrives for this socket, acknowledgements included."""
    program = ctypes.create_string_buffer(DROP_ALL)
    described = struct.pack("HL", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


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
