"""Listeners of the control plane on an event loop, and the dialler that makes a Peer.

Owns accepted connections from their first byte: greeting, bounds, closing. What requests mean is
the handler's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, OutOfSpace, Unavailable
from kvstore.rpc.acceptor import Acceptor
from kvstore.rpc.address import (
    UnixAddress,
    bind,
    bound_address,
    is_local,
    parse_address,
    tune,
    why,
)
from kvstore.rpc.greeting import DiallerGreeting, ListenerGreeting
from kvstore.rpc.nearby import PATIENCE_S, connect_nearby, is_same_life
from kvstore.rpc.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rpc.identity import Identity, ListenerIdentity
    from kvstore.rpc.peer import CloseHandler, RequestHandler
    from kvstore.wire.messages.hello import Hello, Welcome

    OpenHandler = Callable[[Peer, Hello], None]
    """May raise an error of kvstore.errors to refuse the peer, which is then told why."""

CLOSE_PATIENCE_S: Final = 1.0
"""How long `Server.close` lets peers take what was sent to them."""


class Server:
    """Serves any number of TCP and Unix listeners with one set of handlers.

    `on_open` is called before the peer can have sent a request, `on_close` once for every peer
    that was opened. All of it happens in the thread of the running loop.
    """

    def __init__(
        self,
        listener: ListenerIdentity,
        on_open: OpenHandler,
        on_request: RequestHandler,
        on_close: CloseHandler,
        *,
        sessions_max: int = limits.SESSIONS_MAX,
    ) -> None:
        """Nothing listens yet; see `listen`."""
        self.listener = listener
        """May be replaced, e.g. when the epoch rises; counts for later connections."""
        self.peers: set[Peer] = set()
        self._on_open = on_open
        self._on_request = on_request
        self._on_close = on_close
        self._sessions_max = sessions_max
        self._greetings: set[ListenerGreeting] = set()
        self._joining: set[asyncio.Task[None]] = set()
        """Accepted sockets that are getting their transports."""
        self._acceptors: list[Acceptor] = []
        self._unix_paths: list[str] = []
        self._someone_left = asyncio.Event()

    async def listen(self, address: str) -> str:
        """Accept connections at "host:port" or "unix:/path"; the address with its real port.

        ConfigError when it is taken, or open to other hosts while no secret is set.
        """
        sock = bind(address, self.listener.secret)
        where = bound_address(sock)
        if sock.family == socket.AF_UNIX:
            self._unix_paths.append(sock.getsockname())
        self._acceptors.append(Acceptor(sock, self._greet))
        return where

    async def close(self) -> None:
        """Stop listening and end every connection; returns when all `on_close` were called."""
        for path in self._unix_paths:
            # Before the socket closes, so that no successor can have bound the path by now.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._unix_paths.clear()
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        await asyncio.gather(*self._joining, return_exceptions=True)
        reason = Unavailable("the listener is closing")
        for greeting in list(self._greetings):
            greeting.give_up(reason)
        for peer in list(self.peers):
            peer.close(reason)
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._until_empty()
        except TimeoutError:
            for peer in list(self.peers):
                peer.abort(reason)
            await self._until_empty()

    async def _until_empty(self) -> None:
        while self.peers or self._greetings:
            self._someone_left.clear()
            await self._someone_left.wait()

    def _greet(self, sock: socket.socket) -> None:
        """Take an accepted socket, if there is room to greet one more."""
        if len(self._greetings) >= limits.GREETINGS_MAX:
            sock.close()
            return
        try:
            tune(sock)
        except OSError:
            # It has gone already.
            sock.close()
            return
        greeting = ListenerGreeting(
            self.listener, self._welcomed, self._greeted, is_local=is_local(sock)
        )
        self._greetings.add(greeting)
        joining = asyncio.create_task(self._join(greeting, sock))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    async def _join(self, greeting: ListenerGreeting, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: greeting, sock)
        except OSError:
            sock.close()
            self._greeted(greeting)

    def _greeted(self, greeting: ListenerGreeting) -> None:
        self._greetings.discard(greeting)
        self._someone_left.set()

    def _welcomed(self, hello: Hello, version: int) -> Peer:
        if len(self.peers) >= self._sessions_max:
            raise OutOfSpace(f"{len(self.peers)} sessions are open, which is the limit")
        peer = Peer(self._on_request, self._closed, version, hello=hello)
        self._on_open(peer, hello)
        self.peers.add(peer)
        return peer

    def _closed(self, peer: Peer) -> None:
        self.peers.discard(peer)
        self._someone_left.set()
        self._on_close(peer)


async def dial_peer(
    address: str,
    identity: Identity,
    on_request: RequestHandler,
    on_close: CloseHandler,
    timeout_s: float = limits.HELLO_TIMEOUT_S,
) -> Peer:
    """Connect and greet; the open Peer, whose `welcome` holds the listener's answer.

    A listener of this host that was greeted over TCP is met at its Unix socket where it has one.
    Raises Unavailable, DeadlineExceeded, AccessDenied, VersionMismatch or MalformedMessage.
    """
    where = parse_address(address)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    kept: Peer | None = None

    def closed(peer: Peer) -> None:
        if peer is kept:
            on_close(peer)

    def welcomed(welcome: Welcome) -> Peer:
        return Peer(on_request, closed, welcome.version, welcome=welcome)

    greeting = DiallerGreeting(identity, welcomed)
    try:
        async with asyncio.timeout_at(deadline_s):
            if isinstance(where, UnixAddress):
                await loop.create_unix_connection(lambda: greeting, where.path)
            else:
                await loop.create_connection(lambda: greeting, where.host, where.port)
            peer = await greeting.opened()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{address}: no greeting; is it a kvharbor listener?") from error
    except OSError as error:
        raise Unavailable(f"cannot reach {address}: {why(error)}") from error
    finally:
        greeting.abandon()
    again = DiallerGreeting(identity, welcomed)
    kept = await _nearest(peer, greeting.peer_name, again, deadline_s)
    if kept.closed_because is not None:
        raise Unavailable(f"{address}: {kept.closed_because}")
    return kept


async def _nearest(met: Peer, peer_name: object, again: DiallerGreeting, deadline_s: float) -> Peer:
    """`met`, or what `again` makes of a Unix socket of the same listener; the other is closed."""
    assert met.welcome is not None
    sock = connect_nearby(peer_name, met.welcome)
    if sock is None:
        return met
    try:
        near = await _greet_at(sock, again, deadline_s)
    except asyncio.CancelledError:
        met.close()
        raise
    if near is None:
        return met
    assert near.welcome is not None
    kept, other = (near, met) if is_same_life(met.welcome, near.welcome) else (met, near)
    other.close()
    return kept


async def _greet_at(
    sock: socket.socket, greeting: DiallerGreeting, deadline_s: float
) -> Peer | None:
    """Whoever listens at the other end of a connected Unix socket, if it greets in time."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(min(deadline_s, loop.time() + PATIENCE_S)):
            await loop.create_unix_connection(lambda: greeting, sock=sock)
            return await greeting.opened()
    except (TimeoutError, OSError, KVStoreError):
        return None
    finally:
        greeting.abandon()
