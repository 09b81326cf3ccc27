"""A host that vanishes, for the sockets of one process. Not a test."""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Final

SO_ATTACH_FILTER: Final = 26
DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: return 0 bytes


def vanish(sock: socket.socket) -> None:
    """Have the kernel drop whatever arrives for this socket, acknowledgements included."""
    program = ctypes.create_string_buffer(DROP_ALL)
    described = struct.pack("HL", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)
