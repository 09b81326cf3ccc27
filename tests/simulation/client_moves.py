"""How a simulated client moves bytes: what kvstore.transfer does, piece by piece in virtual time.

Shared memory where client and worker are on one host, a stream elsewhere. The rules of verifying
are the real ones: checksum of what has come, then the record; the lease is the plan's to check.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.page import payload_checksum
from kvstore.record import is_sealed_as
from kvstore.segment import size_class_of
from kvstore.transfer.transport import IngestSpan, all_of, span_checksums
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.puts import BufferSource, Ingested, StreamSource
from kvstore.wire.messages.transfers import ReadExtents
from tests.simulation.memory import SHARED
from tests.simulation.pages import keys_of
from tests.simulation.sim_pull import Piece, ReadDone, pieces
from tests.simulation.tasks import Signal, Steps, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.reads import Rank
    from kvstore.transfer.transport import ReadSpan
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_client import SimClient

PAGES_PER_INGEST_MAX: Final = 4


class Moves(Protocol):
    """What a plan may ask to have moved."""

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> Steps[list[bytes]]:
        """Have workers pull these."""
        ...

    def read(self, spans: Sequence[ReadSpan], timeout_s: float) -> Steps[list[bytes]]:
        """Bring these."""
        ...

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Take these back."""
        ...


def copy_delay_s(client: SimClient) -> float:
    """How long a client's copy of one piece takes; now and then it is swapped out meanwhile."""
    options = client.checks.options
    if client.world.chance(options.slow_copy) and not client.checks.is_healed:
        stopped_s = client.random.uniform(0.0, options.slow_copy_max_s)
        client.world.nodes[client.name].stopped_s += stopped_s
        return stopped_s
    return client.random.uniform(0.0001, 0.001)


class Put:
    """Moves of one put: its pages lie in one buffer, whose right bytes are known."""

    def __init__(self, client: SimClient, right: bytes) -> None:
        """Fill a buffer of this client."""
        self._client = client
        self._right = right
        self.number = client.next_number()
        self.buffer = bytearray(right)
        client.buffers[self.number] = self.buffer
        self._pending = 0
        self._is_hashed = False

    def close(self) -> None:
        """Unmap the buffer; a worker that still has it mapped keeps its mapping."""
        self._client.buffers.pop(self.number, None)

    def read(self, spans: Sequence[ReadSpan], timeout_s: float) -> Steps[list[bytes]]:
        """A put reads nothing."""
        raise AssertionError(spans)

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """A put wipes nothing."""
        raise AssertionError(places)

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> Steps[list[bytes]]:
        """Send each span in messages of a few pages, wait for all answers."""
        client = self._client
        client.buffers[self.number] = self.buffer  # attached again where it was given up
        self.buffer[:] = self._right
        self._is_hashed = False
        outcomes = [bytearray(all_of(Outcome.TRANSPORT, len(span))) for span in spans]
        by_worker: dict[str, list[tuple[int, IngestSpan]]] = {}
        for nth, span in enumerate(spans):
            by_worker.setdefault(span.segment.worker, []).append((nth, span))
        deadline_s = client.world.now + timeout_s
        if len(by_worker) == 1 and len(spans) == 1 and len(spans[0]) <= PAGES_PER_INGEST_MAX:
            self._disturb()  # after the one message's checksums
        for worker, mine in by_worker.items():
            link = yield from client.take_data_link(worker, deadline_s)
            if link is not None:
                yield from self._ingest_at(link, mine, outcomes, deadline_s)
                if self._pending:
                    link.close()
                else:
                    client.give_data_link(worker, link)
        return [bytes(each) for each in outcomes]

    def _ingest_at(
        self,
        link: Endpoint,
        spans: list[tuple[int, IngestSpan]],
        outcomes: list[bytearray],
        deadline_s: float,
    ) -> Steps[None]:
        world = self._client.world
        waits: list[tuple[int, int, int, Signal[object | None]]] = []
        for nth, span in spans:
            for first in range(0, len(span), PAGES_PER_INGEST_MAX):
                piece = span.cut(first, min(len(span), first + PAGES_PER_INGEST_MAX))
                answered: Signal[object | None] = Signal()
                self._send(link, piece, deadline_s - world.now, answered)
                waits.append((nth, first, len(piece), answered))
                yield copy_delay_s(self._client)
        self._pending = 0
        for nth, first, count, answered in waits:
            if not answered.is_set:
                yield answered
            reply = answered.value
            if isinstance(reply, Ingested):
                outcomes[nth][first : first + count] = reply.outcomes
            elif not isinstance(reply, Failure):
                self._pending += 1  # nobody knows what became of it: the connection must go

    def _send(
        self, link: Endpoint, piece: IngestSpan, timeout_s: float, answered: Signal[object | None]
    ) -> None:
        """One Ingest. The checksums are computed before it leaves, over the writer's own bytes."""
        client = self._client
        checksums = span_checksums(piece, memoryview(self.buffer))
        self._is_hashed = True
        if client.world.same_host(client.name, piece.segment.worker):
            source = BufferSource(self.number, array("Q", piece.places).tobytes())
            link.call(piece.message(checksums, source), timeout_s, answered.fire)
        else:
            number = link.call(piece.message(checksums, StreamSource()), timeout_s, answered.fire)
            spawn(client.world, client.name, self._stream(link, number, piece))

    def _stream(self, link: Endpoint, number: int, piece: IngestSpan) -> Steps[None]:
        """The bytes that follow an Ingest, as they are in the buffer when they leave."""
        for page, place in enumerate(piece.places):
            for start, stop in pieces(piece.part_bytes):
                yield copy_delay_s(self._client)
                if not link.is_open:
                    return
                data = bytes(self.buffer[place + start : place + stop])
                link.send(Piece(number, page, start, data))

    def _disturb(self) -> None:
        """A fault: somebody writes into the buffer while it is being put, or closes it.

        Not before the checksums are computed: what is in the buffer then is what is stored.
        """
        client = self._client
        if client.checks.is_healed or not client.world.chance(client.checks.options.disturb):
            return
        at = client.random.randrange(len(self.buffer))
        is_closed = client.random.random() < 0.3
        client.world.counts["fault source closed" if is_closed else "fault source changed"] += 1

        def change() -> None:
            if is_closed:
                self.close()
            elif self._is_hashed:
                self.buffer[at] ^= 0xFF

        client.world.after_on(client.name, client.random.uniform(0.0, 0.05), change)


