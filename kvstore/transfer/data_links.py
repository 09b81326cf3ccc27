"""Data connections to one worker: a few greeted sockets, each used by one call at a time.

Owns which reply belongs to a request where only one is under way.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import MalformedMessage, Unavailable
from kvstore.rpc.dialling import dial
from kvstore.rpc.failure import error_of
from kvstore.wire.framing import REPLY, REQUEST
from kvstore.wire.messages.hello import Failure

if TYPE_CHECKING:
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.rpc.identity import Identity
    from kvstore.wire.messages.base import Message

SPIN_S: Final = 50e-6
"""Polling before sleeping: a reply usually comes sooner than a sleeper is woken."""
IDLE_MAX: Final = 8


class Lent:
    """A connection for one `with`: given back after it, closed when the block raises."""

    __slots__ = ("_deadline_s", "_link", "_links")

    def __init__(self, links: DataLinks, deadline_s: float) -> None:
        """Take nothing yet."""
        self._links = links
        self._deadline_s = deadline_s
        self._link: FrameSocket | None = None

    def __enter__(self) -> FrameSocket:
        taken = self._link = self._links.take(self._deadline_s)
        return taken

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        link = self._link
        assert link is not None, "entered"
        if kind is None:
            self._links.give_back(link)
        else:
            link.close()


class DataLinks:
    """Idle connections to `address`; more are dialled as calls need them. Thread-safe."""

    def __init__(self, address: str, identity: Identity) -> None:
        """Dial nothing yet."""
        self.address = address
        self._identity = identity
        self._mutex = threading.Lock()
        self._idle: list[FrameSocket] = []
        self._closed = False

    def link(self, deadline_s: float) -> Lent:
        """A connection for one call. It is kept for the next one unless the block raises."""
        return Lent(self, deadline_s)

    def take(self, deadline_s: float) -> FrameSocket:
        """An idle connection, or a new one by the time.monotonic() moment. For Lent."""
        while True:
            with self._mutex:
                if self._closed:
                    raise Unavailable("this store is closed")
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                return self._dial(deadline_s)
            # Its worker neither ended it nor speaks unasked.
            if idle.is_quiet:
                return idle
            idle.close()

    def give_back(self, link: FrameSocket) -> None:
        """Keep a connection for the next call. For Lent."""
        with self._mutex:
            if not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(link)
                return
        link.close()

    def close(self) -> None:
        """End idle connections; those in use end with their call."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    def _dial(self, deadline_s: float) -> FrameSocket:
        """A new connection, by the time.monotonic() moment `deadline_s`."""
        link, _ = dial(self.address, self._identity, deadline_s)
        link.spin_s = SPIN_S
        return link


def patience_s(until_s: float) -> float:
    """How long a reader bears that a worker says nothing, where it may go on to `until_s`.

    A worker that is well answers at once. Half of the time is kept for another replica.
    """
    return min(limits.READ_STALL_MAX_S, max(0.0, until_s - time.monotonic()) / 2)


def silent_at_s(until_s: float) -> float:
    """The time.monotonic() moment at which a worker that says nothing is given up."""
    return time.monotonic() + patience_s(until_s)


def reply_to(request_id: int, link: FrameSocket, deadline_s: float) -> Message:
    """What the peer says to this request, a Failure too. MalformedMessage for anything else."""
    frame = link.receive(deadline_s)
    if frame.kind is not REPLY or frame.request_id != request_id:
        raise MalformedMessage(f"{type(frame.message).__name__} that nobody asked for")
    return frame.message


def call(
    link: FrameSocket, message: Message, deadline_s: float, fds: tuple[int, ...] = ()
) -> Message:
    """One request and its reply on a connection that carries nothing else meanwhile.

    Raises the error that a Failure names.
    """
    link.send(REQUEST, 0, message, fds, deadline_s=deadline_s)
    reply = reply_to(0, link, deadline_s)
    if isinstance(reply, Failure):
        raise error_of(reply)
    return reply
