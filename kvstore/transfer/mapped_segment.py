"""One segment of a worker on this host, mapped read-only: verified copies out of it, and views.

Owns mapping, descriptor and locks of one incarnation. Must not know connections or leases.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import xxhash

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.page import checksum_seeds
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

COPY_BYTES_MAX: Final = 512 * limits.KIB
"""Bytes of one copy: many pages in one call, yet still in the second-level cache when hashed."""
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
        self._payload_base = geometry.payload_base
        self._stop = threading.Event()
        self._toucher = threading.Thread(
            target=self._touch, name=f"kvharbor-touch-{segment}", daemon=True
        )
        self._is_touched = False

    @property
    def held_extents(self) -> int:
        """Extents that views of this process hold."""
        return self._locks.extents

    def read(self, span: ReadSpan, into: Memory) -> bytes:
        """Copy and verify; one Outcome byte a page; places of pages that are not OK are zeroed."""
        self._touch_once()
        try:
            check = SpanCheck(self.geometry, span, self._view)
        except BadValue:
            into.wipe(span.places, span.part_bytes)
            return all_of(Outcome.STALE, len(span))
        base = self._mapping.address + self._payload_base
        copied = _hashed_copies if span.part_bytes <= COPY_BYTES_MAX else _copied_hashes
        outcomes = bytearray(len(span))
        for i, digest in enumerate(copied(check, base, into)):
            outcomes[i] = check.outcome(i, digest)
        if any(outcomes):
            bad = [p for p, o in zip(span.places, outcomes, strict=True) if o]
            into.wipe(bad, span.part_bytes)
        return bytes(outcomes)

    def hold(self, span: ReadSpan) -> HeldSpan:
        """Lock pages, then verify them where they lie, without copying.

        The lock comes before the verification (I4). Pages that are not OK hold no lock.
        """
        self._touch_once()
        try:
            check = SpanCheck(self.geometry, span, self._view)
        except BadValue:
            return HeldSpan(span)
        held = HeldSpan(span, self)
        base, size = self._payload_base, span.part_bytes
        starts = [base + offset for offset in check.offsets]
        granted = self._locks.acquire(starts, size_class_of(size))
        file = self._mapping.view()
        bad: list[int] = []
        for i, start in enumerate(starts):
            if not granted[i]:
                held.outcomes[i] = Outcome.BUSY
                continue
            view = file[start : start + size]
            digest = xxhash.xxh3_64_intdigest(view, check.seeds[i])
            held.outcomes[i] = check.outcome(i, digest)
            if held.outcomes[i] == Outcome.OK:
                held.views[i] = view
            else:
                bad.append(check.offsets[i])
        self.unlock(bad, size)
        held.file = file
        return held

    def unlock(self, offsets: Sequence[int], part_bytes: int) -> None:
        """Give back the locks of held pages at these payload offsets."""
        base = self._payload_base
        starts = [base + offset for offset in offsets]
        self._locks.release(starts, size_class_of(part_bytes))

    def close(self) -> None:
        """Refuse new views; mapping and descriptor go with the last one. Safe to repeat."""
        self._stop.set()
        self._locks.close()
        if self._toucher.ident is not None:
            self._toucher.join()

    def _touch_once(self) -> None:
        """Begin to map the whole file with the first read: who only writes does without."""
        if not self._is_touched:
            self._is_touched = True
            with suppress(RuntimeError):  # Another thread was as quick.
                self._toucher.start()

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
    """Pages viewed in place: an Outcome byte and a view a page, locked until dropped or ended."""

    __slots__ = ("_mapped", "_span", "file", "outcomes", "views")

    def __init__(self, span: ReadSpan, mapped: MappedSegment | None = None) -> None:
        """Start with every page STALE: MappedSegment.hold finds out more."""
        self._mapped = mapped
        self._span = span
        self.outcomes = bytearray(all_of(Outcome.STALE, len(span)))
        self.views: list[memoryview | None] = [None] * len(span)
        self.file: memoryview | None = None
        """What the views are slices of; of this span alone, so that it shows who uses them."""

    @property
    def places(self) -> Sequence[int]:
        """The places of its pages."""
        return self._span.places

    def drop(self, indices: Iterable[int]) -> None:
        """Take back pages that nobody has been given: their views end, their locks go."""
        held = [i for i in indices if self._end_view(i)]
        self._unlock(held)

    def end(self) -> int:
        """Take every page back; how many stay locked because somebody still uses this memory.

        A slice or an array made of a view keeps the memory in use. Then the whole span stays
        locked until that is gone, and is unlocked by itself.
        """
        held = [i for i in range(len(self.views)) if self._end_view(i)]
        user = None if self.file is None else end_view(self.file)
        self.file = None
        if user is None or not held:
            self._unlock(held)
            return 0
        weakref.finalize(user, self._unlock, held)
        return len(held)

    def _end_view(self, index: int) -> bool:
        view, self.views[index] = self.views[index], None
        if view is None:
            return False
        with suppress(BufferError):
            view.release()
        return True

    def _unlock(self, indices: Sequence[int]) -> None:
        if self._mapped is not None and indices:
            offsets = column(self._span.offsets)
            self._mapped.unlock([offsets[i] for i in indices], self._span.part_bytes)


class SpanCheck:
    """What each page of a span must be, in columns; reads records straight from `file`."""

    def __init__(self, geometry: Geometry, span: ReadSpan, file: memoryview) -> None:
        """BadValue when an extent does not lie inside the segment."""
        self.offsets: array[int] = column(span.offsets)
        size_class = size_class_of(span.part_bytes)
        room = geometry.payload_bytes - size_class
        if span.part_bytes > geometry.chunk_bytes or max(self.offsets) > room:
            raise BadValue("offset", max(self.offsets), f"0 to {room}")
        self.span = span
        self.seeds = checksum_seeds(span.keys, span.part)
        self._file = file
        self._generations = column(span.generations)
        self._checksums = column(span.checksums)
        self._records: Sequence[int] = geometry.record_offsets(self.offsets, size_class)

    def outcome(self, i: int, digest: int) -> int:
        """Outcome of page `i`, whose bytes were hashed to `digest`: the record comes last (I8)."""
        span = self.span
        key = span.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        record = self._file[self._records[i] : self._records[i] + RECORD_BYTES]
        generation, incarnation = self._generations[i], span.segment.incarnation
        if not is_sealed_as(record, key, span.part, generation, incarnation):
            return Outcome.STALE
        return Outcome.OK if digest == self._checksums[i] else Outcome.CHECKSUM


def _hashed_copies(check: SpanCheck, base: int, into: Memory) -> Iterator[int]:
    """Copy small pages, many at once where they are neighbours; each one's checksum, in order."""
    offsets, places, size = check.offsets, check.span.places, check.span.part_bytes
    view, seeds = into.view, check.seeds
    for first, stop in _neighbours(offsets, places, size):
        copy_bytes(into.address + places[first], base + offsets[first], (stop - first) * size)
        for i in range(first, stop):
            page = view[places[i] : places[i] + size]
            yield xxhash.xxh3_64_intdigest(page, seeds[i])


def _copied_hashes(check: SpanCheck, base: int, into: Memory) -> Iterator[int]:
    """Copy large pages, piece by piece, each hashed while it is in the cache."""
    size, view = check.span.part_bytes, into.view
    for i, place in enumerate(check.span.places):
        digest = xxhash.xxh3_64(seed=check.seeds[i])
        to, source = into.address + place, base + check.offsets[i]
        for start in range(0, size, COPY_BYTES_MAX):
            length = min(COPY_BYTES_MAX, size - start)
            copy_bytes(to + start, source + start, length)
            digest.update(view[place + start : place + start + length])
        yield digest.intdigest()


def _neighbours(offsets: array[int], places: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
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
