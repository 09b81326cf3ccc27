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
from kvstore.errors import (
    DeadlineExceeded,
    KVStoreError,
    MalformedMessage,
    StaleEpoch,
    Unavailable,
)
from kvstore.rpc.search import SILENT_PATIENCE_S, Search
from kvstore.rpc.server import dial_peer
from kvstore.wire.messages.reads import is_in_doubt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.rpc.identity import Identity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message


class AsyncMasterLink:
    """One connection at a time to whichever master answers and leads; belongs to one loop."""

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        """Check the addresses (BadValue); the first call connects."""
        self._search = Search(addresses, Random(os.urandom(8)))
        self._clock = SystemClock()
        self._identity = identity
        self._highest_epoch = 0
        self._peer: Peer | None = None
        self._address = ""
        """Of the peer."""
        self._dialling = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        """The last look whether another master leads, begun at `_looked_s`."""
        self._looked_s = float("-inf")
        self._closed = False

    async def call(self, message: Message, timeout_s: float) -> Message:
        """As MasterLink.call: every message may be repeated, so a lost connection is made again."""
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            peer: Peer | None = None
            try:
                peer = await self._connected(deadline_s)
                reply = await self._ask(peer, message, deadline_s - self._clock.now_s())
            except (Unavailable, StaleEpoch) as error:
                delay_s = self._failed(peer, error)
                if self._closed:
                    raise Unavailable("this store is closed") from error
                if delay_s >= deadline_s - self._clock.now_s():
                    raise DeadlineExceeded(self._search.why(error)) from error
                await asyncio.sleep(delay_s)
                continue
            if is_in_doubt(message, reply) and await self._look_elsewhere(peer, deadline_s):
                continue  # to a leader who can grant a lease
            self._search.succeeded()
            return reply

    def close(self) -> None:
        """End the connection; later calls raise Unavailable. May be repeated."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    async def _ask(self, peer: Peer, message: Message, left_s: float) -> Message:
        """The peer's reply; as long as it keeps silent, it is looked whether another leads."""
        if not self._search.has_others:
            return await peer.call(message, left_s)
        loop = asyncio.get_running_loop()

        late = loop.call_later(limits.CALL_PATIENCE_S, lambda: look_again())

        def look_again() -> None:
            nonlocal late
            self._look()
            late = loop.call_later(limits.CALL_PATIENCE_S, look_again)

        try:
            return await peer.call(message, left_s)
        finally:
            late.cancel()

    async def _connected(self, deadline_s: float) -> Peer:
        if self._closed:
            raise Unavailable("this store is closed")
        async with self._dialling:
            if self._peer is not None:
                return self._peer
            left_s = max(0.0, deadline_s - self._clock.now_s())
            address = self._search.next()
            patience_s = min(self._search.patience_s(address, left_s), limits.HELLO_TIMEOUT_S)
            try:
                peer = await self._open(address, patience_s, self._highest_epoch)
            except (Unavailable, StaleEpoch) as error:
                self._search.failed(address, error)
                raise
            self._adopt(address, peer)
            return peer

    async def _open(self, address: str, patience_s: float, epoch: int) -> Peer:
        """Dial there; StaleEpoch unless that master knows of this epoch or a higher one."""
        peer = await dial_peer(address, self._identity, _refuse, self._gone, patience_s)
        shown = 0 if peer.welcome is None else peer.welcome.epoch
        if shown >= epoch and not self._closed:
            return peer
        peer.close()
        raise StaleEpoch(f"{address} shows epoch {shown}, but {epoch} is looked for")

    def _adopt(self, address: str, peer: Peer) -> None:
        assert peer.welcome is not None
        self._search.greeted(address)
        self._highest_epoch = max(self._highest_epoch, peer.welcome.epoch)
        self._address, self._peer = address, peer

    def _look(self) -> asyncio.Task[None] | None:
        """Look whether another master leads: seldom, and all who ask share one look."""
        now_s = self._clock.now_s()
        if now_s >= self._looked_s + limits.CALL_PATIENCE_S:
            self._looked_s = now_s
            self._looking = asyncio.create_task(self._find_other())
        return self._looking

    async def _look_elsewhere(self, present: Peer, deadline_s: float) -> bool:
        """Whether the link has left `present` for another leader by then."""
        looking = self._look() if self._search.has_others else None
        if looking is not None:
            await asyncio.wait({looking}, timeout=max(0.0, deadline_s - self._clock.now_s()))
        return self._peer is not present

    async def _find_other(self) -> None:
        """Leave the present master as MasterLink does, if there is another to go to."""
        present = self._peer
        if present is None or present.welcome is None:
            return
        epoch = present.welcome.epoch if present.is_cut_off else present.welcome.epoch + 1
        for address in self._search.others(self._address):
            try:
                found = await self._open(address, SILENT_PATIENCE_S, epoch)
            except KVStoreError as error:
                self._search.refused(address, error)
                continue
            self._adopt(address, found)
            present.abort(StaleEpoch(f"{address} is asked instead"))
            return

    def _failed(self, peer: Peer | None, error: Unavailable | StaleEpoch) -> float:
        """Give up what is broken or does not lead; how long to wait before the next try."""
        if peer is not None and peer.closed_because is None and not isinstance(error, StaleEpoch):
            self._search.refused(self._address, error)
            if self._search.has_others:
                self._look()
            return self._search.again_s(error.retry_after_s)
        if peer is not None:
            self._lost(peer, error)
            peer.close()
        return 0.0 if self._peer is not None else self._search.next_s(error.retry_after_s)

    def _gone(self, peer: Peer) -> None:
        assert peer.closed_because is not None
        self._lost(peer, peer.closed_because)

    def _lost(self, peer: Peer, error: KVStoreError) -> None:
        if self._peer is peer:
            self._peer = None
            self._search.failed(self._address, error)


def _refuse(peer: Peer, request_id: int, message: Message) -> None:
    del peer, request_id
    raise MalformedMessage(f"{type(message).__name__} as a request to a client")
