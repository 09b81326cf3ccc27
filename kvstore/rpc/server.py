"""Listeners of the control plane on an event loop, and the dialler that makes a Peer.

Owns accepted connections from their first byte: greeting, bounds, closing. What requests mean is
the handler's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import DeadlineExceeded, OutOfSpace, Unavailable
from kvstore.rpc.address import UnixAddress, bind, bound_address, parse_address
from kvstore.rpc.greeting import DiallerGreeting, ListenerGreeting
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
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_paths: list[str] = []
        self._all_gone = asyncio.Event()

    async def listen(self, address: str) -> str:
        """Accept connections at "host:port" or "unix:/path"; the address with its real port.

        ConfigError when it is taken, or open to other hosts while no secret is set.
        """
        sock = bind(address, self.listener.secret)
        where = bound_address(sock)
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(self._greeting, sock=sock))
            self._unix_paths.append(sock.getsockname())
        else:
            self._servers.append(await loop.create_server(self._greeting, sock=sock))
        return where

    async def close(self) -> None:
        """Stop listening and end every connection; returns when all `on_close` were called."""
        for path in self._unix_paths:
            # Before the socket closes, so that no successor can have bound the path by now.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._unix_paths.clear()
        for server in self._servers:
            server.close()
        self._servers.clear()
        reason = Unavailable("the listener is closing")
        for greeting in list(self._greetings):
            greeting.give_up(reason)
        for peer in list(self.peers):
            peer.close(reason)
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._until_no_peers()
        except TimeoutError:
            for peer in list(self.peers):
                peer.abort(reason)
            await self._until_no_peers()

    async def _until_no_peers(self) -> None:
        while self.peers:
            self._all_gone.clear()
            await self._all_gone.wait()

    def _greeting(self) -> ListenerGreeting:
        return ListenerGreeting(self.listener, self._admit, self._welcomed, self._greetings.discard)

    def _admit(self, greeting: ListenerGreeting) -> bool:
        if len(self._greetings) >= limits.GREETINGS_MAX:
            return False
        self._greetings.add(greeting)
        return True

    def _welcomed(self, hello: Hello, version: int) -> Peer:
        if len(self.peers) >= self._sessions_max:
            raise OutOfSpace(f"{len(self.peers)} sessions are open, which is the limit")
        peer = Peer(self._on_request, self._closed, version, hello=hello)
        self._on_open(peer, hello)
        self.peers.add(peer)
        return peer

    def _closed(self, peer: Peer) -> None:
        self.peers.discard(peer)
        if not self.peers:
            self._all_gone.set()
        self._on_close(peer)


async def dial_peer(
    address: str,
    identity: Identity,
    on_request: RequestHandler,
    on_close: CloseHandler,
    timeout_s: float = limits.HELLO_TIMEOUT_S,
) -> Peer:
    """Connect and greet; the open Peer, whose `welcome` holds the listener's answer.

    Raises Unavailable, DeadlineExceeded, AccessDenied, VersionMismatch or MalformedMessage.
    """
    where = parse_address(address)
    loop = asyncio.get_running_loop()
    greeting = DiallerGreeting(identity, partial(_dialled, on_request, on_close))
    try:
        async with asyncio.timeout(timeout_s):
            if isinstance(where, UnixAddress):
                await loop.create_unix_connection(lambda: greeting, where.path)
            else:
                await loop.create_connection(lambda: greeting, where.host, where.port)
            return await greeting.opened()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{address}: no greeting; is it a kvharbor listener?") from error
    except OSError as error:
        raise Unavailable(f"cannot reach {address}: {error.strerror or error}") from error
    finally:
        greeting.abandon()


def _dialled(on_request: RequestHandler, on_close: CloseHandler, welcome: Welcome) -> Peer:
    return Peer(on_request, on_close, welcome.version, welcome=welcome)
