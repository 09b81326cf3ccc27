"""Addresses of buffers, and copies between them that release the interpreter lock.

The one place with pointer arithmetic on the client's side. Bounds are the callers' to check.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.buffer import Buffer

copy_bytes: Final = ctypes.memmove
"""copy_bytes(to address, from address, bytes): memcpy speed, without the interpreter lock."""

zero_bytes: Final = ctypes.memset


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython's stable interface (PEP 3118)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_GET: Final = ctypes.pythonapi.PyObject_GetBuffer
_GET.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_RELEASE: Final = ctypes.pythonapi.PyBuffer_Release
_RELEASE.argtypes = [ctypes.POINTER(_PyBuffer)]
_RELEASE.restype = None


def address_of(view: memoryview) -> int:
    """Where a contiguous view's bytes lie; valid while something keeps them there."""
    held = _PyBuffer()
    _GET(view, ctypes.byref(held), 0)
    address = held.buf or 0
    _RELEASE(ctypes.byref(held))
    return address


_MADVISE: Final = ctypes.CDLL(None, use_errno=True).madvise
_MADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, size_bytes: int, advice: int) -> bool:
    """Map the pages of a page-aligned range now (MADV_POPULATE_READ 22, _WRITE 23).

    Releases the interpreter lock. False where the kernel (before 5.14) cannot: then the first
    touch of each page is slow, and nothing else differs.
    """
    return bool(_MADVISE(address, size_bytes, advice) == 0)


def check_places(field: str, places: Sequence[int], size_bytes: int, in_bytes: int) -> None:
    """BadValue unless `size_bytes` at each place lie inside `in_bytes`."""
    room = in_bytes - size_bytes
    if places and not (min(places) >= 0 and max(places) <= room):
        bad = next(place for place in places if not 0 <= place <= room)
        want = f"0 to {room}, for {size_bytes} bytes in a buffer of {in_bytes}"
        raise BadValue(field, bad, want)


class Memory:
    """Bytes of this process that pages come from or go to: a view, and its address.

    `buffer` is set when they belong to a store's Buffer, which workers can reach by themselves.
    """

    __slots__ = ("address", "buffer", "size_bytes", "view")

    def __init__(self, view: memoryview, address: int, buffer: Buffer | None = None) -> None:
        """Take a flat view of unsigned bytes that starts at `address`."""
        self.view = view
        self.address = address
        self.size_bytes = len(view)
        self.buffer = buffer

    @classmethod
    def of(cls, field: str, source: object, writable: bool) -> Memory:
        """Wrap any contiguous buffer; BadValue naming `field` when it is none or is read-only."""
        try:
            view = memoryview(source)  # type: ignore[arg-type]  # the check is this very call
            flat = view.cast("B")
        except (TypeError, ValueError) as error:
            raise BadValue(field, source, "a contiguous buffer of bytes") from error
        if writable and flat.readonly:
            raise BadValue(field, source, "a writable buffer")
        return cls(flat, address_of(flat) if len(flat) else 0)

    def check_places(self, field: str, places: Sequence[int], size_bytes: int) -> None:
        """Raise BadValue unless `size_bytes` at each place lie inside; nothing is sent before."""
        check_places(field, places, size_bytes, self.size_bytes)

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Zero `size_bytes` at each place: refused bytes must not reach anybody."""
        for place in places:
            zero_bytes(self.address + place, 0, size_bytes)
