"""HBM segments: payload in a device's memory, records in this process's, both gone with it.

Nothing survives a restart: each start is a new life without pages. The device memory is taken in
blocks of one chunk, so that it can be given back piece by piece. Must not know who asks.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from array import array
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue, OutOfSpace, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.record import is_sealed_as
from kvstore.replica import Tier
from kvstore.segment import size_class_of
from kvstore.transfer.bounce import Bounces, checksums
from kvstore.transfer.buffer import sealed_memfd
from kvstore.transfer.device import Move
from kvstore.transfer.transport import COLUMN_BYTES, all_of
from kvstore.wire.messages.common import Outcome
from workers.record_table import RecordTable
from workers.tiers.mapped_records import MappedRecords
from workers.tiers.segment_file import fresh_incarnation

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from kvstore.ids import SegmentId
    from kvstore.segment import Geometry
    from kvstore.transfer.device import Block, Device
    from kvstore.transfer.memory import Memory
    from kvstore.wire.messages.transfers import ReadExtents
    from workers.events import Stretch

LOG: Final = logging.getLogger(__name__)


class Extents(msgspec.Struct, frozen=True, gc=False):
    """Neighbours in one chunk: `count` of them, from payload offset `offset`, `stride` apart."""

    offset: int
    count: int
    stride: int
    size_bytes: int
    """How much of each is used."""

    @property
    def offsets(self) -> range:
        """Payload offset of each."""
        return range(self.offset, self.offset + self.count * self.stride, self.stride)


class LeaseOnly:
    """In the place of ExtentLocks: nobody views device memory, so nobody holds a lock on it.

    A reader of another process copies under its lease and checks the record after the last byte.
    """

    def try_lock(self, stretch: Stretch, size_class: int) -> bytes:
        """Granted: leases are the master's to wait for."""
        del size_class
        return b"\1" * stretch.count

    def unlock(self, stretch: Stretch, size_class: int) -> None:
        """Nothing to give back."""


