"""A transfer engine in a child process, as its parent holds it: with deadlines, and with an end.

Why a child: the engine waits by spinning, cannot cancel and gives up after 30 s; what
it was told to move may arrive later still. Ending the process is the one fence there is, and
reading from a child costs nothing measurable beside it (benchmarks/results). Workers and clients
use the same child; what is mapped and served differs.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import msgspec

from kvstore.errors import (
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    MalformedMessage,
    OutOfSpace,
    Unavailable,
)
from kvstore.rpc.failure import error_of
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.transfer.data_links import reply_to
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.engine import (
    EngineMap,
    EngineMapBlock,
    EngineMapped,
    EngineOpen,
    EngineOpened,
    EnginePull,
    EnginePush,
    EngineUnmap,
)
from kvstore.wire.messages.hello import Done, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.transfer.device import Block
    from kvstore.wire.messages.base import Message

M = TypeVar("M", bound="Message")
T = TypeVar("T", bound="Held")

BUILDS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-rocm",
    "mooncake-transfer-engine-npu",
)
VERSION_MIN: Final = (0, 3, 13, 1)
"""0.3.13.post1. Before 0.3.12 transfers were torn after success, and any address was writable."""
PROTOCOL_SWITCH: Final = "MC_TCP_PROTO"
START_TIMEOUT_S: Final = 20.0
MAP_TIMEOUT_S: Final = 60.0
"""Registering and touching hundreds of gigabytes takes this long."""
LOG_BYTES_MAX: Final = 64 * 1024


class EngineSettings(msgspec.Struct, frozen=True):
    """How to start engines. `host` is this machine's name or address as peers know it."""

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""

    @property
    def confined(self) -> bool:
        """Whether only this host may reach the engine, because it was given a loopback address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def read_only(self) -> bool:
        """Whether a peer's write into served memory is refused, rather than merely not done.

        RDMA and CUDA IPC register writable memory: read-only is a convention there.
        """
        return self.protocol == "tcp"


def check_installed() -> str:
    """The engine's version. ConfigError, naming what is wrong, when it may not be used."""
    if os.environ.get(PROTOCOL_SWITCH) == "1":
        raise ConfigError(
            f"{PROTOCOL_SWITCH}: got 1, want it unset: writes of protocol 1 are not acknowledged"
        )
    # Only now: it takes an eighth of a worker's start, also of one that does without the engine.
    import importlib.metadata

    for build in BUILDS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return check_version(build, importlib.metadata.version(build))
    raise ConfigError(
        "transport mooncake: the transfer engine is not installed; install one of kvharbor[cpu], "
        "kvharbor[cuda12], kvharbor[cuda13], kvharbor[rocm], kvharbor[npu]"
    )


