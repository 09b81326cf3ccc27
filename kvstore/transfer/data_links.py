"""Data connections to one worker: a few greeted sockets, each used by one call at a time."""

from __future__ import annotations

import select
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstore.errors import Unavailable
from kvstore.rpc.dialling import dial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.rpc.identity import Identity

SPIN_S: Final = 50e-6
"""Polling before sleeping: a reply usually comes sooner than a sleeper is woken."""
IDLE_MAX: Final = 8


class DataLinks:
    """Idle connections to `address`; more are dialled as calls need them. Thread-safe."""

    def __init__(self, address: str, identity: Identity) -> None:
        """Dial nothing yet."""
        self.address = address
        self._identity = identity
        self._mutex = threading.Lock()
        self._idle: list[FrameSocket] = []
        self._closed = False

    @contextmanager
    def link(self, deadline_s: float) -> Iterator[FrameSocket]:
        """A connection for one call. It is kept for the next one unless the block raises."""
        taken = self._take() or self._dial(deadline_s)
        try:
            yield taken
        except BaseException:
            taken.close()
            raise
        self._give_back(taken)

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

    def _take(self) -> FrameSocket | None:
        while True:
            with self._mutex:
                if self._closed:
                    raise Unavailable("this store is closed")
                if not self._idle:
                    return None
                link = self._idle.pop()
            if _is_quiet(link):
                return link
            link.close()

    def _give_back(self, link: FrameSocket) -> None:
        with self._mutex:
            if not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(link)
                return
        link.close()


def _is_quiet(link: FrameSocket) -> bool:
    """Whether an idle connection is alive: its worker neither ended it nor speaks unasked."""
    if link.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    return not poll.poll(0)
