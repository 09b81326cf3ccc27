"""How a simulated client reads: what kvstore.transfer does, piece by piece in virtual time.

Shared memory where client and worker are on one host, by way of the staging segment for pages on a
disk; a stream elsewhere. The rules of verifying are the real ones: checksum of what has come, then
the record; the lease is the plan's to check.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstore.page import payload_checksum
from kvstore.record import is_sealed_as
from kvstore.replica import Tier
from kvstore.segment import size_class_of
from kvstore.transfer.transport import IngestSpan, ReadSpan, all_of
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.transfers import ReadExtents, ReleaseStaged, Staged, StageExtents
from tests.simulation.client_moves import copy_delay_s
from tests.simulation.pages import keys_of
from tests.simulation.sim_pull import pieces
from tests.simulation.sim_reads import ReadDone
from tests.simulation.store import SHARED
from tests.simulation.tasks import Signal, Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.reads import Rank
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.sim_client import SimClient

_NOT_THERE: Final = frozenset((Outcome.BUSY, Outcome.STALE))
"""Of a staged page: another has its slot by now."""


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
            if is_staged(client, span):
                outcomes = yield from staged(client, span, deadline_s, self._copy)
            elif client.world.same_host(client.name, span.segment.worker):
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
    return client.workers[span.segment.worker].mapped[span.segment.segment]


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


def is_staged(client: SimClient, span: ReadSpan) -> bool:
    """Whether a span is read in the memory where its worker stages pages of a disk."""
    on_disk = span.segment.tier == Tier.NVME
    return on_disk and client.world.same_host(client.name, span.segment.worker)


def staged(
    client: SimClient, span: ReadSpan, deadline_s: float, take: Callable[[ReadSpan], Steps[bytes]]
) -> Steps[bytes]:
    """Have pages staged, read or hold them there by `take`, release them; their outcomes."""
    link = yield from client.take_data_link(span.segment.worker, deadline_s)
    if link is None or client.world.now >= deadline_s:
        return all_of(Outcome.TRANSPORT, len(span))
    answered: Signal[object | None] = Signal()
    message = StageExtents(
        span.segment.segment, span.segment.incarnation, span.part, span.part_bytes, span.keys,
        span.offsets, span.generations, 0.0,
    )  # fmt: skip
    link.call(message, deadline_s - client.world.now, answered.fire)
    yield answered
    reply = answered.value
    if not isinstance(reply, Staged):
        link.close()
        return all_of(Outcome.TRANSPORT, len(span))
    pages = [page for page, outcome in enumerate(reply.outcomes) if outcome == Outcome.OK]
    outcomes = bytearray(reply.outcomes)
    if pages:
        there = _staged_span(span, reply, pages)
        found = yield from take(there)
        for page, outcome in zip(pages, found, strict=True):
            outcomes[page] = Outcome.BUSY if outcome in _NOT_THERE else outcome
        if link.is_open:
            release = ReleaseStaged(there.offsets, there.generations)
            link.call(release, max(0.0, deadline_s - client.world.now), lambda _: None)
    client.give_data_link(span.segment.worker, link)
    return bytes(outcomes)


def _staged_span(span: ReadSpan, reply: Staged, pages: Sequence[int]) -> ReadSpan:
    def picked(column: bytes) -> bytes:
        return array("Q", (array("Q", column)[page] for page in pages)).tobytes()

    keys = keys_of(span.keys)
    segment = replace(span.segment, segment=reply.segment, incarnation=reply.incarnation)
    return ReadSpan(
        segment, span.part, span.part_bytes, b"".join(keys[page] for page in pages),
        picked(reply.offsets), picked(reply.generations), picked(span.checksums),
        tuple(span.places[page] for page in pages),
    )  # fmt: skip


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
        deadline_s = client.world.now + timeout_s
        results: list[bytes] = []
        for span in spans:
            if is_staged(client, span):
                outcomes = yield from staged(client, span, deadline_s, self._hold)
            else:
                outcomes = yield from self._hold(span)
            results.append(outcomes)
        return results

    def _hold(self, span: ReadSpan) -> Steps[bytes]:
        client, memory = self._client, memory_of(self._client, span)
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
        return bytes(outcomes)

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
    """How good a way to a segment is, as kvstore.transfer.choice says: host first, then tier."""

    def rank(segment: SegmentRef) -> int | None:
        slower = segment.tier != Tier.DRAM
        if client.world.same_host(client.name, segment.worker):
            return int(slower)
        return None if views else 10 + slower

    return rank
