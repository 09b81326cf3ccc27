"""Bytes on the move in a simulated worker: pulls, piece by piece, and reads served over a stream.

The order of steps is `workers.ingest`'s: lock, RESERVED records, copy, hash of the extent, SEALED
records, unlock. Between any two pieces anything may happen.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.ids import Generation, PageKey
from kvstore.limits import put_timeout_s
from kvstore.page import payload_checksum
from kvstore.record import Record, RecordBatch, RecordState, is_sealed_as
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import BufferSource
from tests.simulation.memory import EXCLUSIVE
from tests.simulation.pages import keys_of
from tests.simulation.tasks import Signal, Steps, wait
from workers.events import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.transfers import ReadExtents
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_worker import SimWorker
    from workers.events import StartPull

PIECES: Final = 2
"""In how many pieces a page's bytes move."""


@dataclass(frozen=True)
class Piece:
    """Bytes of an Ingest's stream."""

    call: int
    page: int
    start: int
    data: bytes


@dataclass(frozen=True)
class ReadDone:
    """Answer to ReadExtents: outcomes from after the last byte, and the pages' bytes."""

    outcomes: bytes
    pages: tuple[bytes, ...]


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the pieces in which `size` bytes move."""
    step = -(-size // PIECES)
    return ((start, min(size, start + step)) for start in range(0, size, step))


class PullRun:
    """One StartPull in progress."""

    def __init__(self, worker: SimWorker, start: StartPull, endpoint: Endpoint, call: int) -> None:
        """Nothing is touched yet; `call` is the client's number of the request."""
        self.worker = worker
        self.number = start.pull
        self.start = start
        self.message = start.message
        self.memory: SegmentMemory = worker.memories[start.message.segment]
        self.outcomes = bytearray((Outcome.FENCED,)) * (len(start.message.offsets) // 8)
        self.is_cancelled = False
        self._endpoint = endpoint
        self._call = call
        self._keys = keys_of(start.message.keys)
        self._offsets = array("Q", start.message.offsets)
        self._checksums = array("Q", start.message.checksums)
        self.arrived: dict[tuple[int, int], bytes] = {}
        self._news: Signal[bool] = Signal()
        self._failed: Outcome | None = None
        self._deadline_s = worker.world.now + put_timeout_s(
            len(self._offsets) * start.message.part_bytes
        )
        self._in_hand: list[Stretch] = []

    def cancel(self) -> None:
        """End soon: pages not verified yet end FENCED."""
        self.is_cancelled = True
        self._news.fire(True)
        if not isinstance(self.message.source, BufferSource):
            world, worker, endpoint = self.worker.world, self.worker, self._endpoint
            endpoint.close()  # what is in flight is not waited for
            world.after_on(worker.name, 0.0, lambda: worker.session_ended(endpoint))

    def take(self, endpoint: Endpoint, piece: Piece) -> None:
        """A piece of some stream has come; this pull's or another's."""
        if endpoint is self._endpoint and piece.call == self._call:
            self.arrived[piece.page, piece.start] = piece.data
            self._news.fire(True)

    def targets(self) -> Iterator[tuple[int, int]]:
        """(offset, size class) of the extents that may be written now."""
        size_class = self.start.size_class
        for stretch in self.start.stretches:
            for i in range(stretch.count):
                yield stretch.offset + i * size_class, size_class

    def record_in_hand(self) -> tuple[int, int] | None:
        """(offset, size class) of a record that is RESERVED now, if there is one."""
        if not self._in_hand:
            return None
        return self._in_hand[0].offset, self.start.size_class

    def run(self) -> Steps[None]:
        """Pull everything, then tell the worker."""
        for stretch in self.start.stretches:
            yield from self._pull(stretch)
        self.worker.pull_ended(self)

    def _pull(self, stretch: Stretch) -> Steps[None]:
        """Lock a stretch, fill what could be locked, seal what matched, unlock."""
        size_class, memory, owner = self.start.size_class, self.memory, self.worker.name
        locked: list[Stretch] = []
        for i in range(stretch.count):
            each = _single(stretch, i, size_class)
            if memory.try_exclusive(owner, each.offset, size_class):
                locked.append(each)
            else:
                self.outcomes[each.page] = Outcome.BUSY
                self.worker.world.counts["busy by a reader"] += 1
        batches = [self._record(each) for each in locked]
        for each, batch in zip(locked, batches, strict=True):
            memory.records.write(each, batch, 0, 1)
            memory.damaged.discard(each.offset)
        self._in_hand = locked
        yield self.worker.copy_delay_s()
        for each in locked:
            self.outcomes[each.page] = yield from self._fill(each)
        self._in_hand = []
        for each, batch in zip(locked, batches, strict=True):
            self._settle(each, batch)
            memory.unlock(EXCLUSIVE, owner, each.offset, size_class)

    def _settle(self, each: Stretch, batch: RecordBatch) -> None:
        records, size_class = self.memory.records, self.start.size_class
        if self.outcomes[each.page] == Outcome.OK:
            batch.restate(RecordState.SEALED)
            records.write(each, batch, 0, 1)
            self.worker.checks.sealed(self.memory, self.memory.record(each.offset, size_class))
        else:
            records.write_free(each, size_class)

    def _record(self, each: Stretch) -> RecordBatch:
        message, page = self.message, each.page
        key = self._keys[page]
        first = Record(
            RecordState.RESERVED, PageKey(key), message.part, Generation(message.generation),
            self.memory.incarnation, message.part_bytes, self._checksums[page], each.offset,
            self.start.size_class, message.namespace_ordinal,
            PageKey(self._keys[page - 1] if page else message.parent), message.token_count,
            stored_bytes=message.part_bytes,
        )  # fmt: skip
        return RecordBatch(
            first, key, self._offsets[page : page + 1], self._checksums[page : page + 1]
        )

    def _fill(self, each: Stretch) -> Steps[Outcome]:
        """Copy a page in pieces and hash the extent."""
        message, page = self.message, each.page
        for start, stop in pieces(message.part_bytes):
            data = yield from self._piece(page, start, stop)
            if self.is_cancelled:
                return Outcome.FENCED
            if data is None:
                return self._failed or Outcome.SOURCE_LOST
            self.worker.checks.overwrites(self.worker, self.memory, each.offset, message.part_bytes)
            self.memory.payload[each.offset + start : each.offset + stop] = data
            yield self.worker.copy_delay_s()
        place = self.memory.payload[each.offset : each.offset + message.part_bytes]
        matches = has_checksum(place, self._keys[page], message.part, self._checksums[page])
        return Outcome.OK if matches else Outcome.CHECKSUM

    def _piece(self, page: int, start: int, stop: int) -> Steps[bytes | None]:
        """The next bytes from the source; None when it is gone or the pull is cancelled."""
        source = self.message.source
        if self._failed is not None:
            return None
        if isinstance(source, BufferSource):
            data = self.worker.client_bytes(self._endpoint, source, page, start, stop)
            if data is None:
                self._failed = Outcome.SOURCE_LOST
            return data
        world = self.worker.world
        while (page, start) not in self.arrived and not self.is_cancelled:
            if world.now >= self._deadline_s or not self._endpoint.is_open:
                self._failed = Outcome.SOURCE_LOST
                return None
            self._news = Signal()
            yield from wait(world, self.worker.name, self._news, 0.5, False)
        return self.arrived.get((page, start))


def has_checksum(data: memoryview, key: bytes, part: int, checksum: int) -> bool:
    """Whether an extent holds what the writer hashed."""
    return payload_checksum(data, key, part) == checksum


def _single(stretch: Stretch, i: int, size_class: int) -> Stretch:
    """Extent `i` of a stretch alone."""
    return Stretch(
        stretch.page + i, 1, stretch.chunk_start, stretch.slot + i,
        stretch.offset + i * size_class,
    )  # fmt: skip


def serve_read(
    worker: SimWorker, endpoint: Endpoint, number: int, message: ReadExtents
) -> Steps[None]:
    """Read extents out for a client on another host: record check, bytes, record check."""
    offsets, generations = array("Q", message.offsets), array("Q", message.generations)
    keys = keys_of(message.keys)
    memory = worker.memories.get(message.segment)
    pages: list[bytes] = []
    outcomes = bytearray()
    for i, key in enumerate(keys):
        data = bytearray(message.part_bytes)
        is_there = memory is not None and _matches(memory, message, offsets[i], key, generations[i])
        for start, stop in pieces(message.part_bytes):
            if is_there and memory is not None:
                data[start:stop] = memory.payload[offsets[i] + start : offsets[i] + stop]
                yield worker.copy_delay_s()
        pages.append(bytes(data))
    yield worker.copy_delay_s()
    for i, key in enumerate(keys):
        good = memory is not None and _matches(memory, message, offsets[i], key, generations[i])
        outcomes.append(Outcome.OK if good else Outcome.STALE)
    endpoint.answer(number, ReadDone(bytes(outcomes), tuple(pages)))


def _matches(
    memory: SegmentMemory, message: ReadExtents, offset: int, key: bytes, generation: int
) -> bool:
    row = memory.records.read(offset, size_class_of(message.part_bytes))
    return memory.incarnation == message.incarnation and is_sealed_as(
        row, key, message.part, generation, message.incarnation
    )
