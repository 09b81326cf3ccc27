"""Carries out the steps of plans, blocking: asks the master, moves pages by the right transport."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from kvstore.replica import Tier
from kvstore.transfer.choice import nothing_moved
from kvstore.transfer.degraded import DegradedReads
from kvstore.transfer.shm import ShmTransport
from kvstore.transfer.transport import all_of
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.transfer.choice import Choice
    from kvstore.transfer.mapped_segment import HeldSpan
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import IngestSpan, Reader, ReadSpan, Transport
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef

    AskMaster = Callable[[Message, float], Message]


BY_MAPPING: Final = frozenset({"shm"})
"""Kinds of transports that map a worker's memory."""


class Blocking:
    """Steps of one call, carried out in the calling thread."""

    def __init__(
        self, ask: AskMaster, pages: Mover | Viewer, pause: Callable[[float], None]
    ) -> None:
        """Ask through `ask`, move through `pages`."""
        self.ask = ask
        self.ingest = pages.ingest
        self.read = pages.read
        self.wipe = pages.wipe
        self.pause = pause


class Mover(ABC):
    """Moves pages between workers and the memory of a caller, whatever kind that is."""

    def __init__(self, choice: Choice) -> None:
        """Take workers' transports from `choice`."""
        self._choice = choice

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        """How good the way to a segment is; None when there is none."""
        return self._choice.rank(segment, timeout_s)

    def order(self, alike: Sequence[SegmentRef]) -> Sequence[int]:
        """See Choice.order."""
        return self._choice.order(alike)

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        """Outcome bytes for each span; spans of one worker travel together."""
        deadline_s = time.monotonic() + timeout_s
        ways = [self._choice.transport(span.segment, timeout_s) for span in spans]
        results = [b""] * len(spans)
        for way in dict.fromkeys(ways):
            mine = [i for i, each in enumerate(ways) if each is way]
            left_s = max(0.0, deadline_s - time.monotonic())
            outcomes = self._ingest([spans[i] for i in mine], way, left_s)
            for i, outcome in zip(mine, outcomes, strict=True):
                results[i] = outcome
        return results

    def _ingest(
        self, spans: Sequence[IngestSpan], way: Transport | None, timeout_s: float
    ) -> list[bytes]:
        if way is None:
            return [all_of(Outcome.TRANSPORT, len(span)) for span in spans]
        outcomes = self._ingest_by(way, spans, timeout_s)
        if nothing_moved(b"".join(outcomes)):
            self._choice.drop(way)
        return outcomes

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        """Outcome bytes for each span. `others`: see ReadPages; who does not hedge has no use."""
        del others
        deadline_s = time.monotonic() + timeout_s
        results: list[bytes] = []
        for span in spans:
            left_s = max(0.0, deadline_s - time.monotonic())
            if span.stripes:
                degraded = DegradedReads(self._choice.read, self._choice.rank)
                results.append(self._read_by(degraded, span, left_s))
                continue
            transport = self._choice.transport(span.segment, left_s)
            if transport is None:
                self.wipe(span.places, span.part_bytes)
                results.append(all_of(Outcome.TRANSPORT, len(span)))
                continue
            began_s = time.monotonic()
            results.append(self._read_by(transport, span, left_s))
            took_s = time.monotonic() - began_s
            self._choice.note_read(transport, span, results[-1], took_s)
        return results

    @abstractmethod
    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Zero what a read delivered."""

    @abstractmethod
    def _ingest_by(
        self, way: Transport, spans: Sequence[IngestSpan], timeout_s: float
    ) -> list[bytes]:
        """`Transport.ingest` from the caller's memory."""

    @abstractmethod
    def _read_by(self, way: Reader, span: ReadSpan, timeout_s: float) -> bytes:
        """`Reader.read` into the caller's memory."""


class HostMover(Mover):
    """Moves pages between workers and one stretch of this process's memory."""

    def __init__(self, choice: Choice, memory: Memory) -> None:
        """The memory is source of ingests and destination of reads."""
        super().__init__(choice)
        self._memory = memory

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Zero what a read delivered."""
        self._memory.wipe(places, size_bytes)

    def _ingest_by(
        self, way: Transport, spans: Sequence[IngestSpan], timeout_s: float
    ) -> list[bytes]:
        return way.ingest(spans, self._memory, timeout_s)

    def _read_by(self, way: Reader, span: ReadSpan, timeout_s: float) -> bytes:
        return way.read(span, self._memory, timeout_s)


class Viewer:
    """Holds pages in place instead of copying them; places are positions in the result."""

    def __init__(self, choice: Choice) -> None:
        """Hold nothing yet."""
        self._choice = choice
        self._held: list[HeldSpan] = []
        self._where: dict[int, tuple[HeldSpan, int]] = {}

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        """Only memory mapped into this process can be viewed, and never a device's."""
        if segment.tier == Tier.HBM:
            return None
        return self._choice.rank(segment, timeout_s, BY_MAPPING)

    def order(self, alike: Sequence[SegmentRef]) -> Sequence[int]:
        """See Choice.order."""
        return self._choice.order(alike)

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        """Views are of pages that are there: nothing is ever ingested."""
        raise AssertionError((spans, timeout_s))

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        """Lock and verify; Outcome bytes for each span."""
        del others
        deadline_s = time.monotonic() + timeout_s
        results: list[bytes] = []
        for span in spans:
            left_s = max(0.0, deadline_s - time.monotonic())
            transport = self._choice.transport(span.segment, left_s)
            if not isinstance(transport, ShmTransport):
                results.append(all_of(Outcome.TRANSPORT, len(span)))
                continue
            began_s = time.monotonic()
            outcomes, found = transport.hold(span, left_s)
            for held in found:
                self._held.append(held)
                self._where.update({place: (held, i) for i, place in enumerate(held.places)})
            self._choice.note_read(transport, span, outcomes, time.monotonic() - began_s)
            results.append(outcomes)
        return results

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Let pages go whose lease ended before they were verified."""
        del size_bytes
        for place in places:
            if place in self._where:
                held, index = self._where.pop(place)
                held.drop((index,))

    def view(self, place: int) -> memoryview:
        """The view of a page that is a hit."""
        held, index = self._where[place]
        view = held.views[index]
        assert view is not None, place
        return view

    def end_or_warn(self) -> None:
        """Let every page go; ResourceWarning for those that somebody still uses (they stay locked).

        For the end of a context manager that its caller leaves.
        """
        self._where.clear()
        held, self._held = self._held, []
        leaked = sum(each.end() for each in held)
        if leaked:
            text = f"{leaked} pages are still in use after their `with` and stay locked"
            warnings.warn(text, ResourceWarning, stacklevel=4)