class HbmSegment:
    """One segment on one device. Thread-safe, but for `close`."""

    tier: Final = Tier.HBM

    def __init__(self, segment: SegmentId, geometry: Geometry, device: Device) -> None:
        """Take the memory, all of it. OutOfSpace with both numbers where it is not there."""
        self.id: Final = segment
        self.incarnation: Final = fresh_incarnation()
        self.geometry: Final = geometry
        self.device: Final = device
        self.locks: Final = LeaseOnly()
        self._changed = threading.Condition()
        self._uses: Counter[int] = Counter()
        self._shares: dict[Hashable, frozenset[int]] = {}
        """Chunks that other processes have opened, by share."""
        self._leaving: dict[int, Block] = {}
        """Released, and still open somewhere."""
        free, want = device.free_bytes, geometry.payload_bytes
        if free < want:
            raise OutOfSpace(
                f"{device.name} has {free} bytes free, segment {segment} needs {want}: lend less, "
                "or end what else uses the device"
            )
        with ExitStack() as undo:
            self._fd = sealed_memfd("kvharbor-records", geometry.payload_base)
            undo.callback(os.close, self._fd)
            self._map = mmap.mmap(self._fd, geometry.payload_base)
            self._view = memoryview(self._map)
            undo.callback(self._unmap)
            self.records: Final = RecordTable(MappedRecords(self._fd, self._view), geometry)
            self.sources: Final = Bounces(device, geometry.chunk_bytes)
            """For bytes on their way into the segment from elsewhere than memory."""
            undo.callback(self.sources.close)
            self._checks = Bounces(device, geometry.chunk_bytes)
            undo.callback(self._checks.close)
            self._chunks: dict[int, Block] = {}
            undo.callback(self._close_chunks)
            for number in range(want // geometry.chunk_bytes):
                self._chunks[number] = device.allocate(geometry.chunk_bytes)
            self._undo = undo.pop_all()

    @property
    def chunks(self) -> dict[int, Block]:
        """The chunks that have their memory, by number, for their handles."""
        with self._changed:
            return dict(self._chunks)

    @contextmanager
    def shared(self, share: Hashable) -> Iterator[dict[int, Block]]:
        """The chunks that have their memory, by number, for handles: kept until `unshare(share)`.

        Undone where the block raises.
        """
        with self._changed:
            blocks = dict(self._chunks)
            self._shares[share] = frozenset(blocks)
        try:
            yield blocks
        except BaseException:
            self.unshare(share)
            raise

    def unshare(self, share: Hashable, chunks: Iterable[int] | None = None) -> None:
        """Whoever has this share closed what it opened, or these chunks of it. Safe to repeat."""
        with self._changed:
            held = self._shares.pop(share, frozenset())
            left = held.difference(held if chunks is None else chunks)
            if left:
                self._shares[share] = left
        self._close_left()

    def open_for_reader(self) -> int:
        """A read-only descriptor of the records' file, laid out as a segment file's first part."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def fill(
        self,
        extents: Extents,
        source: Memory | Block,
        places: Sequence[int],
        seeds: Sequence[int],
    ) -> list[int]:
        """Copy pages from their places in host memory or in a block of this device.

        Returns the checksum of what each extent holds afterwards, for comparison with the writer's
        (I3). BadValue outside of segment or source, OutOfSpace in a chunk that was given back,
        Unavailable where the device fails.
        """
        size = extents.size_bytes
        rows = zip(extents.offsets, places, strict=True)
        with self._in_use(extents) as (block, base):
            block.copy_from(source, [Move(offset - base, place, size) for offset, place in rows])
        return self.checksums(extents, seeds)

    def checksums(self, extents: Extents, seeds: Sequence[int]) -> list[int]:
        """XXH3-64 of each extent's bytes as they lie on the device now. Raises as `fill` does."""
        with self._in_use(extents) as (block, base):
            places = [offset - base for offset in extents.offsets]
            return checksums(block, places, extents.size_bytes, seeds, self._checks)

    def read(self, asked: ReadExtents, into: Memory, places: Sequence[int]) -> bytes:
        """Copy pages to their places in host memory; one Outcome byte a page.

        OK: the record named exactly this page, before the first byte and after the last (I8, I11);
        the checksum is for the reader to compare. The places of all others are zeroed. BadValue for
        an extent outside of the segment.
        """
        size, outcomes = asked.part_bytes, bytearray(self._sealed(asked))
        by_chunk: dict[int, list[int]] = {}
        offsets = array("Q", asked.offsets)
        for page, offset in enumerate(offsets):
            if outcomes[page] == Outcome.OK:
                by_chunk.setdefault(offset // self.geometry.chunk_bytes, []).append(page)
        for chunk, pages in by_chunk.items():
            base = chunk * self.geometry.chunk_bytes
            code = self._load(
                chunk, [Move(places[i], offsets[i] - base, size) for i in pages], into
            )
            for page in pages:
                outcomes[page] = code
        for page, still in enumerate(self._sealed(asked)):
            outcomes[page] = outcomes[page] or still
        into.wipe([place for place, bad in zip(places, outcomes, strict=True) if bad], size)
        return bytes(outcomes)

    def release(self, chunks: Iterable[int]) -> None:
        """Give the memory of these chunks back, once what runs there has ended. Safe to repeat.

        Their extents are refused from now on. The last lease on them has ended and their records
        are FREE. What others have opened goes once they have closed it: a device must not take
        memory back that another process has open.
        """
        numbers = list(chunks)
        with self._changed:
            going = {each: self._chunks.pop(each) for each in numbers if each in self._chunks}
            self._changed.wait_for(lambda: not any(self._uses[each] for each in numbers))
            self._leaving |= going
        self._close_left()

    def _close_left(self) -> None:
        """Close what was released and nobody has open any more."""
        with self._changed:
            held = frozenset[int]().union(*self._shares.values())
            going = [self._leaving.pop(each) for each in self._leaving.keys() - held]
        for block in going:
            block.close()
        if going:
            self.device.trim()

    def close(self) -> None:
        """Give everything back; nothing may use the segment any more."""
        self._undo.close()
        self.device.trim()

    def _sealed(self, asked: ReadExtents) -> bytes:
        """OK for each page whose record names it, else STALE."""
        if (asked.segment, asked.incarnation) != (self.id, self.incarnation):
            return all_of(Outcome.STALE, len(asked.offsets) // COLUMN_BYTES)
        size_class, outcomes = size_class_of(asked.part_bytes), bytearray()
        generations = array("Q", asked.generations)
        for page, offset in enumerate(array("Q", asked.offsets)):
            self.geometry.check_extent(offset, asked.part_bytes)
            key = asked.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
            row = self.records.read(offset, size_class)
            is_sealed = is_sealed_as(row, key, asked.part, generations[page], self.incarnation)
            outcomes.append(Outcome.OK if is_sealed else Outcome.STALE)
        return bytes(outcomes)

    def _load(self, chunk: int, moves: list[Move], into: Memory) -> Outcome:
        try:
            with self._use(chunk) as block:
                block.copy_to(into, moves)
        except OutOfSpace:
            return Outcome.STALE
        except Unavailable as error:
            LOG.warning("%s: pages not read: %s", self.id, error)
            return Outcome.TRANSPORT
        return Outcome.OK

    @contextmanager
    def _in_use(self, extents: Extents) -> Iterator[tuple[Block, int]]:
        """The block that extents lie in, and the payload offset at which it begins."""
        if extents.count <= 0:
            raise BadValue("count", extents.count, "at least 1")
        first, last = extents.offsets[0], extents.offsets[-1]
        for offset in (first, last):
            self.geometry.check_extent(offset, extents.stride)
        number = first // self.geometry.chunk_bytes
        if number != last // self.geometry.chunk_bytes:
            raise BadValue("extents", extents, "neighbours in one chunk")
        if not 0 < extents.size_bytes <= extents.stride:
            raise BadValue("size_bytes", extents.size_bytes, f"1 to {extents.stride}")
        with self._use(number) as block:
            yield block, number * self.geometry.chunk_bytes

    @contextmanager
    def _use(self, number: int) -> Iterator[Block]:
        """A chunk's block, which stays for this `with`."""
        with self._changed:
            block = self._chunks.get(number)
            if block is None:
                raise OutOfSpace(f"{self.id}: chunk {number} was given back to {self.device.name}")
            self._uses[number] += 1
        try:
            yield block
        finally:
            with self._changed:
                self._uses[number] -= 1
                self._changed.notify_all()

    def _close_chunks(self) -> None:
        for block in (*self._chunks.values(), *self._leaving.values()):
            block.close()

    def _unmap(self) -> None:
        self._view.release()
        with suppress(BufferError):  # a record that a traceback still holds
            self._map.close()
