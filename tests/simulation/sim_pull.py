"""Bytes on the move in a simulated worker: pulls into memory, piece by piece.

The order of steps is `workers.ingest`'s: lock, RESERVED records, copy, hash of the extent, SEALED
records, unlock. Between any two pieces anything may happen.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.ids import Generation, PageKey
from kvstore.limits import put_timeout_s
from kvstore.page import parents_of, payload_checksum
from kvstore.record import Record, RecordBatch, RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import BufferSource, ExtentSource, PeerSource, StreamSource
from tests.simulation.disk import DiskStore
from tests.simulation.memory import SegmentMemory
from tests.simulation.pages import keys_of
from tests.simulation.store import EXCLUSIVE, SegmentStore
from tests.simulation.tasks import Signal, Steps, wait
from workers.events import Stretch
from workers.tiers.part_io import Extent, PartToRead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_peer import PeerRead
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


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the pieces in which `size` bytes move."""
    step = -(-size // PIECES)
    return ((start, min(size, start + step)) for start in range(0, size, step))


class PullRun:
    """One StartPull in progress, into memory."""

    stored_max = 0
    """As in Ingested."""

    def __init__(
        self, worker: SimWorker, start: StartPull, endpoint: Endpoint, call: int,
        peer: PeerRead | None = None,
    ) -> None:  # fmt: skip
        """Nothing is touched yet; `call` is the caller's number of the request, `peer` brings the
        pages of a copy.
        """
        self.worker = worker
        self.number = start.pull
        self.start = start
        self.message = start.message
        self.memory: SegmentStore = worker.memories[start.message.segment]
        self.outcomes = bytearray((Outcome.FENCED,)) * (len(start.message.offsets) // 8)
        self.is_cancelled = False
        self._endpoint = endpoint
        self._call = call
        self._peer = peer
        self._keys = keys_of(start.message.keys)
        self._parents = keys_of(parents_of(start.message.parent, start.message.keys))
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
        if isinstance(self.message.source, StreamSource):
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
        if self._peer is not None:
            self._peer.close()
        self.worker.pull_ended(self)

    def _pull(self, stretch: Stretch) -> Steps[None]:
        """Lock a stretch, fill what could be locked, seal what matched, unlock."""
        size_class, memory, owner = self.start.size_class, self.memory, self.worker.name
        locked: list[Stretch] = []
        for i in range(stretch.count):
            each = single(stretch, i, size_class)
            if memory.try_exclusive(owner, each.offset, size_class):
                locked.append(each)
            else:
                self.outcomes[each.page] = Outcome.BUSY
                self.worker.world.counts["busy by a reader"] += 1
        batches = [self._batch(each) for each in locked]
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

    def record_of(self, each: Stretch) -> Record:
        """What the record of a page will say while it is RESERVED."""
        message, page = self.message, each.page
        return Record(
            RecordState.RESERVED, PageKey(self._keys[page]), message.part,
            Generation(message.generation), self.memory.incarnation, message.part_bytes,
            self._checksums[page], each.offset, self.start.size_class, message.namespace_ordinal,
            PageKey(self._parents[page]), message.token_count,
            stored_bytes=message.part_bytes,
        )  # fmt: skip

    def _batch(self, each: Stretch) -> RecordBatch:
        page = each.page
        return RecordBatch(
            self.record_of(each), self._keys[page], self._parents[page],
            self._offsets[page : page + 1],
            self._checksums[page : page + 1],
        )  # fmt: skip

    def _fill(self, each: Stretch) -> Steps[Outcome]:
        """Copy a page in pieces and hash the extent."""
        size, memory = self.message.part_bytes, self.memory
        assert isinstance(memory, SegmentMemory), memory
        for start, stop in pieces(size):
            data = yield from self.piece(each.page, start, stop)
            if self.is_cancelled:
                return Outcome.FENCED
            if data is None:
                return self.failure
            self.worker.checks.overwrites(self.worker, memory, each.offset, size)
            memory.payload[each.offset + start : each.offset + stop] = data
            yield self.worker.copy_delay_s()
        place = memory.payload[each.offset : each.offset + size]
        return Outcome.OK if self.is_right(each.page, place) else self.mismatch(each.page)

    def is_right(self, page: int, data: bytes | memoryview) -> bool:
        """Whether this is what the page's writer hashed."""
        return has_checksum(data, self._keys[page], self.message.part, self._checksums[page])

    def mismatch(self, page: int) -> Outcome:
        """Why a page is not what its writer hashed, as far as whoever brought it knows."""
        reasons = {} if self._peer is None else self._peer.reasons
        return reasons.get(page, Outcome.CHECKSUM)

    @property
    def failure(self) -> Outcome:
        """Why the source gives nothing more."""
        return self._failed or Outcome.SOURCE_LOST

    def piece(self, page: int, start: int, stop: int) -> Steps[bytes | None]:
        """The next bytes from the source; None when it is gone or the pull is cancelled."""
        source = self.message.source
        if self._failed is not None:
            return None
        if isinstance(source, ExtentSource):
            return self._moved(source, page, start, stop)
        if isinstance(source, PeerSource):
            return (yield from self._copied(page, start, stop))
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

    def _copied(self, page: int, start: int, stop: int) -> Steps[bytes | None]:
        """Bytes of an extent of another worker, which are verified whole."""
        assert self._peer is not None
        if (page, 0) not in self.arrived:
            data = yield from self._peer.page(page)
            if data is None or self.worker.world.now >= self._deadline_s:
                self._failed = Outcome.TRANSPORT
                return None
            self.arrived[page, 0] = data
        return self.arrived[page, 0][start:stop]

    def _moved(self, source: ExtentSource, page: int, start: int, stop: int) -> bytes | None:
        """Bytes of an extent of this worker; from a disk a whole page is read at once."""
        store = self.worker.memories[source.segment]
        offset = array("Q", source.offsets)[page]
        if isinstance(store, SegmentMemory):
            return bytes(store.payload[offset + start : offset + stop])
        assert isinstance(store, DiskStore), store
        if (page, 0) not in self.arrived:
            into = memoryview(bytearray(self.message.part_bytes))
            part = PartToRead(
                Extent(offset, self.start.source_classes[page]), PageKey(self._keys[page]),
                self.message.part, Generation(array("Q", source.generations)[page]), into,
            )  # fmt: skip
            (found,) = store.read([part])
            if found.outcome is Outcome.TRANSPORT:
                self._failed = found.outcome
                return None
            self.arrived[page, 0] = bytes(into)
        return self.arrived[page, 0][start:stop]


def has_checksum(data: bytes | memoryview, key: bytes, part: int, checksum: int) -> bool:
    """Whether an extent holds what the writer hashed."""
    return payload_checksum(data, key, part) == checksum


def single(stretch: Stretch, i: int, size_class: int) -> Stretch:
    """Extent `i` of a stretch alone."""
    return Stretch(
        stretch.page + i, 1, stretch.chunk_start, stretch.slot + i,
        stretch.offset + i * size_class,
    )  # fmt: skip
