"""A pull carried out: lock, RESERVED record, copy, hash, SEALED record, unlock (I3, I6b).

Runs in the thread of the connection that asked. Owns the order of these steps and what undoes them;
which extents may be pulled into was decided by `workers.state`. A `Source` brings the bytes: from a
client's buffer (here), a stream, or the transfer engine.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from operator import eq
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError
from kvstore.ids import KEY_BYTES, Generation, PageKey
from kvstore.page import checksum_seeds, growing_checksum, parents_of, seeded_checksum
from kvstore.record import Record, RecordBatch, RecordState
from kvstore.transfer.memory import copy_bytes
from kvstore.wire.messages.common import Outcome
from workers.events import Stretch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvstore.transfer.memory import Memory
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.puts import Ingest
    from kvstore.wire.messages.transfers import FindEngine
    from workers.events import StartPull
    from workers.sharing import ClientBuffer
    from workers.tiers.tier import ExtentSegment, MemorySegment

LOG: Final = logging.getLogger(__name__)

GROUP_BYTES: Final = 512 * limits.KIB
"""Copied, then hashed while still in the core's own cache; a cancelled pull stops between two."""


class PullFailed(KVStoreError):
    """A source cannot bring its bytes; `outcome` says why."""

    code = "pull_failed"

    def __init__(self, outcome: Outcome, text: str) -> None:
        """Every page not yet brought ends with this outcome."""
        super().__init__(text)
        self.outcome = outcome


class Target(msgspec.Struct, frozen=True, gc=False):
    """Extents that are neighbours, as the place to bring pages to, or a piece of one page."""

    view: memoryview
    address: int
    size_bytes: int
    """What to bring of each page."""
    stride: int
    """Bytes from one page's place to the next's; the gap belongs to nobody."""
    count: int
    start: int = 0
    """Where in the page to begin: not 0 only for a page that comes in pieces, alone."""


class Source(Protocol):
    """Where one request's pages come from. Used by one thread, but for `cancel`."""

    group_bytes: int
    """How much to ask for at once; what was asked for is hashed next. Larger pages are cut."""

    def fill(self, page: int, target: Target) -> None:
        """Bring pages [page, page + target.count) of the request. Raises PullFailed.

        Bytes are asked for in rising order, each at most once. When this returns or raises,
        nothing of it writes into the target any more.
        """
        ...

    def cancel(self) -> None:
        """Make a `fill` that runs in another thread end soon."""
        ...


class WaitingSource(ABC):
    """A source that waits for its peer: for a device it brings pages to host memory of its own, so
    that nobody else waits for that."""

    @abstractmethod
    def room(self, size_bytes: int) -> AbstractContextManager[Memory]:
        """So much memory, for one group or one large page at a time. Raises PullFailed."""


class BufferSource:
    """Pages in a client's attached buffer: plain copies, neighbours in one."""

    group_bytes = GROUP_BYTES

    def __init__(self, buffer: ClientBuffer, offsets: array[int], part_bytes: int) -> None:
        """BadValue unless every page lies inside the buffer."""
        last = buffer.size_bytes - part_bytes
        if offsets and not 0 <= max(offsets) <= last:
            want = f"0 to {last}, for {part_bytes} bytes in a buffer of {buffer.size_bytes}"
            raise BadValue("source.offsets", max(offsets), want)
        self._base = buffer.address
        self._offsets = offsets
        count = len(offsets)
        self._are_neighbours = count > 0 and offsets == array(
            "Q", range(offsets[0], offsets[0] + count * part_bytes, part_bytes)
        )

    def fill(self, page: int, target: Target) -> None:
        """Copy; at once where the pages are neighbours on both sides."""
        size, stride, count = target.size_bytes, target.stride, target.count
        to, base = target.address, self._base + target.start
        if count == 1 or (stride == size and self._are_neighbours):
            copy_bytes(to, base + self._offsets[page], count * size)
            return
        for offset in self._offsets[page : page + count]:
            copy_bytes(to, base + offset, size)
            to += stride

    def cancel(self) -> None:
        """A group of copies ends by itself."""