def check_version(build: str, version: str) -> str:
    """`version` again; ConfigError when that release of `build` may not be used."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?.*", version)
    numbers = tuple(int(part or 0) for part in found.groups()) if found else ()
    if numbers < VERSION_MIN:
        raise ConfigError(f"{build}: got version {version}, want at least 0.3.13.post1")
    return version


class EngineProcess:
    """One child with one engine. One request at a time; `kill` may come from any thread.

    When a request raises anything but a refusal by us, the process has ended before it raises: no
    byte of it will be written any more.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Start it. ConfigError when the engine does not start."""
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._regions = 0
        self._requests = 0
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                self._log = _small_file()
                undo.callback(os.close, self._log)
                self._process = _spawn(theirs, self._log)
            self._link = FrameSocket(ours)
            undo.callback(self.kill)
            opening = EngineOpen(
                settings.host, settings.protocol, settings.device, settings.confined
            )
            try:
                opened = self._call(opening, EngineOpened, time.monotonic() + START_TIMEOUT_S)
            except Unavailable as error:
                raise ConfigError(f"transfer engine does not start: {error}") from error
            self.peer = opened.peer
            """What peers call this engine: host:port."""
            undo.pop_all()

    @property
    def alive(self) -> bool:
        """Whether requests can still be answered."""
        return self._pid == os.getpid() and self._process.poll() is None

    @property
    def child_pid(self) -> int:
        """The process that ends with this object."""
        return self._process.pid

    def map(
        self, fd: int, file_offset: int, size_bytes: int, *, writable: bool, served: bool
    ) -> tuple[int, int]:
        """Map a stretch of a file there: (region number, address for peers).

        The child keeps a copy of `fd`, and with it the file's locks, until it ends.
        """
        self._regions += 1
        message = EngineMap(self._regions, file_offset, size_bytes, writable, served)
        deadline_s = time.monotonic() + MAP_TIMEOUT_S
        return message.region, self._call(message, EngineMapped, deadline_s, (fd,)).address

    def map_block(self, block: Block) -> tuple[int, int]:
        """Open a block of this process there, for peers to read: (region number, address).

        It has to stay until the region is unmapped, or the process has ended. BadValue for memory
        that cannot be shared.
        """
        handle = block.export()
        self._regions += 1
        message = EngineMapBlock(
            self._regions, block.device.name, handle.device, handle.size_bytes, handle.ipc,
            handle.offset,
        )  # fmt: skip
        deadline_s = time.monotonic() + MAP_TIMEOUT_S
        mapped = self._call(message, EngineMapped, deadline_s, block.descriptors)
        return message.region, mapped.address

    def unmap(self, region: int) -> None:
        """Serve a region no more."""
        self._call(EngineUnmap(region), Done, time.monotonic() + MAP_TIMEOUT_S)

    def pull(self, message: EnginePull, deadline_s: float) -> None:
        """Read pages from a peer. Raises only once this process has ended: nothing comes later."""
        try:
            self._call(message, Done, deadline_s)
        except KVStoreError:
            self.kill()
            raise

    def push(self, message: EnginePush, deadline_s: float) -> bool:
        """Try to write to a peer; whether it went through."""
        try:
            self._call(message, Done, deadline_s)
        except Unavailable:
            return not self.alive
        return True

    def kill(self) -> None:
        """End the process, wherever it is, and return when it is gone. Safe to repeat.

        The wait has no bound on purpose: until the kernel has reaped it, it may write.
        """
        if self._pid != os.getpid():
            return  # A forked copy of the parent: the child is not ours.
        self._process.kill()
        self._process.wait()
        self._link.shutdown()

    def close(self) -> None:
        """End the process and free what it took here."""
        self.kill()
        with self._busy:
            self._link.close()
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    def _call(
        self, message: Message, want: type[M], deadline_s: float, fds: Sequence[int] = ()
    ) -> M:
        """One request and its reply; the process is ended when the reply does not come."""
        with self._busy:
            if not self.alive:
                raise Unavailable("transfer engine: its process has ended")
            self._requests += 1
            try:
                self._link.send(FrameKind.REQUEST, self._requests, message, fds)
                reply = reply_to(self._requests, self._link, deadline_s)
            except DeadlineExceeded as error:
                self.kill()
                name = type(message).__name__
                raise DeadlineExceeded(f"transfer engine: {name} ended by its deadline") from error
            except (Unavailable, MalformedMessage) as error:
                self.kill()
                raise Unavailable(f"transfer engine: its process ended. {self._said()}") from error
        if isinstance(reply, Failure):
            raise error_of(reply)
        assert isinstance(reply, want), (message, reply)
        return reply

    def _said(self) -> str:
        """The end of what the engine logged."""
        tail = os.pread(self._log, LOG_BYTES_MAX, 0).rstrip(b"\0").decode(errors="replace")
        return " / ".join(tail.strip().splitlines()[-3:])


def _spawn(theirs: socket.socket, log: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "kvstore.transfer.mooncake_child", str(theirs.fileno())]
    environment = {"MC_LOG_LEVEL": "ERROR", **os.environ}
    environment.pop(PROTOCOL_SWITCH, None)
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        pass_fds=(theirs.fileno(),), env=environment,
    )  # fmt: skip


def _small_file() -> int:
    """A file in memory that takes the first LOG_BYTES_MAX bytes written and no more."""
    fd = os.memfd_create("kvharbor-engine-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LOG_BYTES_MAX)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


class Held(Protocol):
    """Something with an engine process inside."""

    @property
    def alive(self) -> bool:
        """Whether it can be used again."""
        ...

    def close(self) -> None:
        """End the process and free what goes with it."""
        ...


class ProcessPool(Generic[T]):
    """Engine processes, each used by one thread at a time, made when needed.

    A pull that must be ended takes its own process with it and nobody else's pull: hence as many
    processes as pulls at once, at most `size` (each waits by spinning, so few are enough).
    """

    def __init__(self, make: Callable[[], T], size: int) -> None:
        """`make` may raise; nothing is made before it is needed."""
        self._make = make
        self._room = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: list[T] = []
        self._closed = False

    @contextlib.contextmanager
    def one(self, deadline_s: float) -> Iterator[T]:
        """Lend one out. OutOfSpace when all are in use until the deadline."""
        if not self._room.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise OutOfSpace("transfer engine: every process is busy")
        try:
            each = self._taken() or self._make()
            try:
                yield each
            finally:
                self._put_back(each)
        finally:
            self._room.release()

    def _taken(self) -> T | None:
        with self._lock:
            if self._closed:
                raise Unavailable("transfer engine: closed")
            while self._idle:
                each = self._idle.pop()
                if each.alive:
                    return each
                each.close()
            return None

    def _put_back(self, each: T) -> None:
        with self._lock:
            if each.alive and not self._closed:
                self._idle.append(each)
                return
        each.close()

    def close(self) -> None:
        """End the idle ones now, and those in use when they are put back. Safe to repeat."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()
