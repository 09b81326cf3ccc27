"""Opening a blocking connection: the dialler's and the listener's side of the greeting."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, MalformedMessage, Unavailable
from kvstore.rpc import handshake
from kvstore.rpc.address import UnixAddress, is_local, parse_address, tune
from kvstore.rpc.failure import failure_of
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.rpc.nearby import PATIENCE_S, connect_nearby, is_same_life
from kvstore.wire.framing import GREETING_VERSION, FrameKind
from kvstore.wire.messages.hello import Challenge, Hello, Welcome

if TYPE_CHECKING:
    from kvstore.rpc.identity import Identity, ListenerIdentity

CONNECT_S_MIN: Final = 0.001
"""Of a try that comes too late: who listens nowhere is worth knowing even then."""


def dial(address: str, identity: Identity, deadline_s: float) -> tuple[FrameSocket, Welcome]:
    """Connect to "host:port" or "unix:/path" and greet, by the monotonic moment `deadline_s`.

    A listener of this host that was greeted over TCP is met at its Unix socket where it has one.
    Raises Unavailable when nobody answers, DeadlineExceeded when the greeting takes too long
    (then it is probably no listener of ours), and what the handshake raises: AccessDenied,
    VersionMismatch, MalformedMessage.
    """
    patience_s = min(deadline_s, time.monotonic() + limits.HELLO_TIMEOUT_S)
    sock = _connect(address, patience_s)
    peer_name = _peer_name(sock)
    try:
        link, welcomed = _greet(sock, identity, patience_s)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{address}: no greeting; is it a kvharbor listener?") from error
    except Unavailable as error:
        raise Unavailable(f"{address}: {error}") from error
    except MalformedMessage as error:
        raise MalformedMessage(f"{address} is no kvharbor listener: {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(link.close)
        near = connect_nearby(peer_name, welcomed)
        again = None if near is None else _greet_again(near, identity, welcomed, deadline_s)
        if again is None:
            undo.pop_all()
    return again or (link, welcomed)


def accept(
    sock: socket.socket, listener: ListenerIdentity, deadline_s: float
) -> tuple[FrameSocket, Hello]:
    """Greet the dialler of an accepted socket, which is closed when this raises.

    For listeners with a thread a connection. The dialler learns why it was refused.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        local = is_local(sock)
        link = FrameSocket(sock)
        undo.callback(link.close)
        try:
            tune(sock)
        except OSError as error:
            raise Unavailable(f"connection lost: {error.strerror or error}") from error
        said = _answer(link, listener, deadline_s, local)
        undo.pop_all()
    return link, said


def _connect(address: str, deadline_s: float) -> socket.socket:
    where = parse_address(address)
    left_s = max(CONNECT_S_MIN, deadline_s - time.monotonic())
    try:
        if not isinstance(where, UnixAddress):
            sock = socket.create_connection((where.host, where.port), timeout=left_s)
            tune(sock)
            return sock
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(left_s)
            sock.connect(where.path)
            undo.pop_all()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{address}: no answer") from error
    except OSError as error:
        raise Unavailable(f"cannot reach {address}: {error.strerror or error}") from error
    return sock


def _peer_name(sock: socket.socket) -> object:
    try:
        return sock.getpeername()
    except OSError:  # it has gone already, which the greeting will say
        return None


def _greet(
    sock: socket.socket, identity: Identity, deadline_s: float
) -> tuple[FrameSocket, Welcome]:
    with contextlib.ExitStack() as undo:
        link = FrameSocket(sock)
        undo.callback(link.close)
        welcomed = _introduce(link, identity, deadline_s)
        undo.pop_all()
    return link, welcomed


def _greet_again(
    near: socket.socket, identity: Identity, met: Welcome, deadline_s: float
) -> tuple[FrameSocket, Welcome] | None:
    """What becomes the connection instead, if the listener at `near` is the one that was met."""
    try:
        link, welcomed = _greet(near, identity, min(deadline_s, time.monotonic() + PATIENCE_S))
    except KVStoreError:
        return None
    if is_same_life(met, welcomed):
        return link, welcomed
    link.close()
    return None


def _introduce(link: FrameSocket, identity: Identity, deadline_s: float) -> Welcome:
    link.set_version(GREETING_VERSION, limits.HELLO_BYTES_MAX)
    challenged = link.receive(deadline_s).message
    said = handshake.hello(identity, challenged, handshake.new_nonce())
    assert isinstance(challenged, Challenge)
    link.send(FrameKind.REQUEST, 0, said, deadline_s=deadline_s)
    answer = link.receive(deadline_s).message
    welcomed = handshake.check_welcome(identity, challenged, said, answer)
    link.set_version(welcomed.version)
    return welcomed


def _answer(link: FrameSocket, listener: ListenerIdentity, deadline_s: float, local: bool) -> Hello:
    link.set_version(GREETING_VERSION, limits.HELLO_BYTES_MAX)
    challenged = handshake.challenge(listener, handshake.new_nonce())
    link.send(FrameKind.REQUEST, 0, challenged, deadline_s=deadline_s)
    said = link.receive(deadline_s).message
    try:
        welcomed = handshake.welcome(listener, challenged, said, is_local=local)
    except MalformedMessage:
        raise
    except KVStoreError as error:
        link.send(FrameKind.REPLY, 0, failure_of(error), deadline_s=deadline_s)
        raise
    link.send(FrameKind.REPLY, 0, welcomed, deadline_s=deadline_s)
    link.set_version(welcomed.version)
    assert isinstance(said, Hello)
    return said
