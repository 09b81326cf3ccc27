"""Accepts connections of one listening socket on the running event loop.

Used in place of the loop's own servers, which may lose a connection that arrives while they
close: here the owner knows of each accepted socket, synchronously.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

BATCH_MAX: Final = 64
"""Connections accepted in one turn of the loop; others have their turn in between."""
RETRY_DELAY_S: Final = 1.0
"""Out of descriptors: accepting at once again would only burn the processor."""


class Acceptor:
    """Calls `take` with each accepted socket, which is then the callee's."""

    def __init__(self, listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """Start accepting; owns `listening` until `close`."""
        listening.setblocking(False)
        self._listening = listening
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Stop. Connections that the kernel completed meanwhile are reset."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH_MAX):
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(RETRY_DELAY_S, self._resume)
                return
            self._take(accepted)
