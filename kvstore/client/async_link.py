"""A lasting link to the masters on an event loop: reconnects and follows the leader.

As kvstore.rpc.link.MasterLink is for threads. A forked child has no event loop, hence no link.
"""

from __future__ import annotations

import asyncio
import os
from random import Random
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.clock import SystemClock
from kvstore.errors import BadValue, DeadlineExceeded, MalformedMessage, StaleEpoch, Unavailable
from kvstore.rpc.address import parse_address
from kvstore.rpc.backoff import Backoff
from kvstore.rpc.server import dial_peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.rpc.identity import Identity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message


class AsyncMasterLink:
    """One connection at a time to whichever master answers and leads; belongs to one loop."""

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        """Check the addresses (BadValue); the first call connects."""
        if not addresses:
            raise BadValue("masters", addresses, "at least one address")
        for address in addresses:
            parse_address(address)
        self._addresses = tuple(addresses)
        self._identity = identity
        self._backoff = Backoff(Random(os.urandom(8)))
        self._next = 0
        self._highest_epoch = 0
        self._peer: Peer | None = None
        self._dialling = asyncio.Lock()
        self._closed = False

    async def call(self, message: Message, timeout_s: float) -> Message:
        """As MasterLink.call: every message may be repeated, so a lost connection is made again."""
        clock = SystemClock()
        deadline_s = clock.now_s() + timeout_s
        while True:
            peer: Peer | None = None
            try:
                peer = await self._connected(deadline_s - clock.now_s())
                reply = await peer.call(message, deadline_s - clock.now_s())
            except (Unavailable, StaleEpoch) as error:
                if isinstance(error, StaleEpoch) or (peer and peer.closed_because is not None):
                    self._drop(peer)
                delay_s = self._backoff.failed(error.retry_after_s)
                if self._closed:
                    raise Unavailable("this store is closed") from error
                if delay_s >= deadline_s - clock.now_s():
                    raise DeadlineExceeded(f"{error} ({self._backoff.failures} tries)") from error
                await asyncio.sleep(delay_s)
            else:
                self._backoff.succeeded()
                return reply

    def close(self) -> None:
        """End the connection; later calls raise Unavailable. May be repeated."""
        self._closed = True
        self._drop(self._peer)

    async def _connected(self, timeout_s: float) -> Peer:
        if self._closed:
            raise Unavailable("this store is closed")
        async with self._dialling:
            if self._peer is not None:
                return self._peer
            address = self._addresses[self._next % len(self._addresses)]
            self._next += 1
            patience_s = min(max(timeout_s, 0.0), limits.HELLO_TIMEOUT_S)
            peer = await dial_peer(address, self._identity, _refuse, self._gone, patience_s)
            epoch = 0 if peer.welcome is None else peer.welcome.epoch
            if epoch < self._highest_epoch or self._closed:
                peer.close()
                raise Unavailable(f"{address} leads an old epoch, or this store is closed")
            self._highest_epoch = epoch
            self._next -= 1
            self._peer = peer
            return peer

    def _gone(self, peer: Peer) -> None:
        if self._peer is peer:
            self._peer = None

    def _drop(self, peer: Peer | None) -> None:
        if peer is not None:
            if self._peer is peer:
                self._peer = None
                self._next += 1
            peer.close()


def _refuse(peer: Peer, request_id: int, message: Message) -> None:
    del peer, request_id
    raise MalformedMessage(f"{type(message).__name__} as a request to a client")
