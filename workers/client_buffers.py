"""What clients have attached and opened, by session: shared by all connections of a session.

Owns how long a mapping lives: from AttachBuffer until DetachBuffer or the end of the session's
last connection, and never shorter than a pull that uses it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BufferClosed, DeadlineExceeded, OutOfSpace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.transfer.device import Block
    from workers.sharing import ClientBuffer
    from workers.tiers.hbm import HbmSegment

    AnyBuffer = ClientBuffer | Block

DETACH_WAIT_S: Final = limits.CALL_TIMEOUT_S

ClientKey = tuple[str, str, bytes]
"""Role, tenant and session token: a token alone could be another tenant's (I2)."""


class HeldBuffer:
    """One mapping, and how many pulls use it.

    Each `SessionBuffers.use` ends once: by `end`, or as a context manager that gives the buffer.
    """

    __slots__ = ("_session", "buffer", "is_retired", "uses")

    def __init__(self, session: SessionBuffers, buffer: AnyBuffer) -> None:
        """Nobody uses it yet."""
        self._session = session
        self.buffer: Final = buffer
        self.uses = 0
        self.is_retired = False

    def end(self) -> None:
        """End one use."""
        self._session.end_use(self)

    def __enter__(self) -> AnyBuffer:
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.end()


class SessionBuffers:
    """The buffers of one session. Thread-safe."""

    def __init__(self) -> None:
        """None yet, and no connection."""
        self.connections = 0
        self._mutex = threading.Lock()
        self._idle = threading.Condition(self._mutex)
        self._held: dict[int, HeldBuffer] = {}
        self._opened: dict[int, HbmSegment] = {}
        """Segments on devices that the client has opened, by share."""

    def opened(self, share: int, segment: HbmSegment) -> None:
        """The client has this share of a segment now."""
        with self._mutex:
            self._opened[share] = segment

    def closed(self, shares: Iterable[int]) -> None:
        """The client uses these shares no more. Strange ones change nothing."""
        with self._mutex:
            gone = [(share, self._opened.pop(share)) for share in shares if share in self._opened]
        for share, segment in gone:
            segment.unshare(share)

    def attach(self, number: int, buffer: AnyBuffer) -> None:
        """Own a buffer under this number, in place of what had it. OutOfSpace for too many."""
        with self._idle:
            known = number in self._held
            if not known and len(self._held) >= limits.BUFFERS_PER_SESSION_MAX:
                buffer.close()
                most = limits.BUFFERS_PER_SESSION_MAX
                raise OutOfSpace(f"buffer {number}: a session has {most} at most")
            if known:
                self._retire(self._held[number])
            self._held[number] = HeldBuffer(self, buffer)

    def detach(self, number: int) -> None:
        """Let a buffer go; returns once no pull uses it. Unknown numbers are gone already."""
        with self._idle:
            held = self._held.get(number)
            if held is None:
                return
            self._retire(held)
            if not self._idle.wait_for(lambda: not held.uses, DETACH_WAIT_S):
                raise DeadlineExceeded(f"buffer {number} is still being pulled from")

    def use(self, number: int) -> HeldBuffer:
        """The buffer, mapped until this use ends. BufferClosed when it is not attached."""
        with self._mutex:
            held = self._held.get(number)
            if held is None or held.is_retired:
                raise BufferClosed(f"buffer {number} is not attached")
            held.uses += 1
        return held

    def end_use(self, held: HeldBuffer) -> None:
        """One use less; the last one of a retired buffer unmaps it. For `HeldBuffer.end`."""
        with self._mutex:
            held.uses -= 1
            if held.is_retired and not held.uses:
                self._let_go(held)

    def close(self) -> None:
        """Let everything go."""
        with self._idle:
            for held in self._held.values():
                self._retire(held)
            self._held.clear()
            shares = list(self._opened)
        self.closed(shares)

    def _retire(self, held: HeldBuffer) -> None:
        held.is_retired = True
        if not held.uses:
            self._let_go(held)

    def _let_go(self, held: HeldBuffer) -> None:
        """Unmap what nobody uses; only then is its number unknown, so that no detach lies."""
        held.buffer.close()
        self._held = {number: each for number, each in self._held.items() if each is not held}
        self._idle.notify_all()


class ClientBuffers:
    """SessionBuffers by who has attached them. Thread-safe."""

    def __init__(self) -> None:
        """No session."""
        self._mutex = threading.Lock()
        self._sessions: dict[ClientKey, SessionBuffers] = {}

    @contextmanager
    def connection(self, client: ClientKey) -> Iterator[SessionBuffers]:
        """The buffers of a client's session, for as long as one connection of it lasts."""
        with self._mutex:
            found = self._sessions.setdefault(client, SessionBuffers())
            found.connections += 1
        try:
            yield found
        finally:
            with self._mutex:
                found.connections -= 1
                is_last = not found.connections
                if is_last:
                    del self._sessions[client]
            if is_last:
                found.close()
