"""The transfer engine itself: the only import of Mooncake, and what may be asked of it.

Runs only in a child process (kvstore.transfer.mooncake_child). The engine has no authentication,
no cancel and one way to fail (-1); everything that makes up for that is the parent's work.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Final

from mooncake.engine import TransferEngine

from kvstore.errors import ConfigError, Unavailable
from kvstore.transfer.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

METADATA: Final = "P2PHANDSHAKE"
"""No metadata server: engines ask each other, by the names that our messages carry."""

ANYWHERE: Final = "*"
"""Memory of the host, whose place the engine finds out. A device's is called as torch calls it,
`cuda:0`: by that name the engine chooses the network device that is nearest."""
_SO_ATTACH_FILTER: Final = 26


class Engine:
    """One engine: it can read from peers, and serves what is registered to whoever asks."""

    def __init__(self, host: str, protocol: str, device: str, confined: bool) -> None:
        """Start it; its ports are open from now on. ConfigError when it does not start."""
        self._engine = TransferEngine()
        code = self._engine.initialize(host, METADATA, protocol, device)
        if code != 0:
            raise ConfigError(
                f"transfer engine: host {host!r}, protocol {protocol!r}, device {device!r}: "
                f"code {code}"
            )
        # Before anything is registered: a port that answers too early has nothing to give.
        if confined:
            for listener in _listeners():
                _confine(listener)
        self.peer = f"{host}:{self._engine.get_rpc_port()}"

    def serve(self, address: int, size_bytes: int, location: str = ANYWHERE) -> None:
        """Let peers read this memory, and write it where its mapping allows."""
        code = self._engine.register_memory(address, size_bytes, location)
        if code != 0:
            where = "of the host" if location == ANYWHERE else f"of {location}"
            raise ConfigError(
                f"transfer engine: {size_bytes} bytes {where} not registered: code {code}"
            )

    def withdraw(self, address: int) -> None:
        """Serve it no more. Transfers that run are not ended by this (reliability: R2)."""
        self._engine.unregister_memory(address)

    def pull(
        self, peer: str, to: Sequence[int], addresses: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Read from a peer. Unavailable: some bytes may still arrive until this process ends."""
        code = self._engine.batch_transfer_sync_read(peer, list(to), list(addresses), list(sizes))
        if code != 0:
            raise Unavailable(f"transfer engine: read from {peer} failed with {code}")

    def push(self, peer: str, source: int, address: int, size_bytes: int) -> None:
        """Write to a peer; Unavailable when it was refused."""
        code = self._engine.transfer_sync_write(peer, source, address, size_bytes)
        if code != 0:
            raise Unavailable(f"transfer engine: write to {peer} failed with {code}")


def _listeners() -> Iterator[socket.socket]:
    """This process's listening sockets: the engine tells neither their numbers nor their ports."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # The descriptor of the listing itself.
        with copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield copy


# Classic BPF of the kernel: (code, jump if true, jump if false, operand). The packet's network
# header is read at offsets from SKF_NET_OFF.
_NET: Final = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _AND, _IS, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_FROM_THIS_HOST: Final = (
    (_LOAD_BYTE, 0, 0, _NET),  # version and header length
    (_AND, 0, 0, 0xF0),
    (_IS, 0, 3, 0x40),  # not IPv4: go on at the IPv6 source
    (_LOAD_WORD, 0, 0, _NET + 12),
    (_AND, 0, 0, 0xFF000000),
    (_IS, 8, 9, 0x7F000000),  # 127.0.0.0/8
    (_LOAD_WORD, 0, 0, _NET + 8),  # ::1, word by word
    (_IS, 0, 7, 0),
    (_LOAD_WORD, 0, 0, _NET + 12),
    (_IS, 0, 5, 0),
    (_LOAD_WORD, 0, 0, _NET + 16),
    (_IS, 0, 3, 0),
    (_LOAD_WORD, 0, 0, _NET + 20),
    (_IS, 0, 1, 1),
    (_RETURN, 0, 0, 0xFFFFFFFF),  # keep the packet
    (_RETURN, 0, 0, 0),  # drop it
)


def _confine(listener: socket.socket) -> None:
    """Have the kernel drop what reaches a listener from other hosts.

    The engine listens on every interface, whatever address it is given, and asks nobody for a
    proof. Connections that a listener accepts inherit its filter.
    """
    code = b"".join(struct.pack("HBBI", *step) for step in _FROM_THIS_HOST)
    held = bytearray(code)
    program = struct.pack("HL", len(_FROM_THIS_HOST), address_of(memoryview(held)))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
