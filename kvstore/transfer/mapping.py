"""Read-only mappings of segment files that live exactly as long as views of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import Final

from kvstore.errors import Unavailable

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MMAP: Final = _LIBC.mmap
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_MUNMAP: Final = _LIBC.munmap
_MUNMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED: Final = ctypes.c_void_p(-1).value


class Mapping:
    """`length` bytes of a file, mapped read-only and shared.

    Unlike mmap.mmap it keeps no descriptor of its own: a copy of it in a forked child would hold
    this session's locks for as long as the child lives.
    """

    def __init__(self, fd: int, length: int) -> None:
        """Raises Unavailable when the file is shorter (reading there would kill us) or cannot be
        mapped. The caller keeps the descriptor."""
        actual = os.fstat(fd).st_size
        if actual < length:
            raise Unavailable(f"segment file: {actual} bytes, its geometry needs {length}")
        address = _MMAP(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            raise Unavailable(f"segment file: {os.strerror(ctypes.get_errno())}")
        self.address: int = address
        self.length = length
        weakref.finalize(self, _MUNMAP, address, length).atexit = False

    def view(self) -> memoryview:
        """All bytes, read-only; the mapping stays until this and every slice of it are gone.

        Every call makes a view with an owner of its own (see `end_view`).
        """
        owner = (ctypes.c_ubyte * self.length).from_address(self.address)
        owner.mapping = self  # type: ignore[attr-defined]  # what keeps us alive, as it says
        return memoryview(owner).toreadonly().cast("B")


def end_view(view: memoryview) -> object | None:
    """Release a `Mapping.view`. Whoever still uses its memory in another way, else None.

    A slice or an array made of the view keeps the owner alive, and with it this reference to it.
    """
    owner = weakref.ref(view.obj)
    with suppress(BufferError):
        view.release()
    return owner()
