"""Going over from loopback TCP to a Unix socket of the same listener, which halves a round trip.

Owns what has to be true for that, for blocking diallers and those of an event loop alike; where
anything is not, the connection stays what it is, without a word: other containers, file systems
and users are no errors. A Unix address is taken from a greeting over loopback alone, and whoever
listens there must run as this process's user before a byte is said, then greet with the same
proof of the secret, in the same life. So a stranger that has taken the path learns nothing, not
even one who passes everything on to the true listener.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue
from kvstore.rpc.address import UnixAddress, is_loopback_peer, parse_address

if TYPE_CHECKING:
    from kvstore.wire.messages.hello import Welcome

PATIENCE_S: Final = 0.5
"""How long the second greeting may take, out of the dial's own time: the first one has shown that
the listener is awake."""
_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred: process, user, group."""


def connect_nearby(peer_name: object, welcomed: Welcome) -> socket.socket | None:
    """A socket connected to where the greeted peer of that name listens on this host, too.

    It does not block, nor does this call. None where there is no such place for this process.
    """
    if not welcomed.local_address or not is_loopback_peer(peer_name):
        return None
    with contextlib.ExitStack() as undo:
        try:
            where = parse_address(welcomed.local_address)
            if not isinstance(where, UnixAddress):
                return None
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            sock.connect(where.path)
            if _user_behind(sock) != os.geteuid():
                return None
        except (BadValue, OSError):
            return None
        undo.pop_all()
    return sock


def is_same_life(met: Welcome, again: Welcome) -> bool:
    """Whether two greetings were those of one listener, which has not been started in between."""
    return bool(met.life) and (met.life, met.epoch) == (again.life, again.epoch)


def _user_behind(sock: socket.socket) -> int:
    """Who called listen at the other end, as the kernel knows it."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
