"""How a simulated client has its pages fetched: puts, as kvstore.transfer does them, in pieces.

A buffer that the worker maps where both are on one host, a stream elsewhere.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.transfer.transport import IngestSpan, all_of, span_checksums
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.puts import BufferSource, Ingested, StreamSource
from tests.simulation.sim_pull import Piece, pieces
from tests.simulation.tasks import Signal, Steps, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.transport import ReadSpan
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
