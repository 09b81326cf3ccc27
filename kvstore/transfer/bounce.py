"""Host memory between a device and whoever must see the bytes: to hash, to send, to receive.

What lies on a device is hashed where the host can read it, so its checksums are taken of a copy
made here. Must not know segments or connections.
"""

from __future__ import annotations

import mmap
import threading
from array import array
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.page import checksum_seeds, seeded_checksum
from kvstore.transfer.device import Move
from kvstore.transfer.memory import Memory, zero_bytes
from kvstore.transfer.transport import even_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.transfer.device import Block, Device
    from kvstore.transfer.transport import IngestSpan, ReadSpan

BOUNCE_BYTES: Final = limits.CHUNK_BYTES
"""Room for the largest part."""
GROUP_BYTES: Final = 4 * limits.MIB
"""Copied at once, then hashed: enough for a device's link, and little for the host's cache."""
BUFFERS: Final = 2
"""One is copied into while the other is hashed, by two threads."""


class Bounces:
    """A few bounce buffers for one device. Thread-safe: who finds none waits.

    Whoever holds one must not wait for another of the same, but may for one of other Bounces. Nor
    may it wait for a peer: a wait for one is for work on this host, and has no deadline (I20).
    """

    def __init__(self, device: Device, size_bytes: int = BOUNCE_BYTES) -> None:
        """Allocate and pin them, each of `size_bytes`."""
        self._changed = threading.Condition()
        self._free: list[Memory] = []
        self._maps: list[mmap.mmap] = []
        self._unpins: list[Callable[[], object]] = []
        try:
            for _ in range(BUFFERS):
                self._maps.append(mmap.mmap(-1, size_bytes))
                memory = Memory.of("bounce", self._maps[-1], writable=True)
                self._free.append(memory)
                self._unpins.append(device.pin(memory.address, size_bytes))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def one(self) -> Iterator[Memory]:
        """A buffer of one's own for a `with`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            memory = self._free.pop()
        try:
            yield memory
        finally:
            with self._changed:
                self._free.append(memory)
                self._changed.notify()

    def close(self) -> None:
        """Unpin and unmap; nobody may hold one any more."""
        for unpin in self._unpins:
            unpin()
        for memory in self._free:
            memory.view.release()
        for each in self._maps:
            with suppress(BufferError):  # a view that a traceback still holds
                each.close()
        self._unpins, self._free, self._maps = [], [], []


def checksums(
    block: Block, places: Sequence[int], size_bytes: int, seeds: Sequence[int], bounces: Bounces
) -> list[int]:
    """XXH3-64 of `size_bytes` at each place of a block, as they lie there now.

    Whoever wrote them must be done: `Device.asked`.
    """
    found: list[int] = []
    with bounces.one() as bounce:
        step = max(1, min(GROUP_BYTES, bounce.size_bytes) // size_bytes)
        for first in range(0, len(places), step):
            group = places[first : first + step]
            ats = range(0, len(group) * size_bytes, size_bytes)
            moves = [Move(at, place, size_bytes) for at, place in zip(ats, group, strict=True)]
            block.copy_to(bounce, moves)
            rows = zip(ats, seeds[first : first + step], strict=True)
            found += [seeded_checksum(bounce.view[at : at + size_bytes], s) for at, s in rows]
    return found


def wipe(block: Block, places: Sequence[int], size_bytes: int, bounces: Bounces) -> None:
    """Zero `size_bytes` at each place: refused bytes must not reach anybody."""
    if places:
        with bounces.one() as bounce:
            zero_bytes(bounce.address, 0, size_bytes)
            block.copy_from(bounce, [Move(place, 0, size_bytes) for place in places])


def span_checksums_on_device(span: IngestSpan, source: Block, bounces: Bounces) -> bytes:
    """`transport.span_checksums` for pages on a device, whose model is done with them."""
    seeds = checksum_seeds(span.keys, span.part)
    return array("Q", checksums(source, span.places, span.part_bytes, seeds, bounces)).tobytes()


def read_to_device(
    read: Callable[[ReadSpan, Memory], bytes], span: ReadSpan, into: Block, room: Memory
) -> bytes:
    """A `Transport.read` whose places are of a device's block: read into host memory, then copied.

    `room` is memory of the caller's own, for at least one part.

    Verified before the copy. One Outcome byte a page; places of pages that are not OK are zeroed.
    """
    size, outcomes = span.part_bytes, bytearray()
    for piece in even_pieces(span, min(GROUP_BYTES, room.size_bytes)):
        ats = range(0, len(piece) * size, size)
        outcomes += read(msgspec.structs.replace(piece, places=tuple(ats)), room)
        # A refused page is zeros in host memory: copied too, it wipes its place.
        rows = zip(piece.places, ats, strict=True)
        into.copy_from(room, [Move(place, at, size) for place, at in rows])
    return bytes(outcomes)
