"""A pool worker as the master meets it: its records and manners, scripted, without I/O.

It keeps records as a real one does and answers orders by the documented rules.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from kvstore.ids import KEY_BYTES, Generation, Incarnation, PageKey
from kvstore.record import Record, RecordState, chunk_digest, pack_record
from kvstore.segment import Geometry, size_class_of
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    ChunkDigest,
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    Heartbeat,
    InventoryEnd,
    InventoryRows,
    InventoryWanted,
    OfferInventory,
    RegisterWorker,
    RetireExtents,
    SegmentOffer,
    WorkerAccepted,
)
from kvstore.wire.messages.puts import PlanSpan, Sealed

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.events import SessionId
    from tests.unit.master_rig import Rig

PAGE_TOKENS = 128
"""Of every page that is put."""


class FakeWorker:
    """A pool worker's records and manners."""

    def __init__(self, rig: Rig, name: str, segment: str, geometry: Geometry) -> None:
        self.rig = rig
        self.name = name
        self.segment = segment
        self.geometry = geometry
        self.incarnation = 1
        self.session: SessionId | None = None
        self.records: dict[int, Record] = {}
        self.fenced: dict[int, int] = {}
        self.locked: set[int] = set()
        self.wanted: list[int] = []

    def connect(self) -> None:
        """Open a control connection and register."""
        self.session = self.rig.open("worker", "", self.name)
        self.register()

    def register(self) -> Message | None:
        """Register this worker's one segment."""
        address = Address("tcp", f"{self.name}:1", 1)
        offer = SegmentOffer(self.segment, self.incarnation, "dram", self.geometry)
        message = RegisterWorker(self.name, self.name, (address,), (offer,))
        reply = self.ask(message)
        assert isinstance(reply, WorkerAccepted), reply
        return reply

    def ask(self, message: Message) -> Message | None:
        """Send a request on the control connection."""
        assert self.session is not None
        return self.rig.ask(self.session, message)

    def digests(self) -> tuple[ChunkDigest, ...]:
        """One digest a chunk that is in use."""
        chunks: dict[tuple[int, int], list[Record]] = {}
        for offset in sorted(self.records):
            record = self.records[offset]
            start = self.geometry.chunk_start(offset, record.size_class)
            chunks.setdefault((start, record.size_class), []).append(record)
        return tuple(
            ChunkDigest(
                start,
                size_class,
                chunk_digest(
                    ((r.offset - start) // size_class, r.state, r.generation) for r in held
                ),
            )
            for (start, size_class), held in chunks.items()
        )

    def offer(self) -> InventoryWanted:
        """Send digests."""
        reply = self.ask(OfferInventory(self.segment, self.incarnation, self.digests()))
        reply = self.rig.settled(self.session, reply)
        assert isinstance(reply, InventoryWanted), reply
        return reply

    def send_rows(self, start: int) -> None:
        """Send one chunk's records."""
        held = [
            r
            for _, r in sorted(self.records.items())
            if self.geometry.chunk_start(r.offset, r.size_class) == start
        ]
        rows = b"".join(map(pack_record, held))
        size_class = held[0].size_class
        message = InventoryRows(self.segment, self.incarnation, start, size_class, rows)
        reply = self.rig.settled(self.session, self.ask(message))
        assert isinstance(reply, Done), reply

    def join(self) -> None:
        """Register and go through the whole inventory."""
        self.connect()
        for start in self.offer().chunk_starts:
            self.send_rows(start)
        reply = self.ask(InventoryEnd(self.segment, self.incarnation))
        assert isinstance(reply, Done), reply

    def restart(self) -> None:
        """A new life of the same memory: what was being written is FREE."""
        self.incarnation += 1
        self.locked.clear()
        self.fenced.clear()
        self.records = {
            offset: msgspec.structs.replace(r, incarnation=Incarnation(self.incarnation))
            for offset, r in self.records.items()
            if r.state is not RecordState.RESERVED
        }

    def leave(self) -> None:
        """Lose the control connection."""
        assert self.session is not None
        self.rig.close(self.session)
        self.session = None

    def beat(self) -> None:
        """Show that it lives."""
        self.ask(Heartbeat(self.name, 1, len(self.locked)))

    def write(
        self, ordinal: int, span: PlanSpan, keys: bytes, parent: bytes, part_bytes: int
    ) -> Sealed | None:
        """Pull a plan's pages; the report to send, None when the fence is in the way."""
        offsets, parents = array("Q", span.offsets), parent + keys[:-KEY_BYTES]
        if any(self.fenced.get(offset, 0) >= span.generation for offset in offsets):
            return None
        checksums = array("Q")
        for i, offset in enumerate(offsets):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            checksum = int.from_bytes(key[:8], "little") ^ span.part
            held = self.records.get(offset)
            assert held is None or held.generation == span.generation, "overwrites a page"
            self.records[offset] = Record(
                RecordState.SEALED, PageKey(key), span.part, Generation(span.generation),
                Incarnation(self.incarnation), part_bytes, checksum, offset,
                size_class_of(part_bytes), ordinal, PageKey(parent), PAGE_TOKENS,
            )  # fmt: skip
            checksums.append(checksum)
            parent = key
        return Sealed(
            self.segment, self.incarnation, span.generation, ordinal, span.part, part_bytes,
            PAGE_TOKENS, parents, keys, span.offsets, checksums.tobytes(),
        )  # fmt: skip

    def obey(self, command: Message) -> ExtentsConfirmed:
        """Carry out an order on extents."""
        assert isinstance(command, FenceExtents | FreeExtents | RetireExtents), command
        assert command.segment == self.segment
        if command.incarnation != self.incarnation:
            count = len(command.offsets) // 8
            return ExtentsConfirmed(command.epoch, bytes([Outcome.STALE]) * count)
        pairs = zip(array("Q", command.offsets), array("Q", command.generations), strict=True)
        outcomes = bytes(self._obey_one(command, offset, g) for offset, g in pairs)
        return ExtentsConfirmed(command.epoch, outcomes)

    def _obey_one(self, command: Message, offset: int, generation: int) -> Outcome:
        record = self.records.get(offset)
        if isinstance(command, FenceExtents):
            self.fenced[offset] = max(self.fenced.get(offset, 0), generation)
        if record is None or record.generation > generation:
            return Outcome.OK
        if isinstance(command, RetireExtents):
            self.records[offset] = msgspec.structs.replace(record, state=RecordState.REMOVED)
            return Outcome.OK
        if offset in self.locked:
            return Outcome.BUSY
        del self.records[offset]
        return Outcome.OK
