"""Memory of a device: blocks of it, copies into and out of them, and handles for other processes.

The port, and the device `cpu`, whose memory is the host's: everything above the port runs on it
alike. Owns bounds and lifetimes. Must not know pages, segments or torch (kvstore.transfer.cuda).
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from kvstore.errors import BadValue, BufferClosed, ConfigError, OutOfSpace
from kvstore.require import require
from kvstore.transfer.buffer import Buffer, require_sealed
from kvstore.transfer.mapping import Mapping
from kvstore.transfer.memory import check_places, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.transfer.memory import Memory

CPU: Final = "cpu"


class Move(NamedTuple):
    """One copy of `size_bytes`. What `to` and `source` count from, the call says."""

    to: int
    source: int
    size_bytes: int


class Handle(msgspec.Struct, frozen=True, gc=False):
    """How another process of this machine opens a block. Descriptors may have to ride along."""

    device: str
    """The `identity` of the device that the memory is on."""
    size_bytes: int
    ipc: bytes = b""
    """The driver's name of the allocation that the block lies in."""
    offset: int = 0
    """Where in that allocation."""


class Device(Protocol):
    """One device. Thread-safe; copies release the interpreter lock."""

    name: str
    """What a configuration calls it: `cpu`, `cuda:0`."""
    identity: str
    """The same for every process of this machine, however it numbers its devices."""
    is_read_only_enforced: bool
    """Whether the system keeps a process from writing into blocks it opened, or only we do."""

    @property
    def free_bytes(self) -> int:
        """What `allocate` may hope for."""
        ...

    def allocate(self, size_bytes: int) -> Block:
        """A block of `size_bytes` > 0, contents undefined. OutOfSpace with both numbers.

        Unavailable where the device fails.
        """
        ...

    def wrap(self, address: int, size_bytes: int, owner: object) -> Block:
        """Somebody's memory on this device as a block, which keeps `owner` alive."""
        ...

    def open(self, handle: Handle, descriptors: Sequence[int]) -> Block:
        """Another process's block, to read from; the descriptors are consumed.

        BadValue for a handle that is not of this device or names more than it holds, Unavailable
        when the memory is gone.
        """
        ...

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy between addresses of this device and the host. All is done when it returns.

        Unavailable where the device fails: then any part of it may have been copied.
        """
        ...

    def asked(self) -> Callable[[], object]:
        """Take note of what this thread has asked of the device so far, such as a model's step.

        The result returns when that is done, in whichever thread it is called: which work a
        program is at, only the thread knows that asked for it. Unavailable where the device fails.
        """
        ...

    def pin(self, address: int, size_bytes: int) -> Callable[[], object]:
        """Make copies from and to this host memory fast; call the result before it is unmapped."""
        ...

    def trim(self) -> None:
        """Give memory of closed blocks back to the system, where it is kept for reuse."""
        ...


class Holding(Protocol):
    """What is behind a block's address."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """See Block.descriptors."""
        ...

    def export(self, address: int, size_bytes: int) -> Handle:
        """See Block.export."""
        ...

    def close(self) -> None:
        """Let the memory go. Called once."""
        ...


class Block:
    """A stretch of a device's memory. Offsets are of the block; each range is checked.

    Every copy must have returned before `close`.
    """

    def __init__(
        self, device: Device, address: int, size_bytes: int, held: Holding, *, is_writable: bool
    ) -> None:
        """For devices. `held` is let go by `close`, or with the last reference to the block."""
        self.device: Final = device
        self.size_bytes: Final = size_bytes
        self.is_writable: Final = is_writable
        self._address = address
        self._held = held
        self._close = weakref.finalize(self, held.close)
        self._close.atexit = False

    @property
    def address(self) -> int:
        """Where it lies on the device, for this process. BufferClosed after `close`."""
        if not self._close.alive:
            raise BufferClosed(f"a block of {self.size_bytes} bytes on {self.device.name}")
        return self._address

    def check_places(self, field: str, places: Sequence[int], size_bytes: int) -> None:
        """Raise BadValue unless `size_bytes` at each place lie inside; nothing is sent before."""
        check_places(field, places, size_bytes, self.size_bytes)

    def copy_from(self, source: Memory | Block, moves: Iterable[Move]) -> None:
        """Copy into this block, out of host memory or another block of this device.

        `to` is an offset here, `source` one there. BadValue, and nothing copied, for a range
        outside of either or for a block that this process only opened.
        """
        if not self.is_writable:
            raise BadValue("block", "one of another process", "a block of this process")
        self.device.copy(_absolute(self, source, moves))

    def copy_to(self, memory: Memory, moves: Iterable[Move]) -> None:
        """Copy out of this block into host memory; `to` is an offset there, `source` one here."""
        self.device.copy(_absolute(memory, self, moves))

    def export(self) -> Handle:
        """A handle for other processes; `descriptors` must ride along.

        BadValue for memory that cannot be shared. They must have closed theirs before this closes.
        """
        return self._held.export(self.address, self.size_bytes)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What rides along with the handle; this block's, valid until `close`."""
        return self._held.descriptors

    def close(self) -> None:
        """Let the memory go. Safe to repeat."""
        self._close()


