"""Data connections to one worker: a few greeted sockets, each used by one call at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kvstore.errors import Unavailable
from kvstore.rpc.dialling import dial

if TYPE_CHECKING:
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.rpc.identity import Identity

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
        return self._idle_one() or self._dial(deadline_s)

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

    def _idle_one(self) -> FrameSocket | None:
        while True:
            with self._mutex:
                if self._closed:
                    raise Unavailable("this store is closed")
                if not self._idle:
                    return None
                link = self._idle.pop()
            # Its worker neither ended it nor speaks unasked.
            if link.is_quiet:
                return link
            link.close()
