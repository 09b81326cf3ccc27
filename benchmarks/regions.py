"""Page-sized stretches of populated memory, the bytes that go into them, and the memcpy baseline.

Bytes are a function of the place, so that another process can make the same ones and compare.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from typing import Final

from benchmarks.harness import MIB, Sample

# Above the last-level cache of the machines we know: a smaller set would measure the cache.
ROTATING_BYTES: Final = 256 * MIB
_BLOCK: Final = 16 * MIB
_TURN: Final = 4099


class Ring:
    """Memory that somebody holds, used as a ring of batches of pages."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Where it is."""
        self.address = address
        self.size_bytes = size_bytes

    def offsets(self, turn: int, page_bytes: int, pages: int) -> list[int]:
        """Where the pages of batch number `turn` lie; batches follow each other around the ring."""
        batch = page_bytes * pages
        start = turn % (self.size_bytes // batch) * batch
        return [start + i * page_bytes for i in range(pages)]


class Region(Ring):
    """Anonymous memory, populated, aligned to a memory page."""

    def __init__(self, size_bytes: int, *, seed: int | None = None) -> None:
        """Zeros, or bytes made from `seed`."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._map = mmap.mmap(-1, size_bytes, flags=flags)
        super().__init__(ctypes.addressof(ctypes.c_char.from_buffer(self._map)), size_bytes)
        if seed is not None:
            fill(memoryview(self._map), seed)

    @property
    def view(self) -> memoryview:
        """All of it."""
        return memoryview(self._map)


def fill(view: memoryview, seed: int) -> None:
    """Write bytes that depend on the seed and the place; no two stretches of 16 MiB are alike."""
    block = random.Random(seed).randbytes(_BLOCK)
    for number, start in enumerate(range(0, len(view), _BLOCK)):
        size = min(_BLOCK, len(view) - start)
        # The same random bytes, each time begun somewhere else: much faster than fresh ones.
        turned = memoryview(block[number * _TURN :] + block[: number * _TURN])
        view[start : start + size] = turned[:size]


def same(a: int, b: int, nbytes: int) -> bool:
    """Compare the memory at two addresses."""
    return int(_memcmp(a, b, nbytes)) == 0


_memcmp: Final = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def memcpy(source: Ring, into: Ring, turn: int, page_bytes: int, pages: int) -> Sample:
    """Copy one batch page by page in this thread: the yardstick of one-host figures."""
    pairs = [
        (into.address + to, source.address + at)
        for to, at in zip(
            into.offsets(turn, page_bytes, pages),
            source.offsets(turn, page_bytes, pages),
            strict=True,
        )
    ]
    started, cpu = time.perf_counter(), time.process_time()
    for to, at in pairs:
        ctypes.memmove(to, at, page_bytes)
    seconds = time.perf_counter() - started
    return Sample(seconds, page_bytes * pages, time.process_time() - cpu)
