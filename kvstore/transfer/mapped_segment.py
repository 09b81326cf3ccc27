"""One segment of a worker on this host, mapped read-only: verified copies out of it, and views.

Owns mapping, descriptor and locks of one incarnation. Must not know connections or leases.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

import xxhash

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.page import checksum_seed
from kvstore.record import RECORD_BYTES, is_sealed_as
from kvstore.segment import size_class_of
from kvstore.transfer.mapping import Mapping, end_view
from kvstore.transfer.memory import copy_bytes, populate
from kvstore.transfer.read_locks import ReadLocks
from kvstore.transfer.transport import all_of, column
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.segment import Geometry
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import ReadSpan

COPY_BYTES_MAX: Final = limits.MIB
"""Bytes of one copy: many pages in one call, yet still in the cache when they are hashed."""
PREFAULT_BYTES: Final = 64 * limits.MIB
_MADV_POPULATE_READ: Final = 22


class MappedSegment:
    """Thread-safe. `close` lets copies and views in progress finish."""

    def __init__(self, segment: str, incarnation: int, geometry: Geometry, fd: int) -> None:
        """Take over `fd`. Unavailable when the file is too short or cannot be mapped."""
        self.segment = segment
        self.incarnation = incarnation
        self.geometry = geometry
        self._locks = ReadLocks(fd)
        try:
            self._mapping = Mapping(fd, geometry.file_bytes)
        except BaseException:
            self._locks.close()
            raise
        self._view = self._mapping.view()
        self._stop = threading.Event()
        self._toucher = threading.Thread(
            target=self._touch, name=f"kvharbor-touch-{segment}", daemon=True
        )
        self._toucher.start()

    @property
    def held_extents(self) -> int:
        """Extents that views of this process hold."""
        return self._locks.extents

    def read(self, span: ReadSpan, into: Memory) -> bytes:
        """Copy and verify; one Outcome byte a page; places of pages that are not OK are zeroed."""
        try:
            check = _Check(self.geometry, span, self._view)
        except BadValue:
            return all_of(Outcome.STALE, len(span))
        size = span.part_bytes
        base = self._mapping.address + self.geometry.payload_base
        outcomes = bytearray(len(span))
        for first, stop in _copies(check.offsets, span.places, size):
            start = span.places[first]
            length = (stop - first) * size
            copy_bytes(into.address + start, base + check.offsets[first], length)
            for i in range(first, stop):
                place = span.places[i]
                outcomes[i] = check.outcome(i, into.view[place : place + size])
        if any(outcomes):
            into.wipe([p for p, o in zip(span.places, outcomes, strict=True) if o], size)
        return bytes(outcomes)

    def hold(self, span: ReadSpan) -> HeldSpan:
        """Lock pages, then verify them where they lie, without copying.

        The lock comes before the verification (DESIGN 3). Pages that are not OK hold no lock.
        """
        held = HeldSpan(self, span)
        try:
            check = _Check(self.geometry, span, self._view)
        except BadValue:
            return held
        starts = [self.geometry.payload_base + offset for offset in check.offsets]
        length = size_class_of(span.part_bytes)
        granted = self._locks.acquire(starts, length)
        bad: list[int] = []
        for i, start in enumerate(starts):
            if not granted[i]:
                held.outcomes[i] = Outcome.BUSY
                continue
            view = self._mapping.page_view(start, span.part_bytes)
            held.outcomes[i] = check.outcome(i, view)
            if held.outcomes[i] == Outcome.OK:
                held.views[i] = view
            else:
                bad.append(start)
        self._locks.release(bad, length)
        return held

    def unlock(self, offsets: Sequence[int], part_bytes: int) -> None:
        """Give back the locks of held pages at these payload offsets."""
        base = self.geometry.payload_base
        starts = [base + offset for offset in offsets]
        self._locks.release(starts, size_class_of(part_bytes))

    def close(self) -> None:
        """Refuse new views; mapping and descriptor go with the last one. Safe to repeat."""
        self._stop.set()
        self._locks.close()
        if self._toucher is not threading.current_thread():
            self._toucher.join()

    def _touch(self) -> None:
        """Map the file's pages ahead of the first reads, which would else pay for the faults."""
        mapping = self._mapping
        for start in range(0, mapping.length, PREFAULT_BYTES):
            length = min(PREFAULT_BYTES, mapping.length - start)
            if self._stop.is_set() or not populate(
                mapping.address + start, length, _MADV_POPULATE_READ
            ):
                return


class HeldSpan:
    """Pages viewed in place: an Outcome byte and a view a page, locked until dropped."""

    __slots__ = ("_mapped", "_span", "outcomes", "views")

    def __init__(self, mapped: MappedSegment | None, span: ReadSpan) -> None:
        """Start with every page STALE: MappedSegment.hold finds out more."""
        self._mapped = mapped
        self._span = span
        self.outcomes = bytearray(all_of(Outcome.STALE, len(span)))
        self.views: list[memoryview | None] = [None] * len(span)

    def drop(self, indices: Iterable[int]) -> int:
        """Take these pages back: their views end, their locks are released.

        A page of which somebody still uses the memory (an array made of its view) keeps its lock
        until that is gone. Returns how many of those there are.
        """
        mapped = self._mapped
        offsets = column(self._span.offsets)
        ended: list[int] = []
        leaked = 0
        for index in indices:
            view, self.views[index] = self.views[index], None
            if view is None:
                continue
            assert mapped is not None, index
            user = end_view(view)
            if user is None:
                ended.append(offsets[index])
            else:
                leaked += 1
                weakref.finalize(user, mapped.unlock, [offsets[index]], self._span.part_bytes)
        if mapped is not None:
            mapped.unlock(ended, self._span.part_bytes)
        return leaked


class _Check:
    """What each page of a span must be, in columns; reads records straight from the mapping."""

    def __init__(self, geometry: Geometry, span: ReadSpan, file: memoryview) -> None:
        """BadValue when an extent does not lie inside the segment."""
        self.offsets: array[int] = column(span.offsets)
        for edge in (min(self.offsets), max(self.offsets)):
            geometry.check_extent(edge, span.part_bytes)
        self._span = span
        self._file = file
        self._generations = column(span.generations)
        self._checksums = column(span.checksums)
        size_class = size_class_of(span.part_bytes)
        self._records: Sequence[int] = geometry.record_offsets(self.offsets, size_class)

    def outcome(self, i: int, payload: memoryview) -> int:
        """Outcome of page `i`, whose bytes are in `payload`: checksum first, record last (I8)."""
        span = self._span
        key = span.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        seed = checksum_seed(key, span.part)
        matches = xxhash.xxh3_64_intdigest(payload, seed) == self._checksums[i]
        record = self._file[self._records[i] : self._records[i] + RECORD_BYTES]
        generation, incarnation = self._generations[i], span.segment.incarnation
        if not is_sealed_as(record, key, span.part, generation, incarnation):
            return Outcome.STALE
        return Outcome.OK if matches else Outcome.CHECKSUM


def _copies(offsets: array[int], places: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Stretches [first, stop) of pages that lie one after the other on both sides."""
    pages = len(offsets)
    longest = max(1, COPY_BYTES_MAX // size)
    first = 0
    while first < pages:
        stop = first + 1
        limit = min(pages, first + longest)
        while (
            stop < limit
            and offsets[stop] == offsets[stop - 1] + size
            and places[stop] == places[stop - 1] + size
        ):
            stop += 1
        yield first, stop
        first = stop
