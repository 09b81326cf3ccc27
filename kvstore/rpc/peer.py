"""One end of a connection on an event loop, after the greeting: calls both ways, by id.

Symmetric: either end may call the other. Replies and requests of one turn of the loop go out in
one write. Both directions are bounded: calls in flight by number, bytes not taken by the peer by
size; a peer beyond the latter is cut off.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, MalformedMessage, OutOfSpace, Unavailable
from kvstore.rpc.address import is_cut_off, why
from kvstore.rpc.failure import error_of, failure_of
from kvstore.wire.framing import REPLY, REQUEST, Frame, FrameKind, FrameReader, pack_frame
from kvstore.wire.messages.hello import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Hello, Welcome

    RequestHandler = Callable[["Peer", int, Message], None]
    """Carries out a request and sees to it that `Peer.reply` is called, now or later. What it
    raises of kvstore.errors is sent as Failure; anything else is a bug and ends the connection."""
    CloseHandler = Callable[["Peer"], None]


class Peer(asyncio.BufferedProtocol):
    """The other side of one connection. All methods belong to the loop's thread.

    On a listener `hello` says who the peer is; on a dialler `welcome` is what it answered.
    """

    def __init__(
        self,
        on_request: RequestHandler,
        on_close: CloseHandler,
        version: int,
        *,
        hello: Hello | None = None,
        welcome: Welcome | None = None,
    ) -> None:
        """`on_close` is called once, when the connection has ended for whatever reason."""
        self.hello = hello
        self.welcome = welcome
        self.closed_because: KVStoreError | None = None
        """Why the connection ended; None while it is open."""
        self._on_request = on_request
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(version)
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._unanswered = 0
        """Requests of the peer that were not replied to yet."""
        self._outgoing: list[bytes] = []
        self._is_flush_due = False
        """Whether something will call `_flush` in this turn of the loop."""

    def adopt(self, transport: asyncio.Transport, reader: FrameReader) -> None:
        """Take over a greeted connection, with what `reader` holds of its bytes."""
        self._transport = transport
        self._reader = reader
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=limits.SEND_QUEUE_BYTES_MAX)
        self._take_frames()

    @property
    def is_cut_off(self) -> bool:
        """Whether the way to the peer seems to have gone, as far as the kernel can tell."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return sock is not None and is_cut_off(sock)

    # Calling the peer.

    async def call(self, message: Message, timeout_s: float) -> Message:
        """The peer's reply, within `timeout_s`. Raises the error that its Failure names.

        Unavailable when the connection ends first; OutOfSpace with too many calls in flight.
        """
        request_id, reply = self._start(message)
        expiry = self._loop.call_later(timeout_s, _expire, reply)
        try:
            answer = await reply
        finally:
            expiry.cancel()
            self._calls.pop(request_id, None)
        if isinstance(answer, Failure):
            raise error_of(answer)
        return answer

    def reply(self, request_id: int, message: Message) -> None:
        """Answer one request of the peer; nothing happens if the connection has ended.

        BadValue when the answer exceeds a frame; the request is then still to be answered.
        """
        self._send(REPLY, request_id, message)
        self._unanswered -= 1

    def fail(self, request_id: int, error: KVStoreError) -> None:
        """Answer one request with an error."""
        self.reply(request_id, failure_of(error))

    @property
    def in_flight(self) -> int:
        """Calls of ours that the peer has not answered."""
        return len(self._calls)

    @property
    def unanswered(self) -> int:
        """Requests of the peer that we have not answered."""
        return self._unanswered

    def close(self, reason: KVStoreError | None = None) -> None:
        """End the connection once what was sent is out. `on_close` follows. May be repeated."""
        if self.closed_because is None:
            self.closed_because = reason or Unavailable("this side closed the connection")
            self._flush()
            if self._transport is not None:
                self._transport.close()
                # A peer that reads nothing would keep the rest of the queue for ever.
                self._loop.call_later(limits.SEND_STALL_MAX_S, self._transport.abort)

    def abort(self, reason: KVStoreError) -> None:
        """End the connection now, dropping what was not sent. `on_close` follows."""
        self.closed_because = self.closed_because or reason
        self._outgoing.clear()
        if self._transport is not None:
            self._transport.abort()

    def _start(self, message: Message) -> tuple[int, asyncio.Future[Message]]:
        if self.closed_because is not None:
            raise Unavailable(str(self.closed_because))
        if len(self._calls) >= limits.REQUESTS_IN_FLIGHT_MAX:
            raise OutOfSpace(f"{len(self._calls)} requests are in flight on one connection")
        request_id = next(self._ids)
        self._send(REQUEST, request_id, message)
        reply: asyncio.Future[Message] = self._loop.create_future()
        self._calls[request_id] = reply
        return request_id, reply

    def _send(self, kind: FrameKind, request_id: int, message: Message) -> None:
        if self.closed_because is not None:
            return
        self._outgoing.append(pack_frame(kind, request_id, message, self._reader.version))
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if not self._outgoing or self._transport is None:
            return
        out, self._outgoing = self._outgoing, []
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    # What the transport tells.

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport puts received bytes."""
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what came."""
        self._reader.received(nbytes)
        self._take_frames()

    def pause_writing(self) -> None:
        """More than may be is unsent: the peer does not read."""
        self.abort(Unavailable(f"the peer left {limits.SEND_QUEUE_BYTES_MAX} bytes unread"))

    def eof_received(self) -> bool:
        """The peer sends no more: end our side too."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the calls in flight and tell the owner."""
        if self.closed_because is None:
            lost = why(exc) if isinstance(exc, OSError) else exc
            text = "the peer closed the connection" if exc is None else f"connection lost: {lost}"
            self.closed_because = Unavailable(text)
        calls, self._calls = self._calls, {}
        for reply in calls.values():
            if not reply.done():
                reply.set_exception(Unavailable(str(self.closed_because)))
        self._outgoing.clear()
        self._on_close(self)

    def _take_frames(self) -> None:
        # Replies made meanwhile go out together at the end, not in a turn of their own.
        was_due, self._is_flush_due = self._is_flush_due, True
        try:
            while self.closed_because is None and (frame := self._reader.next_frame()) is not None:
                self._take(frame)
        except MalformedMessage as error:
            self.abort(error)
        finally:
            self._flush()
            self._is_flush_due = was_due

    def _take(self, frame: Frame) -> None:
        if frame.kind is REPLY:
            reply = self._calls.pop(frame.request_id, None)
            # None: its caller has given up.
            if reply is not None and not reply.done():
                reply.set_result(frame.message)
            return
        self._unanswered += 1
        if self._unanswered > limits.REQUESTS_IN_FLIGHT_MAX:
            self.fail(frame.request_id, OutOfSpace("too many requests of this peer are open"))
            return
        try:
            self._on_request(self, frame.request_id, frame.message)
        except KVStoreError as error:
            self.fail(frame.request_id, error)


def _expire(reply: asyncio.Future[Message]) -> None:
    if not reply.done():
        reply.set_exception(DeadlineExceeded("no answer within the deadline"))