class ExtentPull(ABC):
    """One StartPull in progress, part by part as it is. `run` is for one thread; `cancel` for any.

    How the bytes of an extent come in and are hashed is the subclass's, by the segment's medium.
    """

    stored_max: Final = 0
    """As in Ingested: nothing is encoded."""

    def __init__(self, segment: ExtentSegment, start: StartPull, source: Source) -> None:
        """Nothing is touched yet."""
        message = start.message
        self._segment = segment
        self._start = start
        self._source = source
        self._offsets = array("Q", message.offsets)
        self._checksums = array("Q", message.checksums)
        self._parents = parents_of(message.parent, message.keys)
        self._seeds = checksum_seeds(message.keys, message.part)
        self._outcomes = bytearray((Outcome.FENCED,)) * len(self._seeds)
        self._is_cancelled = False
        self._failed: Outcome | None = None

    def cancel(self) -> None:
        """End soon: pages not yet verified end FENCED."""
        self._is_cancelled = True
        self._source.cancel()

    def run(self) -> bytes:
        """Pull everything; one Outcome byte a page of the request. Raises nothing.

        Afterwards every record is SEALED (for OK) or FREE, and every lock is given back.
        """
        for stretch in self._start.stretches:
            if self._is_cancelled:
                break  # one that waited for its turn meanwhile writes no record at all
            try:
                self._pull(stretch)
            except Exception:  # ours, or a system that refuses locks: the extent stays FREE
                LOG.exception("%s: pull failed", self._segment.id)
                page, stop = stretch.page, stretch.page + stretch.count
                self._outcomes[page:stop] = bytes((Outcome.TRANSPORT,)) * stretch.count
        return bytes(self._outcomes)

    def _pull(self, stretch: Stretch) -> None:
        size_class, locks = self._start.size_class, self._segment.locks
        granted = locks.try_lock(stretch, size_class)
        try:
            if all(granted):
                self._pull_locked(stretch)
                return
            for part in _runs(stretch, granted, size_class):
                self._pull_locked(part)
        finally:
            locks.unlock(stretch, size_class)
        for i, is_granted in enumerate(granted):
            if not is_granted:
                self._outcomes[stretch.page + i] = Outcome.BUSY

    def _pull_locked(self, stretch: Stretch) -> None:
        """Fill a locked stretch; its records end SEALED or FREE, whatever happens."""
        page, stop = stretch.page, stretch.page + stretch.count
        size_class, records = self._start.size_class, self._segment.records
        try:
            records.require(stretch, size_class)
        except OSError as error:
            LOG.warning("%s: no memory for a record table: %s", self._segment.id, error)
            self._outcomes[page:stop] = bytes((Outcome.OUT_OF_SPACE,)) * stretch.count
            return
        wanted = self._checksums[page:stop]
        batch = self._records(stretch, wanted)
        records.write(stretch, batch, 0, stretch.count)
        outcomes = self._fill(stretch, wanted.tolist())
        self._outcomes[page:stop] = outcomes
        batch.restate(RecordState.SEALED)
        if not any(outcomes):
            records.write(stretch, batch, 0, stretch.count)
            return
        for i, outcome in enumerate(outcomes):
            each = _part(stretch, i, 1, size_class)
            if outcome == Outcome.OK:
                records.write(each, batch, i, i + 1)
            else:
                records.write_free(each, size_class)

    def _records(self, stretch: Stretch, checksums: array[int]) -> RecordBatch:
        message, page = self._start.message, stretch.page
        own = slice(page * KEY_BYTES, (page + stretch.count) * KEY_BYTES)
        keys, parents = message.keys[own], self._parents[own]
        first = Record(
            RecordState.RESERVED, PageKey(keys[:KEY_BYTES]), message.part,
            Generation(message.generation), self._segment.incarnation, message.part_bytes,
            checksums[0], stretch.offset, self._start.size_class, message.namespace_ordinal,
            PageKey(parents[:KEY_BYTES]), message.token_count, stored_bytes=message.part_bytes,
        )  # fmt: skip
        offsets = self._offsets[page : page + stretch.count]
        return RecordBatch(first, keys, parents, offsets, checksums)

    def _fill(self, stretch: Stretch, wanted: list[int]) -> bytes:
        """Copy and hash in groups; an Outcome a page."""
        stride, count, outcomes = self._start.size_class, stretch.count, bytearray()
        group = self._source.group_bytes // stride
        try:
            while len(outcomes) < count and self._failed is None and not self._is_cancelled:
                done = len(outcomes)
                page, offset = stretch.page + done, stretch.offset + done * stride
                if group:
                    some = wanted[done : done + group]
                    outcomes += self._fill_pages(page, offset, some)
                else:
                    outcomes.append(self._fill_large(page, offset, wanted[done]))
        except PullFailed as error:
            LOG.info("%s: pull failed: %s", self._segment.id, error)
            self._failed = error.outcome
        except Exception:
            LOG.exception("%s: pull failed", self._segment.id)
            self._failed = Outcome.TRANSPORT
        if len(outcomes) < count:
            why = Outcome.FENCED if self._is_cancelled or self._failed is None else self._failed
            outcomes += bytes((why,)) * (count - len(outcomes))
        return bytes(outcomes)

    @abstractmethod
    def _fill_pages(self, page: int, offset: int, wanted: list[int]) -> bytes:
        """Bring neighbours, then hash them where they lie now, not at the source (I3)."""

    @abstractmethod
    def _fill_large(self, page: int, offset: int, wanted: int) -> int:
        """The same for a page that is larger than a group."""


