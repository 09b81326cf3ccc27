"""Memory that a program names by address and size: registered regions, gathering, scattering.

The addresses are the program's word, as they are with Mooncake: a wrong one ends the process.
"""

from __future__ import annotations

import ctypes
from operator import index
from typing import TYPE_CHECKING, Final

from kvstore.connectors.mooncake.codes import Code
from kvstore.transfer.memory import Memory, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Slices = tuple[tuple[int, int], ...]
"""(address, size) of stretches that together are one object, in order."""

FIRST_ADDRESS: Final = 4096
_LAST_ADDRESS: Final = 1 << 47
"""User space ends there, and nobody has the first page."""
_WRITABLE: Final = 0x200

_VIEW: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_VIEW.restype = ctypes.py_object
_VIEW.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def address_space() -> memoryview:
    """All of this process's memory as one buffer: byte `address - FIRST_ADDRESS` lies there.

    So one read goes to as many places as it likes, without a copy. Only those are touched.
    """
    view: memoryview = _VIEW(FIRST_ADDRESS, _LAST_ADDRESS - FIRST_ADDRESS, _WRITABLE)
    return view


def is_memory(address: int, size: int) -> bool:
    """Whether so many bytes can lie there at all."""
    return address >= FIRST_ADDRESS and 0 < size <= _LAST_ADDRESS - address


def place(address: int, size: int) -> tuple[int, int]:
    """As plain numbers, where a program names them by numpy's. TypeError for what is no number."""
    return index(address), index(size)


def slices_of(value: object) -> Slices:
    """Where the bytes of a buffer lie; valid while the caller keeps it.

    TypeError for what is no buffer, BadValue for one that does not lie row by row in one stretch.
    """
    view = memoryview(value)  # type: ignore[arg-type]  # the check is this very call
    memory = Memory.of("value", view, writable=False)
    return ((memory.address, memory.size_bytes),) if memory.size_bytes else ()


def joined(slices: Iterable[tuple[int, int]]) -> Slices:
    """The same bytes in as few stretches as can be."""
    found: list[tuple[int, int]] = []
    for address, size in slices:
        if found and sum(found[-1]) == address:
            found[-1] = found[-1][0], found[-1][1] + size
        elif size:
            found.append((address, size))
    return tuple(found)


def size_of(slices: Slices) -> int:
    """Bytes of all together."""
    return sum(size for _, size in slices)


def cut(slices: Slices, start: int, size: int) -> Slices:
    """The stretches of bytes [start, start + size)."""
    found: list[tuple[int, int]] = []
    at = 0
    for address, length in slices:
        first, last = max(start, at), min(start + size, at + length)
        if first < last:
            found.append((address + first - at, last - first))
        at += length
    return tuple(found)


def gather(slices: Slices, to: int) -> None:
    """Copy the stretches to one place, one after the other."""
    for address, size in slices:
        copy_bytes(to, address, size)
        to += size


def scatter(source: int, slices: Slices) -> None:
    """Copy one place to the stretches."""
    for address, size in slices:
        copy_bytes(address, source, size)
        source += size


class Regions:
    """Memory that a program has registered. What is not is taken as well, as over TCP there."""

    def __init__(self) -> None:
        """Start with none."""
        self._sizes: dict[int, int] = {}

    def register(self, address: int, size: int) -> Code:
        """Note a region, once."""
        address, size = place(address, size)
        if not is_memory(address, size) or address in self._sizes:
            return Code.INVALID_PARAMS
        self._sizes[address] = size
        return Code.OK

    def unregister(self, address: int) -> Code:
        """Forget a region."""
        return Code.OK if self._sizes.pop(address, None) else Code.INVALID_PARAMS

    def holds(self, address: int, size: int) -> bool:
        """Whether such a stretch lies within one of them."""
        return any(
            start <= address and address + size <= start + length
            for start, length in list(self._sizes.items())
        )


def lengths_agree(*columns: Sequence[object]) -> bool:
    """Whether lists that belong together are equally long."""
    return len({len(column) for column in columns}) == 1
