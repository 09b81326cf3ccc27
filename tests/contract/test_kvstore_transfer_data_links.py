"""One request and its reply on a connection that carries nothing else."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BufferClosed, MalformedMessage
from kvstore.rpc.failure import failure_of
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.transfer.data_links import call
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.transfers import DetachBuffer
from tests.contract.rpc_server import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

Ends = tuple[FrameSocket, FrameSocket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with closing(FrameSocket(one)) as ours, closing(FrameSocket(other)) as theirs:
        yield ours, theirs


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_a_reply_is_returned_and_a_failure_raised(ends: Ends) -> None:
    ours, theirs = ends
    theirs.send(FrameKind.REPLY, 0, Done())
    assert call(ours, DetachBuffer(7), soon()) == Done()
    asked = theirs.receive(soon())
    assert (asked.kind, asked.message) == (FrameKind.REQUEST, DetachBuffer(7))
    theirs.send(FrameKind.REPLY, asked.request_id, failure_of(BufferClosed("gone")))
    with pytest.raises(BufferClosed, match="gone"):
        call(ours, DetachBuffer(7), soon())


@pytest.mark.parametrize(("kind", "number"), [(FrameKind.REQUEST, 0), (FrameKind.REPLY, 1)])
def test_what_answers_another_request_is_malformed(
    ends: Ends, kind: FrameKind, number: int
) -> None:
    ours, theirs = ends
    theirs.send(kind, number, Done())
    with pytest.raises(MalformedMessage, match="Done that nobody asked for"):
        call(ours, DetachBuffer(7), soon())
