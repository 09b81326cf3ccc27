"""Reads that a simulated worker serves over a stream, from memory and from a disk."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.ids import Generation, PageKey
from kvstore.record import is_sealed_as
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from tests.simulation.disk import DiskStore
from tests.simulation.memory import SegmentMemory
from tests.simulation.pages import keys_of
from tests.simulation.sim_pull import pieces
from workers.tiers.part_io import Extent, PartToRead

if TYPE_CHECKING:
    from kvstore.wire.messages.transfers import ReadExtents
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.tasks import Steps


@dataclass(frozen=True)
class ReadDone:
    """Answer to ReadExtents: outcomes from after the last byte, and the pages' bytes."""

    outcomes: bytes
    pages: tuple[bytes, ...]


def serve_read(
    worker: SimWorker, endpoint: Endpoint, number: int, message: ReadExtents
) -> Steps[None]:
    """Read extents out for a client on another host."""
    store = worker.memories.get(message.segment)
    if isinstance(store, DiskStore):
        done = yield from _from_disk(worker, store, message)
    else:
        assert store is None or isinstance(store, SegmentMemory), store
        done = yield from _from_memory(worker, store, message)
    endpoint.answer(number, done)


def _from_memory(
    worker: SimWorker, memory: SegmentMemory | None, message: ReadExtents
) -> Steps[ReadDone]:
    """Record check, bytes, record check."""
    offsets, generations = array("Q", message.offsets), array("Q", message.generations)
    keys = keys_of(message.keys)
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
    return ReadDone(bytes(outcomes), tuple(pages))


def _matches(
    memory: SegmentMemory, message: ReadExtents, offset: int, key: bytes, generation: int
) -> bool:
    row = memory.records.read(offset, size_class_of(message.part_bytes))
    return memory.incarnation == message.incarnation and is_sealed_as(
        row, key, message.part, generation, message.incarnation
    )


def _from_disk(worker: SimWorker, store: DiskStore, message: ReadExtents) -> Steps[ReadDone]:
    """Each page is verified when it has come from the disk."""
    pages: list[bytes] = []
    outcomes = bytearray()
    for part in parts_to_read(worker, store, message):
        yield worker.copy_delay_s()
        if part is None:
            outcomes.append(Outcome.STALE)
            pages.append(bytes(message.part_bytes))
            continue
        (found,) = store.read([part])
        outcomes.append(found.outcome)
        pages.append(bytes(part.into))
    yield worker.copy_delay_s()
    return ReadDone(bytes(outcomes), tuple(pages))


def parts_to_read(
    worker: SimWorker, store: DiskStore, message: ReadExtents
) -> list[PartToRead | None]:
    """What to bring; None for what lies in no extent of this life."""
    assert worker.core is not None
    table = worker.core.holdings.find(message.segment, message.incarnation)
    found: list[PartToRead | None] = []
    rows = zip(
        keys_of(message.keys), array("Q", message.offsets), array("Q", message.generations),
        strict=True,
    )  # fmt: skip
    for key, offset, generation in rows:
        chunk, _ = (None if table is None else table.slot_at(offset)) or (None, 0)
        if chunk is None:
            found.append(None)
            continue
        into = memoryview(bytearray(message.part_bytes))
        extent = Extent(offset, chunk.size_class)
        found.append(PartToRead(extent, PageKey(key), message.part, Generation(generation), into))
    return found
