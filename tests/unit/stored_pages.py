"""What the store holds and what a worker does, row by row; a takeover's steps one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import InventoryEnd
from master.chunk_values import PREFIX, decode_chunk, place_of
from master.packed import split_keys, words
from tests.unit.master_rig import chain

if TYPE_CHECKING:
    from kvstore.wire.messages.membership import InventoryWanted
    from master.chunk_values import ChunkValue
    from tests.unit.master_rig import Rig
    from tests.unit.master_worker import FakeSegment

PAGE = 4096
KEYS = chain(1, 12)
TTL_S = 77.0
Row = tuple[int, bytes, int, int, int, bytes, int, int]
"""Offset, key, part, namespace, generation, parent, checksum, payload bytes."""


def stored_rows(rig: Rig, segment: str) -> list[Row]:
    """All rows of a segment in the store."""
    rows: list[Row] = []
    for key, value in rig.store.items():
        if key.startswith(PREFIX) and place_of(key)[0] == segment:
            rows += value_rows(decode_chunk(value), place_of(key)[1])
    return sorted(rows)


def value_rows(value: ChunkValue, start: int) -> list[Row]:
    """The rows of one value, page by page."""
    rows: list[Row] = []
    for row, keys, checksums in value.chains():
        parent = row.parent
        for i, (key, checksum) in enumerate(zip(split_keys(keys), words(checksums), strict=True)):
            offset = start + (row.slot + i) * value.size_class
            rows.append(
                (offset, key, row.part, row.namespace, row.generation, parent, checksum,
                 row.payload_bytes)
            )  # fmt: skip
            parent = key
    return rows


def record_rows(segment: FakeSegment) -> list[Row]:
    """The same of a worker's SEALED records."""
    return sorted(
        (at, r.key, r.part, r.namespace_ordinal, r.generation, r.parent, r.checksum,
         r.payload_bytes)
        for at, r in segment.records.items()
        if r.state is RecordState.SEALED
    )  # fmt: skip


def offer(rig: Rig, name: str = "w1") -> InventoryWanted:
    """A worker registers and offers its inventory."""
    worker = rig.workers[name]
    worker.connect()
    return worker.offer()


def end(rig: Rig, name: str = "w1") -> None:
    """The inventory is whole."""
    worker = rig.workers[name]
    reply = worker.ask(InventoryEnd(worker.segment, worker.incarnation))
    assert reply == Done()


def ttls(rig: Rig, keys: bytes = KEYS) -> list[float]:
    """TTLs of these pages, as far as they are there."""
    found = rig.master.core.tree(1).stretches(keys)
    return [stretch.run.ttl_s for stretch in found for _ in range(stretch.count)]


def counter(rig: Rig, name: str) -> int:
    """One of the core's counters."""
    return rig.master.core.counters[name]


def sealed(rig: Rig, name: str = "w1-dram") -> set[tuple[int, int]]:
    """Offset and generation of all that is SEALED for the master."""
    return {
        (chunk.offset(slot), chunk.generations[slot])
        for chunk in rig.master.core.segments[name].allocator.chunk_list
        for slot in chunk.slots_in(ExtentState.SEALED)
    }