class Pull(ExtentPull):
    """Into memory that this process has mapped."""

    def __init__(self, segment: MemorySegment, start: StartPull, source: Source) -> None:
        """Nothing is touched yet."""
        super().__init__(segment, start, source)
        self._payload = segment.payload
        self._address = segment.payload_address

    def _fill_pages(self, page: int, offset: int, wanted: list[int]) -> bytes:
        size, stride, count = self._start.message.part_bytes, self._start.size_class, len(wanted)
        length = count * stride
        view, address = self._payload[offset : offset + length], self._address + offset
        self._source.fill(page, Target(view, address, size, stride, count))
        digest, seeds = seeded_checksum, self._seeds[page : page + count]
        found = [
            digest(view[at : at + size], seed)
            for at, seed in zip(range(0, length, stride), seeds, strict=True)
        ]
        return compared(found, wanted)

    def _fill_large(self, page: int, offset: int, wanted: int) -> int:
        size, group = self._start.message.part_bytes, self._source.group_bytes
        checksum = growing_checksum(seed=self._seeds[page])
        for start in range(0, size, group):
            if self._is_cancelled:
                return Outcome.FENCED
            at, length = offset + start, min(group, size - start)
            view = self._payload[at : at + length]
            self._source.fill(page, Target(view, self._address + at, length, length, 1, start))
            checksum.update(view)
        return Outcome.OK if checksum.intdigest() == wanted else Outcome.CHECKSUM


def compared(found: list[int], wanted: list[int]) -> bytes:
    """An Outcome a page: whether an extent holds what its writer has hashed."""
    if found == wanted:
        return bytes(len(wanted))
    return bytes(Outcome.OK if is_same else Outcome.CHECKSUM for is_same in map(eq, found, wanted))


def _part(stretch: Stretch, start: int, count: int, size_class: int) -> Stretch:
    """Extents [start, start + count) of a stretch."""
    return Stretch(
        stretch.page + start, count, stretch.chunk_start, stretch.slot + start,
        stretch.offset + start * size_class,
    )  # fmt: skip


def _runs(stretch: Stretch, granted: bytes, size_class: int) -> list[Stretch]:
    """The locked extents of a stretch, as runs of neighbours."""
    found: list[Stretch] = []
    start = granted.find(1)
    while start >= 0:
        stop = granted.find(0, start)
        stop = stretch.count if stop < 0 else stop
        found.append(_part(stretch, start, stop - start, size_class))
        start = granted.find(1, stop)
    return found


class EngineDesk(Protocol):
    """What a worker with the `mooncake` transport adds: pulls by the transfer engine."""

    def source(self, message: Ingest) -> Source:
        """The pages of an EngineSource. Raises BadValue for columns that do not fit."""
        ...

    def find(self, message: FindEngine) -> Message:
        """The answer to FindEngine. Raises a typed error where the segment is not served."""
        ...

    def withdraw(self, segment: str, chunks: Sequence[int]) -> None:
        """Serve chunks that a device takes back no more; they are open nowhere when it returns."""
        ...
