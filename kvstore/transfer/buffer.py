"""Memory that workers of this host can pull from and that reads can land in: a sealed memfd.

Owns the life of one buffer. Must not know workers: whoever attached it is told through `uses`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue, BufferClosed, DeadlineExceeded, OutOfSpace
from kvstore.require import require
from kvstore.transfer.memory import Memory, address_of, populate

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGN_BYTES: Final = 4096
CLOSE_TIMEOUT_S: Final = 30.0
_MADV_POPULATE_WRITE: Final = 23


class BufferUse:
    """A use of a buffer, for one `with`."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer) -> None:
        """Use nothing yet."""
        self._buffer = buffer

    def __enter__(self) -> Memory:
        return self._buffer.begin_use()

    def __exit__(self, *_: object) -> None:
        self._buffer.end_use()


class Buffer:
    """A stretch of shared memory, 4 KiB aligned, that never shrinks (so no reader can crash).

    `view` is a writable memoryview: numpy.frombuffer(buffer.view) and torch.frombuffer(buffer.view)
    use it without copying. Belongs to the process that made it: a forked child is refused.
    """

    def __init__(self, number: int, size_bytes: int) -> None:
        """Allocate and touch `size_bytes` > 0 of memory. `number` names it to workers.

        OutOfSpace when this host has not so much.
        """
        require("size_bytes", size_bytes, int, "at least 1")
        if size_bytes <= 0:
            raise BadValue("size_bytes", size_bytes, "at least 1")
        self.number = number
        self.size_bytes = size_bytes
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._idle = threading.Condition(self._mutex)
        self._uses = 0
        self._closed = False
        self._on_close: list[Callable[[int], None]] = []
        length = (size_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES
        self._fd = sealed_memfd("kvharbor-buffer", length)
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        # The map lives as long as views of it do: this one until close, and those of callers.
        whole = _mapped(self._fd, length)
        self._view = memoryview(whole)[:size_bytes]
        self._address = address_of(self._view)
        # First touch runs at a tenth of memory speed: it is paid here, not by the first put.
        populate(self._address, length, _MADV_POPULATE_WRITE)

    @property
    def view(self) -> memoryview:
        """The whole buffer, writable. BufferClosed once it was closed."""
        self._check_open()
        return self._view

    @property
    def address(self) -> int:
        """Where the buffer lies in this process."""
        self._check_open()
        return self._address

    @property
    def memory(self) -> Memory:
        """The buffer as source or destination of a transfer."""
        self._check_open()
        return Memory(self._view, self._address, self)

    @property
    def closed(self) -> bool:
        """Whether new use is refused."""
        return self._closed or self._pid != os.getpid()

    def in_use(self) -> BufferUse:
        """Keep the buffer from being closed in a `with`. BufferClosed when it already is."""
        return BufferUse(self)

    def begin_use(self) -> Memory:
        """Put `close` off until `end_use`. For BufferUse."""
        if self._pid != os.getpid():
            self._check_open()  # First, because a forked child may have inherited a held lock.
        with self._mutex:
            if self._closed:
                self._check_open()
            self._uses += 1
        return Memory(self._view, self._address, self)

    def end_use(self) -> None:
        """Undo `begin_use`."""
        with self._mutex:
            self._uses -= 1
            if self._closed:
                self._idle.notify_all()

    def descriptor(self) -> int:
        """The memfd, to be sent to a worker; valid while in use."""
        self._check_open()
        return self._fd

    def on_close(self, call: Callable[[int], None]) -> None:
        """Have `call(number)` run when the buffer closes: a worker that attached it lets go."""
        with self._idle:
            self._check_open()
            if call not in self._on_close:
                self._on_close.append(call)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Refuse new use, wait for uses in flight, let workers go. Safe to repeat.

        Views that the caller still holds stay valid; the memory goes with the last of them.
        DeadlineExceeded when a use has not ended within `timeout_s`; the buffer stays refused.
        """
        if self.closed:
            return
        with self._idle:
            self._closed = True
            if not self._idle.wait_for(lambda: self._uses == 0, timeout_s):
                raise DeadlineExceeded(f"buffer {self.number}: still in use after {timeout_s} s")
            calls, self._on_close = self._on_close, []
        for call in calls:
            call(self.number)
        self._view = memoryview(b"")
        self._finalizer()

    def _check_open(self) -> None:
        if self._closed:
            raise BufferClosed(f"buffer {self.number} was closed")
        if self._pid != os.getpid():
            raise BufferClosed(f"buffer {self.number} belongs to process {self._pid}")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"Buffer({self.number}, {self.size_bytes} bytes, {state})"


def _mapped(fd: int, length: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, OverflowError) as error:
        raise OutOfSpace(f"a buffer of {length} bytes: {error}") from error


def sealed_memfd(name: str, length: int) -> int:
    """The descriptor of new shared memory of a length that nobody can change. OutOfSpace.

    It takes memory only as it is written to. `name` is what /proc shows.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise OutOfSpace(f"shared memory of {length} bytes: {error}") from error
    return fd


def require_sealed(fd: int, size_bytes: int) -> None:
    """BadValue unless a peer's descriptor is a memfd that always holds `size_bytes` > 0.

    A mapping of memory that shrinks kills the process that reads it.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadValue("buffer", "a descriptor of another kind", "a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BadValue("buffer", "a memfd that can shrink", "one sealed with F_SEAL_SHRINK")
    length = os.fstat(fd).st_size
    if not 0 < size_bytes <= length:
        raise BadValue("size_bytes", size_bytes, f"1 to {length}, the length of the memfd")
