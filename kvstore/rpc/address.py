"""Addresses of listeners, "host:port" and "unix:/path", and sockets bound to them.

Owns the rule that a listener without a cluster secret stays on its own host. It knows nothing of
frames.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, ConfigError
from kvstore.require import require

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIX_PREFIX: Final = "unix:"
UNIX_PATH_BYTES_MAX: Final = 107
"""sockaddr_un has 108 bytes, the last one zero."""
_PORT_MAX: Final = 65_535
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A host that vanished without a word is noticed within a minute,"""
UNACKNOWLEDGED_MAX_S: Final = 2 * limits.SEND_STALL_MAX_S
"""and after so long while something is on its way to it: the kernel alone tries for a quarter of an
hour, in which every call would wait in vain."""
RETRIES_MIN: Final = 2
"""Times that the kernel has sent the same bytes again, in vain so far, after which the way there
counts as gone: 0.6 s. One is what a single lost packet takes."""
_RETRANSMITS: Final = 2
"""Which byte of the kernel's `struct tcp_info` counts them."""
LOCAL_SEND_BYTES: Final = 384 * limits.KIB
"""Sent and not yet taken, between two processes of one host. The kernel's own choice grows beyond
the caches: measured, a stream then takes twice as long and half as much processor time again."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host name or IP address, and a port; port 0 binds a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        return UNIX_PREFIX + self.path


AnyAddress = TcpAddress | UnixAddress


def parse_address(text: str) -> AnyAddress:
    """The address that `text` names; BadValue when it names none."""
    require("address", text, str, "host:port or unix:/path")
    if text.startswith(UNIX_PREFIX):
        path = text[len(UNIX_PREFIX) :]
        if not 0 < len(os.fsencode(path)) <= UNIX_PATH_BYTES_MAX or "\0" in path:
            raise BadValue("address", text, f"a path of 1 to {UNIX_PATH_BYTES_MAX} bytes")
        return UnixAddress(path)
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadValue("address", text, "brackets around an IPv6 host")
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(_PORT_MAX))
    if not (separator and host and is_number and int(port) <= _PORT_MAX):
        raise BadValue("address", text, "host:port or unix:/path")
    return TcpAddress(host, int(port))


def socket_path(field: str, folder: Path, name: Path) -> Path:
    """Where a server's Unix socket is, for processes with other working directories: `name`,
    below `folder` unless it begins with a slash.

    BadValue, for that field, when no socket can be there.
    """
    path = os.path.abspath(folder / name)
    try:
        fits = len(path.encode()) <= UNIX_PATH_BYTES_MAX and "\0" not in path
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise BadValue(field, path, f"a path of at most {UNIX_PATH_BYTES_MAX} bytes of UTF-8")
    return Path(path)


def is_local(sock: socket.socket) -> bool:
    """Whether the other end of a connected socket is on this host."""
    try:
        return sock.family == socket.AF_UNIX or is_loopback_peer(sock.getpeername())
    except OSError:
        return False


def is_loopback_peer(peer_name: object) -> bool:
    """Whether that is the name of a TCP peer on this host, as `getpeername` gives it."""
    return isinstance(peer_name, tuple) and _is_loopback(peer_name[0])


def is_cut_off(sock: socket.socket) -> bool:
    """Whether nobody confirms what is sent there. A host does, however busy its processes are."""
    if sock.family == socket.AF_UNIX:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITS + 1)
    except OSError:  # it is closed
        return False
    return info[_RETRANSMITS] >= RETRIES_MIN


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and notice a dead host.

    Towards other hosts buffer sizes are left to the kernel, which knows the way's delay.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)
        patience_ms = int(UNACKNOWLEDGED_MAX_S * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        if is_local(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)


def why(error: OSError) -> str:
    """What went wrong, without the addresses and numbers that asyncio adds."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def bind(address: str, secret: bytes | None) -> socket.socket:
    """A listening socket. A Unix one has mode 0600 and replaces a dead socket file.

    ConfigError, naming the address, when it is taken, not this host's, or open to other hosts
    without a secret.
    """
    where = parse_address(address)
    with _named(where):
        return _bind_unix(where) if isinstance(where, UnixAddress) else _bind_tcp(where, secret)


def require_free(path: Path) -> None:
    """Remove the Unix socket that a killed listener left there.

    ConfigError, naming the path, when a listener lives, or another file is there.
    """
    where = UnixAddress(str(path))
    with _named(where):
        _remove_dead_socket(where)


def bound_address(sock: socket.socket) -> str:
    """Where a listening socket listens, as text that `parse_address` takes; ports are real."""
    if sock.family == socket.AF_UNIX:
        return str(UnixAddress(sock.getsockname()))
    host, port = sock.getsockname()[:2]
    return str(TcpAddress(host, port))


def _is_loopback(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def _bind_tcp(where: TcpAddress, secret: bytes | None) -> socket.socket:
    found = socket.getaddrinfo(
        where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, target = found[0]
    if secret is None and not _is_loopback(str(target[0])):
        raise ConfigError(
            f"{where} can be reached from other hosts: set a cluster secret or listen on 127.0.0.1"
        )
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(limits.GREETINGS_MAX)
        undo.pop_all()
    return sock


@contextlib.contextmanager
def _named(where: AnyAddress) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error


def _bind_unix(where: UnixAddress) -> socket.socket:
    _remove_dead_socket(where)
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # The mode holds from the first moment: until listen() nobody can connect.
        sock.bind(where.path)
        os.chmod(where.path, stat.S_IRUSR | stat.S_IWUSR)
        sock.listen(limits.GREETINGS_MAX)
        undo.pop_all()
    return sock


def _remove_dead_socket(where: UnixAddress) -> None:
    """Remove what a killed listener left. ConfigError when one lives, or it is another file."""
    try:
        mode = os.lstat(where.path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{where.path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one that lives and takes nobody up would be waited for
        try:
            probe.connect(where.path)
        except ConnectionRefusedError:
            os.unlink(where.path)
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another process listens on {where}")
