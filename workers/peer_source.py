"""Pages in segments of other workers: read as any reader reads them, for copies between workers.

Or decoded from shards that others hold, where that is what is to be copied.

Owns the ways to other workers and what is known of each page once it was read. The master keeps
what is read under a lease (I35); a page that was not what it should be leaves zeros, and
`explained` says why. Must not know records or locks of our own segments.
"""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.segment import size_class_of
from kvstore.transfer.degraded import DegradedReads
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import COLUMN_BYTES, ReadSpan, all_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import PeerSource, StripeSource
from workers.ingest import PullFailed, WaitingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvstore.clock import Clock
    from kvstore.transfer.choice import Choice
    from kvstore.transfer.degraded import Gathering
    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.stripes import StripedPage
    from workers.events import StartPull
    from workers.ingest import Target

GROUP_BYTES: Final = 4 * limits.MIB
"""Read at once: a read cannot be cancelled, so it must not take long."""
_REASONS: Final = {Outcome.STALE: Outcome.SOURCE_LOST}
"""What an outcome of a read is to who asked for the copy, where it is not the same."""


class PeerReads:
    """The ways to other workers, each opened once. Thread-safe."""

    def __init__(self, choice: Choice, clock: Clock, note_read: Callable[[str, int], None]) -> None:
        """Own `choice`. `note_read` is told by which kind of transport how many bytes came."""
        self._choice = choice
        self._clock = clock
        self._note_read = note_read
        self._degraded = DegradedReads(self._read_in_time, choice.rank)

    def source(self, start: StartPull) -> PeerPages:
        """The pages of a copy, whose put times out as any does from now on."""
        message = start.message
        size_bytes = len(message.keys) // KEY_BYTES * message.part_bytes
        return PeerPages(self, start, self._clock.now_s() + limits.put_timeout_s(size_bytes))

    def read(self, span: ReadSpan, into: Memory, deadline_s: float) -> bytes:
        """One Outcome byte a page, as Transport.read has it; it takes no longer than a read of so
        much may.
        """
        left_s = max(0.0, deadline_s - self._clock.now_s())
        if span.stripes:
            return self._degraded.read(span, into, left_s)
        return self._read_in_time(span, into, left_s)

    def gather(
        self, page: StripedPage, part_bytes: int, segments: Sequence[SegmentRef]
    ) -> Gathering:
        """k shards of a page, as far as they come in the time that a put of so much may take."""
        timeout_s = limits.put_timeout_s(page.k * part_bytes)
        return self._degraded.gather([page], part_bytes, segments, timeout_s)

    def _read_in_time(self, span: ReadSpan, into: Memory, left_s: float) -> bytes:
        longest_s = (
            limits.READ_STALL_MAX_S + len(span) * span.part_bytes / limits.PUT_BYTES_PER_S_MIN
        )
        timeout_s = min(longest_s, left_s)
        way = self._choice.transport(span.segment, timeout_s)
        if way is None:
            return all_of(Outcome.TRANSPORT, len(span))
        kind, began_s = self._choice.kind_of(way), self._clock.now_s()
        outcomes = way.read(span, into, timeout_s)
        self._choice.note_read(way, span, outcomes, self._clock.now_s() - began_s)
        self._note_read(kind, outcomes.count(Outcome.OK) * span.part_bytes)
        return outcomes

    def close(self) -> None:
        """End the ways; reads fail from now on. Safe to repeat."""
        self._choice.close()


class PeerPages(WaitingSource):
    """The pages of one copy (see `workers.ingest.Source`)."""

    def __init__(self, reads: PeerReads, start: StartPull, deadline_s: float) -> None:
        """Read nothing yet."""
        source = start.message.source
        assert isinstance(source, PeerSource | StripeSource), "only copies read another worker"
        self.group_bytes = max(GROUP_BYTES, size_class_of(start.message.part_bytes))
        """Never less than a page: a page is verified whole."""
        self._reads = reads
        self._message = start.message
        self._source = source
        self._deadline_s = deadline_s
        self._outcomes = bytearray(len(start.message.keys) // KEY_BYTES)
        """Of each page as it was read; OK for those that were not asked for yet."""
        self._room: Memory | None = None
        self._is_cancelled = False

    def room(self, size_bytes: int) -> AbstractContextManager[Memory]:
        """The same each time; no memory is taken before it is written to."""
        if self._room is None:
            self._room = Memory.of("room", mmap.mmap(-1, size_bytes), writable=True)
        return nullcontext(self._room)

    def fill(self, page: int, target: Target) -> None:
        """Read pages whole; PullFailed where not one came because the way failed."""
        if self._is_cancelled:
            raise PullFailed(Outcome.FENCED, "the copy was cancelled")
        into, stop = Memory(target.view, target.address), page + target.count
        outcomes = self._reads.read(self._span(page, target), into, self._deadline_s)
        self._outcomes[page:stop] = outcomes
        if outcomes == all_of(Outcome.TRANSPORT, target.count):
            raise PullFailed(Outcome.TRANSPORT, f"{self._whose()} cannot be read")

    def cancel(self) -> None:
        """A group of reads ends by itself; no other begins."""
        self._is_cancelled = True

    def explained(self, outcomes: bytes) -> bytes:
        """The outcomes of the pull; of a page that was read in vain, why that was."""
        rows = zip(outcomes, self._outcomes, strict=True)
        return bytes(
            _REASONS.get(Outcome(read), read) if read and pulled == Outcome.CHECKSUM else pulled
            for pulled, read in rows
        )

    def _whose(self) -> str:
        source = self._source
        return source.segment.worker if isinstance(source, PeerSource) else "too much of a stripe"

    def _span(self, page: int, target: Target) -> ReadSpan:
        message, source, stop = self._message, self._source, page + target.count
        column = slice(page * COLUMN_BYTES, stop * COLUMN_BYTES)
        keys, checksums = message.keys[page * KEY_BYTES : stop * KEY_BYTES], message.checksums
        places = tuple(range(0, target.count * target.stride, target.stride))
        if isinstance(source, StripeSource):
            zeros = bytes(target.count * COLUMN_BYTES)
            return ReadSpan(
                source.segments[0], message.part, message.part_bytes, keys, zeros, zeros,
                checksums[column], places, source.pages[page:stop], source.segments,
            )  # fmt: skip
        return ReadSpan(
            source.segment, message.part, message.part_bytes, keys, source.offsets[column],
            source.generations[column], checksums[column], places,
        )  # fmt: skip
