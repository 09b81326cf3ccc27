"""The doubles that all tests share: virtual time, page contents that can be recomputed, a
transport that moves bytes inside one process."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvstore.ids import KEY_BYTES
from kvstore.page import payload_checksum
from kvstore.record import unpack_record
from kvstore.transfer.transport import all_of, column
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.record import Record
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import IngestSpan, ReadSpan
    from workers.record_table import Found, RecordTable


class ManualClock:
    """A clock that only moves when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        """Start at `now_s`."""
        self._now_s = now_s

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, seconds
        self._now_s += seconds


def adopted_records(records: RecordTable, found: Found) -> list[Record]:
    """The whole records of what a start has taken over, read from their table."""
    rows = (unpack_record(records.read(each.offset, each.size_class)) for each in found.adopted)
    return [record for record in rows if record is not None]


def payload(key: bytes, part: int, nbytes: int) -> bytes:
    """The bytes that tests store under (key, part): any reader can recompute any byte."""
    return hashlib.shake_128(b"payload" + key + part.to_bytes(4, "little")).digest(nbytes)


def keys_of(packed: bytes) -> Iterator[bytes]:
    """Each key of a packed column."""
    return (packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES))


class LoopbackTransport:
    """Keeps pages in a dict by (segment, offset); the transport of tests without processes.

    `spoil` holds Outcome codes to answer for (segment, offset) pairs, each used once.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.pages: dict[tuple[str, int], tuple[bytes, int, int, bytes]] = {}
        self.spoil: dict[tuple[str, int], list[Outcome]] = {}
        self.closed = False

    def _spoiled(self, segment: str, offset: int) -> Outcome:
        waiting = self.spoil.get((segment, offset))
        return waiting.pop(0) if waiting else Outcome.OK

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """Store what the spans name, at once."""
        del timeout_s
        return [self._ingest(span, source) for span in spans]

    def _ingest(self, span: IngestSpan, source: Memory) -> bytes:
        if self.closed:
            return all_of(Outcome.TRANSPORT, len(span))
        outcomes = bytearray()
        for key, offset, place in zip(
            keys_of(span.keys), column(span.offsets), span.places, strict=True
        ):
            outcome = self._spoiled(span.segment.segment, offset)
            if outcome is Outcome.OK:
                data = bytes(source.view[place : place + span.part_bytes])
                where = (span.segment.segment, offset)
                self.pages[where] = (key, span.part, span.generation, data)
            outcomes.append(outcome)
        return bytes(outcomes)

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """Bring what the span names, verified like the real ones do."""
        del timeout_s
        if self.closed:
            into.wipe(span.places, span.part_bytes)
            return all_of(Outcome.TRANSPORT, len(span))
        outcomes = bytearray()
        columns = zip(
            keys_of(span.keys), column(span.offsets), column(span.generations),
            column(span.checksums), span.places, strict=True,
        )  # fmt: skip
        for key, offset, generation, checksum, place in columns:
            outcome = self._spoiled(span.segment.segment, offset)
            held = self.pages.get((span.segment.segment, offset))
            if outcome is Outcome.OK and (held is None or held[:3] != (key, span.part, generation)):
                outcome = Outcome.STALE
            elif outcome is Outcome.OK and held is not None:
                if payload_checksum(held[3], key, span.part) != checksum:
                    outcome = Outcome.CHECKSUM
                else:
                    into.view[place : place + span.part_bytes] = held[3]
            if outcome is not Outcome.OK:
                into.wipe((place,), span.part_bytes)
            outcomes.append(outcome)
        return bytes(outcomes)

    def close(self) -> None:
        """Answer TRANSPORT from now on."""
        self.closed = True