def _absolute(to: Memory | Block, source: Memory | Block, moves: Iterable[Move]) -> list[Move]:
    """The moves in addresses, all of them checked."""
    to_room, source_room = to.size_bytes, source.size_bytes
    to_base, source_base = to.address, source.address
    found = []
    for move in moves:
        at, place, size = move
        if size < 0 or not (0 <= at <= to_room - size and 0 <= place <= source_room - size):
            want = f"{size} bytes inside {to_room} (to) and {source_room} (source)"
            raise BadValue("move", move, want)
        found.append(Move(to_base + at, source_base + place, size))
    return found


class _Shared:
    """A sealed memfd that a block of the device `cpu` lies in."""

    def __init__(self, size_bytes: int, on_close: Callable[[int], object]) -> None:
        self._buffer = Buffer(0, size_bytes)
        self._on_close = on_close
        self.address = self._buffer.address
        self.descriptors = (self._buffer.descriptor(),)

    def export(self, address: int, size_bytes: int) -> Handle:
        del address
        return Handle(CPU, size_bytes)

    def close(self) -> None:
        self._on_close(self.address)
        self._buffer.close()


class _Opened:
    """A mapping of another process's memfd, read-only. Ends with the last reference to it."""

    descriptors = ()

    def __init__(self, mapping: Mapping) -> None:
        self._mapping: Mapping | None = mapping

    def export(self, address: int, size_bytes: int) -> Handle:
        raise BadValue("block", (address, size_bytes), "a block of this process")

    def close(self) -> None:
        self._mapping = None


class _Wrapped:
    """Host memory of somebody else."""

    descriptors = ()

    def __init__(self, owner: object) -> None:
        self._owner: object = owner

    def export(self, address: int, size_bytes: int) -> Handle:
        raise BadValue("block", (address, size_bytes), "memory that the device allocated")

    def close(self) -> None:
        self._owner = None


class CpuDevice:
    """Host memory in the place of a device's: of `capacity_bytes`, by default all there is."""

    name = identity = CPU
    is_read_only_enforced = True

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Nothing is allocated yet."""
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._capacity = installed if capacity_bytes is None else capacity_bytes
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """What is left of the capacity."""
        return self._capacity - sum(list(self._taken.values()))

    def allocate(self, size_bytes: int) -> Block:
        """See Device.allocate."""
        require_size(size_bytes)
        if size_bytes > self.free_bytes:
            raise out_of_space(self, size_bytes)
        held = _Shared(size_bytes, self._taken.pop)
        self._taken[held.address] = size_bytes
        return Block(self, held.address, size_bytes, held, is_writable=True)

    def wrap(self, address: int, size_bytes: int, owner: object) -> Block:
        """See Device.wrap."""
        return Block(self, address, size_bytes, _Wrapped(owner), is_writable=True)

    def open(self, handle: Handle, descriptors: Sequence[int]) -> Block:
        """See Device.open."""
        try:
            require_device(self, handle)
            if len(descriptors) != 1:
                raise BadValue("descriptors", len(descriptors), "1, a memfd")
            require_sealed(descriptors[0], handle.size_bytes)
            mapping = Mapping(descriptors[0], handle.size_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        held = _Opened(mapping)
        return Block(self, mapping.address, handle.size_bytes, held, is_writable=False)

    def copy(self, moves: Sequence[Move]) -> None:
        """See Device.copy."""
        for to, source, size_bytes in moves:
            copy_bytes(to, source, size_bytes)

    def asked(self) -> Callable[[], object]:
        """Nothing of a processor's own is ever under way."""
        return _nothing

    def pin(self, address: int, size_bytes: int) -> Callable[[], object]:
        """Host memory is as fast as it gets."""
        del address, size_bytes
        return _nothing

    def trim(self) -> None:
        """A closed block's memory is gone already."""


def _nothing() -> None:
    """Undo a pin that did nothing, or wait for nothing."""


def require_size(size_bytes: int) -> None:
    """BadValue unless a block can have this size."""
    require("size_bytes", size_bytes, int, "at least 1")
    if size_bytes <= 0:
        raise BadValue("size_bytes", size_bytes, "at least 1")


def require_device(device: Device, handle: Handle) -> None:
    """BadValue unless the handle is of memory on this device."""
    if handle.device != device.identity:
        raise BadValue("handle.device", handle.device, device.identity)


def out_of_space(device: Device, size_bytes: int) -> OutOfSpace:
    """The error for a block that does not fit."""
    return OutOfSpace(
        f"{device.name} has {device.free_bytes} bytes free, a block needs {size_bytes}: lend less, "
        "or end what else uses the device"
    )


def open_device(name: str) -> Device:
    """The device that a configuration calls `name`. ConfigError, naming those there are."""
    if name == CPU:
        return CpuDevice()
    # Only who asks for such a device loads torch.
    from kvstore.transfer.cuda import CudaDevice, cuda_devices

    there = [CPU, *cuda_devices()]
    if name not in there:
        raise ConfigError(f"device: got {name!r}, want one of {', '.join(there)}")
    return CudaDevice(int(name.partition(":")[2]))
