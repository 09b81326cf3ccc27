"""Ports for programs that are told theirs before they start.

Owns which ports are given out. Must not know who listens there.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOOPBACK: Final = "127.0.0.1"
FIRST: Final = 10_000
_KERNELS_OWN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_STRIDE: Final = 101


class Claims:
    """Ports of loopback that this process gave out; nobody else who asks here is given them.

    A datagram socket of the same number, kept open until the end, tells other processes.
    """

    def __init__(self, candidates: Iterable[int]) -> None:
        """Give out what of `candidates` is free, in their order, and each once."""
        self._candidates = iter(candidates)
        self._held: list[socket.socket] = []

    def free_port(self) -> int:
        """One that nobody listens at. OSError when there is none left."""
        for port in self._candidates:
            claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                claim.bind((LOOPBACK, port))
                socket.create_server((LOOPBACK, port)).close()
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._held.append(claim)
            return port
        raise OSError(errno.EADDRINUSE, "no port is left that could be given out")

    def close(self) -> None:
        """Let others have them."""
        while self._held:
            self._held.pop().close()


def _below_the_kernels_own() -> Iterator[int]:
    """Each port once, from a place of this process's own on.

    The kernel gives those of its range to outgoing connections and to whoever listens at port 0:
    what was free there a moment ago need not be when a program begins to listen.
    """
    end = int(_KERNELS_OWN.read_text().split()[0])
    span = end - FIRST
    start = os.getpid() * _STRIDE % span
    return islice(cycle(range(FIRST, end)), start, start + span)


_own: Final = Claims(_below_the_kernels_own())
free_port: Final = _own.free_port
atexit.register(_own.close)
