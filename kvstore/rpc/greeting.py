"""The greeting on an event loop, for listeners and diallers; ends by handing over to a Peer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, MalformedMessage, Unavailable
from kvstore.rpc import handshake
from kvstore.rpc.failure import failure_of
from kvstore.wire.framing import GREETING_VERSION, Frame, FrameKind, FrameReader, pack_frame
from kvstore.wire.messages.hello import Challenge, Hello, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rpc.identity import Identity, ListenerIdentity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message


class Greeting(asyncio.BufferedProtocol, ABC):
    """What both sides share: one frame at a time, a deadline, and an end told exactly once."""

    def __init__(self) -> None:
        """Expect frames of the greeting, which are small."""
        self._reader = FrameReader(GREETING_VERSION, limits.HELLO_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._is_over = False
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock."""
        self._transport = cast("asyncio.Transport", transport)
        self._patience = asyncio.get_running_loop().call_later(
            limits.HELLO_TIMEOUT_S,
            self.give_up,
            DeadlineExceeded("no greeting within the deadline; is it a kvharbor peer?"),
        )

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport puts received bytes."""
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Take the next step if its frame is whole; bytes after the last one are the Peer's."""
        self._reader.received(nbytes)
        try:
            while not self._is_over and (frame := self._reader.next_frame()) is not None:
                self.take(frame)
        except KVStoreError as error:
            self.refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side gave up first."""
        self.give_up(Unavailable(f"connection lost in the greeting: {exc or 'closed'}"))

    @abstractmethod
    def take(self, frame: Frame) -> None:
        """Do what the frame asks for. Raises what the handshake raises."""

    @abstractmethod
    def ended(self, error: KVStoreError) -> None:
        """The greeting failed; called once, and never after `hand_over`."""

    def refuse(self, error: KVStoreError) -> None:
        """End the connection because of what the other side said."""
        self.give_up(error)

    def send(self, kind: FrameKind, message: Message) -> None:
        """Send one frame of the greeting."""
        assert self._transport is not None
        self._transport.write(pack_frame(kind, 0, message, GREETING_VERSION))

    def hand_over(self, peer: Peer, version: int) -> None:
        """The greeting is done: `peer` owns the connection from here on."""
        self._finish()
        assert self._transport is not None
        self._reader.version = version
        self._reader.frame_bytes_max = limits.FRAME_BYTES_MAX
        peer.adopt(self._transport, self._reader)

    def give_up(self, error: KVStoreError) -> None:
        """End the connection, unless the greeting is over already."""
        if not self._is_over:
            self._finish()
            if self._transport is not None:
                self._transport.close()
            self.ended(error)

    def _finish(self) -> None:
        self._is_over = True
        if self._patience is not None:
            self._patience.cancel()


class ListenerGreeting(Greeting):
    """Challenge, wait for Hello, answer."""

    def __init__(
        self,
        listener: ListenerIdentity,
        welcomed: Callable[[Hello, int], Peer],
        over: Callable[[ListenerGreeting], None],
        *,
        is_local: bool,
    ) -> None:
        """`welcomed` makes the Peer of a Hello and a version, or raises to refuse.

        `over` is called once the connection is the Peer's, or has ended.
        """
        super().__init__()
        self._listener = listener
        self._challenge = handshake.challenge(listener, handshake.new_nonce())
        self._welcomed = welcomed
        self._over = over
        self._is_local = is_local

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Speak first."""
        super().connection_made(transport)
        self.send(FrameKind.REQUEST, self._challenge)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever ended it, this greeting's place is free."""
        super().connection_lost(exc)
        self._over(self)

    def take(self, frame: Frame) -> None:
        """Check the Hello, and open the connection."""
        said = frame.message
        answer = handshake.welcome(self._listener, self._challenge, said, is_local=self._is_local)
        assert isinstance(said, Hello)
        peer = self._welcomed(said, answer.version)
        self.send(FrameKind.REPLY, answer)
        self._over(self)
        self.hand_over(peer, answer.version)

    def refuse(self, error: KVStoreError) -> None:
        """Tell a peer that speaks our protocol why; others learn nothing."""
        if not isinstance(error, MalformedMessage):
            self.send(FrameKind.REPLY, failure_of(error))
        self.give_up(error)

    def ended(self, error: KVStoreError) -> None:
        """Nobody waits for the reason."""


class DiallerGreeting(Greeting):
    """Wait for Challenge, say Hello, wait for Welcome."""

    def __init__(self, identity: Identity, welcomed: Callable[[Welcome], Peer]) -> None:
        """`welcomed` makes the Peer of the listener's answer; see `opened`."""
        super().__init__()
        self._peer: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._identity = identity
        self._welcomed = welcomed
        self._challenge: Challenge | None = None
        self._hello: Hello | None = None

    def take(self, frame: Frame) -> None:
        """Answer the Challenge, then check the Welcome."""
        if self._challenge is None or self._hello is None:
            challenged = frame.message
            self._hello = handshake.hello(self._identity, challenged, handshake.new_nonce())
            assert isinstance(challenged, Challenge)
            self._challenge = challenged
            self.send(FrameKind.REQUEST, self._hello)
            return
        answer = handshake.check_welcome(
            self._identity, self._challenge, self._hello, frame.message
        )
        peer = self._welcomed(answer)
        self.hand_over(peer, answer.version)
        if self._peer.done():
            peer.close()
        else:
            self._peer.set_result(peer)

    @property
    def peer_name(self) -> object:
        """Where the other side is, as the socket's `getpeername` gives it."""
        assert self._transport is not None
        return self._transport.get_extra_info("peername")

    async def opened(self) -> Peer:
        """The Peer once it is greeted. Raises what ended the greeting; if cancelled, ends it."""
        try:
            return await self._peer
        except asyncio.CancelledError:
            if self._peer.done() and not self._peer.cancelled() and not self._peer.exception():
                self._peer.result().close()
            raise

    def abandon(self) -> None:
        """Nobody waits any more. Nothing happens once the Peer was handed over."""
        self._peer.cancel()
        self.give_up(Unavailable("the dialler gave up"))

    def ended(self, error: KVStoreError) -> None:
        """Tell who waits."""
        if not self._peer.done():
            self._peer.set_exception(error)