class Read:
    """Moves of one copying read, into one buffer."""

    def __init__(self, client: SimClient, size: int) -> None:
        """The buffer starts as zeros."""
        self._client = client
        self.into = bytearray(size)
        self.taken_s: dict[int, float] = {}
        """When what lies at a place had come."""

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> Steps[list[bytes]]:
        """A read puts nothing."""
        raise AssertionError(spans)

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Refused bytes must not reach anybody."""
        for place in places:
            self.into[place : place + size_bytes] = bytes(size_bytes)

    def read(self, spans: Sequence[ReadSpan], timeout_s: float) -> Steps[list[bytes]]:
        """One span after the other."""
        client = self._client
        deadline_s = client.world.now + timeout_s
        results: list[bytes] = []
        for span in spans:
            if client.world.same_host(client.name, span.segment.worker):
                outcomes = yield from self._copy(span)
            else:
                outcomes = yield from self._fetch(span, deadline_s - client.world.now)
            self.wipe([p for p, o in zip(span.places, outcomes, strict=True) if o], span.part_bytes)
            results.append(outcomes)
        for span in spans:
            self.taken_s.update(dict.fromkeys(span.places, client.world.now))
        return results

    def _copy(self, span: ReadSpan) -> Steps[bytes]:
        """Out of the mapped segment; its worker need not even run."""
        client, size = self._client, span.part_bytes
        memory = memory_of(client, span)
        offsets = array("Q", span.offsets)
        for place, offset in zip(span.places, offsets, strict=True):
            for start, stop in pieces(size):
                self.into[place + start : place + stop] = memory.payload[
                    offset + start : offset + stop
                ]
                yield copy_delay_s(client)
        return bytes(
            verified(client, span, i, bytes(self.into[place : place + size]), memory)
            for i, place in enumerate(span.places)
        )

    def _fetch(self, span: ReadSpan, timeout_s: float) -> Steps[bytes]:
        """From another host, over a stream; the worker checks the records."""
        deadline_s = self._client.world.now + timeout_s
        client, size, worker = self._client, span.part_bytes, span.segment.worker
        link = yield from client.take_data_link(worker, deadline_s)
        if link is None or client.world.now >= deadline_s:
            return all_of(Outcome.TRANSPORT, len(span))
        answered: Signal[object | None] = Signal()
        message = ReadExtents(
            span.segment.segment, span.segment.incarnation, span.part, size, span.keys,
            span.offsets, span.generations,
        )  # fmt: skip
        link.call(message, deadline_s - client.world.now, answered.fire)
        yield answered
        reply = answered.value
        if not isinstance(reply, ReadDone):
            link.close()
            return all_of(Outcome.TRANSPORT, len(span))
        client.give_data_link(worker, link)
        outcomes = bytearray(reply.outcomes)
        for i, (key, checksum) in enumerate(
            zip(keys_of(span.keys), array("Q", span.checksums), strict=True)
        ):
            place = span.places[i]
            self.into[place : place + size] = reply.pages[i]
            if outcomes[i] == Outcome.OK and not has_checksum(
                reply.pages[i], key, span.part, checksum
            ):
                outcomes[i] = Outcome.CHECKSUM
        return bytes(outcomes)


def has_checksum(data: bytes | memoryview, key: bytes, part: int, checksum: int) -> bool:
    """Whether these bytes are what the writer hashed."""
    return payload_checksum(data, key, part) == checksum


def memory_of(client: SimClient, span: ReadSpan) -> SegmentMemory:
    """The mapped segment that a span is about."""
    memories = client.workers[span.segment.worker].memories
    return next(memory for name, memory in memories.items() if name == span.segment.segment)


def verified(
    client: SimClient, span: ReadSpan, i: int, data: bytes | memoryview,
    memory: SegmentMemory,
) -> Outcome:  # fmt: skip
    """What kvstore.transfer.mapped_segment says of a page: checksum, and last the record (I8)."""
    key = keys_of(span.keys)[i]
    offset, generation = array("Q", span.offsets)[i], array("Q", span.generations)[i]
    matches = has_checksum(data, key, span.part, array("Q", span.checksums)[i])
    row = memory.records.read(offset, size_class_of(span.part_bytes))
    if not is_sealed_as(row, key, span.part, generation, span.segment.incarnation):
        return Outcome.STALE
    if matches:
        client.checks.accepted(span, i, memory)
    return Outcome.OK if matches else Outcome.CHECKSUM


class View:
    """Moves of zero-copy views: pages are locked and verified where they lie."""

    def __init__(self, client: SimClient) -> None:
        """Hold nothing."""
        self._client = client
        self.held: dict[int, tuple[SegmentMemory, int, int]] = {}
        """(memory, offset, payload bytes) by place in the result."""

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> Steps[list[bytes]]:
        """A view puts nothing."""
        raise AssertionError(spans)

    def read(self, spans: Sequence[ReadSpan], timeout_s: float) -> Steps[list[bytes]]:
        """Lock, then verify in place, page by page."""
        client = self._client
        results: list[bytes] = []
        for span in spans:
            memory = memory_of(client, span)
            outcomes = bytearray()
            for i, offset in enumerate(array("Q", span.offsets)):
                if not memory.try_shared(client.name, offset, size_class_of(span.part_bytes)):
                    outcomes.append(Outcome.BUSY)
                    continue
                yield copy_delay_s(client)
                data = memory.payload[offset : offset + span.part_bytes]
                outcomes.append(verified(client, span, i, data, memory))
                self.held[span.places[i]] = (memory, offset, span.part_bytes)
                if outcomes[-1] != Outcome.OK:
                    self.wipe((span.places[i],), span.part_bytes)
            results.append(bytes(outcomes))
        return results

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Let go of these pages."""
        for place in places:
            held = self.held.pop(place, None)
            if held is not None:
                memory, offset, size = held
                memory.unlock(SHARED, self._client.name, offset, size_class_of(size))

    def end(self) -> None:
        """Let go of everything."""
        self.wipe(list(self.held), 0)


def rank_for(client: SimClient, views: bool) -> Rank:
    """How good a way to a segment is, as kvstore.transfer.choice says."""

    def rank(segment: SegmentRef) -> int | None:
        if client.world.same_host(client.name, segment.worker):
            return 0
        return None if views else 10

    return rank
