"""A pool worker as the master meets it: its records and manners, scripted, without I/O.

It keeps records as a real one does and answers orders by the documented rules. It lends one segment
of memory, and perhaps a file on a drive, whose pages may be encoded in a part of their length.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from kvstore.ids import KEY_BYTES, Generation, Incarnation, PageKey
from kvstore.page import parents_of
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
    ReleaseChunks,
    RetireExtents,
    SegmentOffer,
    WorkerAccepted,
)
from kvstore.wire.messages.puts import (
    ExtentSource,
    Ingest,
    Ingested,
    PeerSource,
    PlanSpan,
    Sealed,
    SealedNoted,
    StripeSource,
)
from kvstore.wire.messages.stripes import HashParity, ParityHashed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.stripes import Shard
    from master.events import SessionId
    from tests.unit.master_rig import Rig

PAGE_TOKENS = 128
"""Of every page that is put."""


class FakeSegment:
    """Records of one segment."""

    def __init__(self, name: str, tier: str, geometry: Geometry) -> None:
        self.segment = name
        self.tier = tier
        self.geometry = geometry
        self.incarnation = 1
        self.records: dict[int, Record] = {}
        self.fenced: dict[int, int] = {}
        self.locked: set[int] = set()
        self.released: set[int] = set()

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

    def rows(self, start: int) -> InventoryRows:
        """One chunk's records, which has some."""
        held = [
            r
            for _, r in sorted(self.records.items())
            if self.geometry.chunk_start(r.offset, r.size_class) == start
        ]
        rows = b"".join(map(pack_record, held))
        return InventoryRows(self.segment, self.incarnation, start, held[0].size_class, rows)

    def new_life(self) -> None:
        """The same medium again: what was being written is FREE."""
        self.incarnation += 1
        self.released.clear()
        self.locked.clear()
        self.fenced.clear()
        self.records = {
            offset: msgspec.structs.replace(r, incarnation=Incarnation(self.incarnation))
            for offset, r in self.records.items()
            if r.state is not RecordState.RESERVED
        }

    def write(
        self,
        ordinal: int,
        span: PlanSpan,
        keys: bytes,
        parent: bytes,
        part_bytes: int,
        size_class: int = 0,
        token_count: int = PAGE_TOKENS,
    ) -> Sealed | None:
        """Pull a plan's pages; the report to send, None when the fence is in the way."""
        offsets, parents = array("Q", span.offsets), parents_of(parent, keys)
        if any(self.fenced.get(offset, 0) >= span.generation for offset in offsets):
            return None
        checksums = array("Q")
        for i, offset in enumerate(offsets):
            own = slice(i * KEY_BYTES, (i + 1) * KEY_BYTES)
            key = keys[own]
            checksum = int.from_bytes(key[:8], "little") ^ span.part
            held = self.records.get(offset)
            assert held is None or held.generation == span.generation, "overwrites a page"
            self.records[offset] = Record(
                RecordState.SEALED, PageKey(key), span.part, Generation(span.generation),
                Incarnation(self.incarnation), part_bytes, checksum, offset,
                size_class or size_class_of(part_bytes), ordinal, PageKey(parents[own]),
                token_count, stored_bytes=size_class,
            )  # fmt: skip
            checksums.append(checksum)
        return Sealed(
            self.segment, self.incarnation, span.generation, ordinal, span.part, part_bytes,
            token_count, parents, keys, span.offsets, checksums.tobytes(),
        )  # fmt: skip

    def release(self, command: ReleaseChunks) -> Done:
        """Give memory back, in which nothing may lie."""
        chunks = {offset // self.geometry.chunk_bytes for offset in self.records}
        assert not chunks & set(command.chunks), command
        self.released |= set(command.chunks)
        return Done()

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

    def _obey_one(
        self, command: FenceExtents | FreeExtents | RetireExtents, offset: int, generation: int
    ) -> Outcome:
        record = self.records.get(offset)
        if isinstance(command, FenceExtents):
            self.fenced[offset] = max(self.fenced.get(offset, 0), generation)
        if record is None or record.generation > generation:
            return Outcome.OK
        assert record.size_class == command.size_class, "an order of another class"
        if isinstance(command, RetireExtents):
            self.records[offset] = msgspec.structs.replace(record, state=RecordState.REMOVED)
            return Outcome.OK
        if offset in self.locked:
            return Outcome.BUSY
        del self.records[offset]
        return Outcome.OK

    def has(self, source: ExtentSource | PeerSource, ingest: Ingest) -> list[bool]:
        """Which pages of a move lie here as its source says."""
        named = source if isinstance(source, ExtentSource) else source.segment
        columns = array("Q", source.offsets), array("Q", source.generations)
        checksums = array("Q", ingest.checksums)
        found = []
        for i, (offset, generation) in enumerate(zip(*columns, strict=True)):
            record = self.records.get(offset)
            key = ingest.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            wanted = key, generation, checksums[i], RecordState.SEALED
            held = record and (record.key, record.generation, record.checksum, record.state)
            found.append(named.incarnation == self.incarnation and held == wanted)
        return found


class FakeWorker(FakeSegment):
    """A pool worker's manners, and the records of its memory."""

    def __init__(self, rig: Rig, name: str, segment: str, geometry: Geometry) -> None:
        super().__init__(segment, "dram", geometry)
        self.rig = rig
        self.name = name
        self.session: SessionId | None = None
        self.lower: FakeSegment | None = None
        """A file on a drive."""
        self.stored_bytes: dict[bytes, int] = {}
        """Lengths of encoded pages; all others cannot be encoded."""

    @property
    def segments(self) -> list[FakeSegment]:
        """All that it lends."""
        return [self] if self.lower is None else [self, self.lower]

    def connect(self) -> None:
        """Open a control connection and register."""
        self.session = self.rig.open("worker", "", self.name)
        self.register()

    def register(self) -> Message | None:
        """Register this worker's segments."""
        address = Address("tcp", f"{self.name}:1", 1)
        offers = [
            SegmentOffer(
                each.segment,
                each.incarnation,
                each.tier,
                each.geometry,
                tuple(sorted(each.released)),
            )
            for each in self.segments
        ]
        message = RegisterWorker(self.name, self.name, (address,), tuple(offers))
        reply = self.ask(message)
        assert isinstance(reply, WorkerAccepted), reply
        return reply

    def ask(self, message: Message) -> Message | None:
        """Send a request on the control connection."""
        assert self.session is not None
        return self.rig.ask(self.session, message)

    def offer(self, segment: FakeSegment | None = None) -> InventoryWanted:
        """Send digests."""
        each = segment or self
        reply = self.ask(OfferInventory(each.segment, each.incarnation, each.digests()))
        reply = self.rig.settled(self.session, reply)
        assert isinstance(reply, InventoryWanted), reply
        return reply

    def send_rows(self, start: int, segment: FakeSegment | None = None) -> None:
        """Send one chunk's records."""
        reply = self.rig.settled(self.session, self.ask((segment or self).rows(start)))
        assert isinstance(reply, Done), reply

    def join(self) -> None:
        """Register and go through the whole inventory."""
        self.connect()
        for each in self.segments:
            for start in self.offer(each).chunk_starts:
                self.send_rows(start, each)
            reply = self.ask(InventoryEnd(each.segment, each.incarnation))
            assert isinstance(reply, Done), reply

    def restart(self) -> None:
        """A new life of the same memory and drive."""
        for each in self.segments:
            each.new_life()

    def leave(self) -> None:
        """Lose the control connection."""
        assert self.session is not None
        self.rig.close(self.session)
        self.session = None

    def beat(self) -> None:
        """Show that it lives."""
        self.ask(Heartbeat(self.name, 1, len(self.locked)))

    def answer(self, command: Message) -> Message | None:
        """Carry out whatever the master asked for; None when this worker has gone meanwhile."""
        if isinstance(command, HashParity):
            return self.hash_parity(command)
        kinds = Ingest | FenceExtents | FreeExtents | RetireExtents | ReleaseChunks
        assert isinstance(command, kinds), command
        segment = next(each for each in self.segments if each.segment == command.segment)
        match command:
            case Ingest():
                return self.move(command, segment)
            case ReleaseChunks():
                return segment.release(command)
            case _:
                return segment.obey(command)

    def move(self, ingest: Ingest, target: FakeSegment) -> Ingested | None:
        """Copy pages from one segment to another, page by page, and report each."""
        source = ingest.source
        if isinstance(source, StripeSource):
            return self._decode(source, ingest, target)
        if isinstance(source, PeerSource):
            assert source.segment.worker != self.name, source
            origin, lost = self.rig.segment(source.segment.segment), Outcome.SOURCE_LOST
        else:
            assert isinstance(source, ExtentSource), source
            origin, lost = self.rig.segment(source.segment), Outcome.STALE
            assert origin in self.segments, source
        encoded = 0
        outcomes = bytearray()
        for i, there in enumerate(origin.has(source, ingest)):
            key = ingest.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            size = self.stored_bytes.get(key, 0) if target.tier == "nvme" else 0
            encoded = max(encoded, size)
            if not there:
                outcomes.append(lost)
            elif (size or ingest.part_bytes) > ingest.size_class:
                outcomes.append(Outcome.TOO_BIG)
            else:
                outcomes.append(self._moved_page(ingest, target, i))
        return None if self.session is None else Ingested(bytes(outcomes), encoded)

    def _decode(self, source: StripeSource, ingest: Ingest, target: FakeSegment) -> Ingested | None:
        """Pages of which k shards can be read."""
        outcomes = bytearray()
        for i, page in enumerate(source.pages):
            assert page.number not in {shard.number for shard in page.shards}, page
            there = [self.reads(shard, source.segments) for shard in page.shards]
            is_enough = there.count(True) >= page.k
            outcomes.append(self._moved_page(ingest, target, i) if is_enough else Outcome.TRANSPORT)
        return None if self.session is None else Ingested(bytes(outcomes))

    def reads(self, shard: Shard, segments: Sequence[SegmentRef]) -> bool:
        """Whether a shard lies where it is said to, with a worker that is there."""
        ref = segments[shard.segment]
        origin = self.rig.segment(ref.segment)
        held = origin.records.get(shard.offset)
        found = held and (held.key, held.part, held.generation, held.checksum, held.state)
        wanted = shard.key, shard.part, shard.generation, shard.checksum, RecordState.SEALED
        is_there = self.rig.workers[ref.worker].session is not None
        return is_there and ref.incarnation == origin.incarnation and found == wanted

    def hash_parity(self, question: HashParity) -> ParityHashed:
        """What the checksums of its keys are here, if all data can be read."""
        outcomes = bytes(
            Outcome.OK if self.reads(shard, question.segments) else Outcome.STALE
            for shard in question.shards
        )
        keys = question.keys
        found = b"".join(keys[at : at + 8] for at in range(0, len(keys), KEY_BYTES))
        return ParityHashed(outcomes, b"" if any(outcomes) else found)

    def _moved_page(self, ingest: Ingest, target: FakeSegment, i: int) -> int:
        at = slice(i * KEY_BYTES, (i + 1) * KEY_BYTES)
        parent = ingest.keys[at.start - KEY_BYTES : at.start] if i else ingest.parent
        offset = ingest.offsets[i * 8 : (i + 1) * 8]
        if int.from_bytes(offset, "little") in target.locked:
            return Outcome.BUSY
        span = PlanSpan(0, 1, ingest.part, 0, ingest.generation, offset)
        report = target.write(
            ingest.namespace_ordinal, span, ingest.keys[at], parent, ingest.part_bytes,
            ingest.size_class, ingest.token_count,
        )  # fmt: skip
        if report is None:
            return Outcome.FENCED
        reply = self.rig.ask(self.session, report) if self.session is not None else None
        noted = reply.outcomes[0] if isinstance(reply, SealedNoted) else Outcome.TRANSPORT
        if noted == Outcome.PLAN_CLOSED:
            del target.records[int.from_bytes(offset, "little")]
        return noted
