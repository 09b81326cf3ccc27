"""How a simulated worker reads pages of another one: as workers.peer_source, in virtual time.

Out of the other's memory where both are on one host, over a stream else, and whatever lies on a
disk. A page is verified once all of it has come: its checksum, and last the record.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.limits import READ_STALL_MAX_S
from kvstore.page import payload_checksum
from kvstore.record import is_sealed_as
from kvstore.replica import Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import Ingest, PeerSource
from kvstore.wire.messages.transfers import ReadExtents
from tests.simulation.channel import HANDSHAKE_TIMEOUT_S, Channel, Dial, dial
from tests.simulation.pages import keys_of
from tests.simulation.rpc import Endpoint
from tests.simulation.sim_pull import pieces
from tests.simulation.sim_reads import ReadDone
from tests.simulation.tasks import Signal, Steps
from tests.simulation.worker_links import Greeting

if TYPE_CHECKING:
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.sim_worker import SimWorker

_REASONS: Final = {Outcome.STALE: Outcome.SOURCE_LOST}


class PeerRead:
    """The pages of one copy."""

    def __init__(self, worker: SimWorker, message: Ingest) -> None:
        """Read nothing yet."""
        assert isinstance(message.source, PeerSource), message
        self._worker = worker
        self._message = message
        self._source = message.source
        self._link: Endpoint | None = None
        self.reasons: dict[int, Outcome] = {}
        """Why pages were read in vain, as who asked for the copy hears it."""

    def page(self, page: int) -> Steps[bytes | None]:
        """A page's bytes, zeros where it is not what it should be; None where the way fails."""
        worker, ref = self._worker, self._source.segment
        if ref.tier == Tier.DRAM and worker.world.same_host(worker.name, ref.worker):
            memory = worker.others[ref.worker].mapped[ref.segment]
            outcome, data = yield from self._mapped(memory, page)
        else:
            outcome, data = yield from self._fetched(page)
        if outcome is Outcome.TRANSPORT:
            return None
        if outcome is not Outcome.OK:
            self.reasons[page] = _REASONS.get(outcome, outcome)
            return bytes(self._message.part_bytes)
        return data

    def close(self) -> None:
        """Let go of the connection."""
        if self._link is not None:
            self._link.close()

    def _mapped(self, memory: SegmentMemory, page: int) -> Steps[tuple[Outcome, bytes]]:
        """Out of the mapped segment; its worker need not even run."""
        message, ref = self._message, self._source.segment
        offset, data = array("Q", self._source.offsets)[page], b""
        for start, stop in pieces(message.part_bytes):
            data += bytes(memory.payload[offset + start : offset + stop])
            yield self._worker.copy_delay_s()
        row = memory.records.read(offset, size_class_of(message.part_bytes))
        generation = array("Q", self._source.generations)[page]
        key = keys_of(message.keys)[page]
        if not is_sealed_as(row, key, message.part, generation, ref.incarnation):
            return Outcome.STALE, data
        return self._verified(page, data), data

    def _fetched(self, page: int) -> Steps[tuple[Outcome, bytes]]:
        message, source = self._message, self._source
        link = yield from self._connected()
        if link is None:
            return Outcome.TRANSPORT, b""
        column = slice(page * 8, (page + 1) * 8)
        asked = ReadExtents(
            source.segment.segment, source.segment.incarnation, message.part, message.part_bytes,
            keys_of(message.keys)[page], source.offsets[column], source.generations[column],
        )  # fmt: skip
        answered: Signal[object | None] = Signal()
        link.call(asked, READ_STALL_MAX_S, answered.fire)
        yield answered
        reply = answered.value
        if not isinstance(reply, ReadDone):
            link.close()
            return Outcome.TRANSPORT, b""
        (data,), outcome = reply.pages, Outcome(reply.outcomes[0])
        return (self._verified(page, data) if outcome is Outcome.OK else outcome), data

    def _verified(self, page: int, data: bytes) -> Outcome:
        message = self._message
        found = payload_checksum(data, keys_of(message.keys)[page], message.part)
        is_right = found == array("Q", message.checksums)[page]
        return Outcome.OK if is_right else Outcome.CHECKSUM

    def _connected(self) -> Steps[Endpoint | None]:
        """A connection to the other worker for this copy; None where nobody greets."""
        if self._link is not None and self._link.is_open:
            return self._link
        worker, other = self._worker, self._worker.others[self._source.segment.worker]
        link = Endpoint(worker.world, worker.name, _unasked, lambda _: None)
        connected: Signal[Channel | None] = Signal()
        greeting = Greeting("worker", worker.name, worker.name.encode().ljust(16, b"."))
        call = Dial(
            worker.name, other.name, greeting, link.receive, link.ended, connected.fire,
            HANDSHAKE_TIMEOUT_S,
        )  # fmt: skip
        dial(worker.world, call, other.accept)
        yield connected
        if connected.value is None:
            return None
        link.use(connected.value)
        self._link = link
        return link


def _unasked(endpoint: Endpoint, number: int, message: object) -> None:
    raise AssertionError(f"{message!r} to {endpoint.node}, which reads ({number})")
