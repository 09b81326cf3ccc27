"""Reading pages that nobody holds any more: any k shards of their stripe give them.

For clients, whose page's holder is gone, and for workers that rebuild what was lost, or make
parity. Shards are read as any page is, each verified against its own checksum; what is decoded,
against the page's (I37). Must not know leases: whoever located the shards has leased them.
"""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import ReadSpan, verified
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.stripes import Shard, StripedPage

    ReadShards = Callable[[ReadSpan, Memory, float], bytes]
    """As Transport.read, by whatever way leads to the span's segment."""
    Rank = Callable[[SegmentRef, float], int | None]
    """How good the way to a segment is, lower is better; None where there is none."""

ROOM_BYTES_MAX: Final = 64 * limits.MIB
"""Of shards at once, or those of one page."""
THREADS_MAX: Final = 8
"""Of one call, each of which reads from another worker."""


class DegradedReads:
    """`Transport.read` of spans with stripes. Thread-safe if what it is made of is."""

    def __init__(self, read: ReadShards, rank: Rank) -> None:
        """Shards come by `read`, in any thread, those in well ranked segments first."""
        self._read = read
        self._rank = rank

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """One Outcome byte a page: TRANSPORT where fewer than k shards came."""
        deadline_s = time.monotonic() + timeout_s
        widest = max(page.k for page in span.stripes)
        step = max(1, ROOM_BYTES_MAX // (widest * span.part_bytes))
        outcomes = b""
        for first in range(0, len(span), step):
            piece = span.cut(first, min(first + step, len(span)))
            outcomes += self._read_some(piece, into, deadline_s)
        return outcomes

    def gather(
        self, pages: Sequence[StripedPage], part_bytes: int, segments: Sequence[SegmentRef],
        timeout_s: float,
    ) -> Gathering:  # fmt: skip
        """Read k shards of each page, as far as so many can be had in time."""
        deadline_s = time.monotonic() + timeout_s
        ranks = [self._rank(segment, timeout_s) for segment in segments]
        gathering = Gathering(pages, part_bytes, ranks)
        while (left_s := deadline_s - time.monotonic()) > 0:
            wanted = gathering.next_round()
            if not wanted:
                break
            spans = [_span(segments[at], part_bytes, some) for (at, _), some in wanted.items()]
            came = self._read_at_once(spans, gathering.room, left_s)
            for some, outcomes in zip(wanted.values(), came, strict=True):
                gathering.came(some, outcomes)
        return gathering

    def _read_at_once(
        self, spans: Sequence[ReadSpan], room: Memory, timeout_s: float
    ) -> list[bytes]:
        """Each in a thread, for they lie with different workers, as far as the system has threads.

        Those go with the call: it is seldom, and what a thread costs is little beside a page.
        """

        def read(span: ReadSpan) -> bytes:
            return self._read(span, room, timeout_s)

        if len(spans) > 1:
            pool = ThreadPoolExecutor(min(len(spans), THREADS_MAX), "kvharbor-shards")
            with suppress(RuntimeError), pool:  # so Python says that there are no more threads
                return list(pool.map(read, spans))
        return [read(span) for span in spans]

    def _read_some(self, span: ReadSpan, into: Memory, deadline_s: float) -> bytes:
        left_s = max(0.0, deadline_s - time.monotonic())
        gathering = self.gather(span.stripes, span.part_bytes, span.segments, left_s)
        size = span.part_bytes
        views = [into.view[place : place + size] for place in span.places]
        decoded = bytes([gathering.decode(page, view) for page, view in enumerate(views)])
        outcomes = verified(span, into.view, decoded)
        rows = zip(span.places, outcomes, strict=True)
        into.wipe([place for place, outcome in rows if outcome], size)
        return outcomes


class _Wanted:
    """A shard that is to be read, for which page, and to where in the room."""

    __slots__ = ("page", "place", "shard")

    def __init__(self, page: int, shard: Shard, place: int) -> None:
        self.page = page
        self.shard = shard
        self.place = place


class Gathering:
    """Shards of some pages in memory of our own: what was read, and what is to be tried next."""

    def __init__(
        self, pages: Sequence[StripedPage], part_bytes: int, ranks: Sequence[int | None]
    ) -> None:
        """Nothing was read. No memory is taken before it is written to."""
        self._pages = pages
        self._part_bytes = part_bytes
        self._left = [_best_first(page, ranks) for page in pages]
        self._have: list[dict[int, memoryview]] = [{} for _ in pages]
        self._failed: list[dict[int, int]] = [{} for _ in pages]
        slots = sum(page.k for page in pages)
        self._free = list(range(0, slots * part_bytes, part_bytes))
        self.room = Memory.of("room", mmap.mmap(-1, max(1, slots * part_bytes)), writable=True)

    def next_round(self) -> Mapping[tuple[int, int], list[_Wanted]]:
        """Shards that pages lack, by segment and part; none where no page can be completed."""
        wanted: dict[tuple[int, int], list[_Wanted]] = {}
        for number, page in enumerate(self._pages):
            lacking, left = page.k - len(self._have[number]), self._left[number]
            if 0 < lacking <= len(left):
                for shard in left[:lacking]:
                    each = _Wanted(number, shard, self._free.pop())
                    wanted.setdefault((shard.segment, shard.part), []).append(each)
                del left[:lacking]
        return wanted

    def came(self, some: Sequence[_Wanted], outcomes: bytes) -> None:
        """What became of these; the places of those that did not come are used again."""
        for each, outcome in zip(some, outcomes, strict=True):
            if outcome == Outcome.OK:
                view = self.room.view[each.place : each.place + self._part_bytes]
                self._have[each.page][each.shard.number] = view
            else:
                self._failed[each.page][each.shard.number] = outcome
                self._free.append(each.place)

    def have(self, page: int) -> Mapping[int, memoryview]:
        """The shards of a page that were read, by number."""
        return self._have[page]

    def outcome(self, page: int, number: int) -> int:
        """What came of reading a shard of a page; TRANSPORT where nobody tried."""
        if number in self._have[page]:
            return Outcome.OK
        return self._failed[page].get(number, Outcome.TRANSPORT)

    def decode(self, page: int, into: memoryview) -> Outcome:
        """Fill `into` with what a page is; TRANSPORT, and it stays as it is, where k lack."""
        from kvstore.erasure import decode  # the library is loaded by who has to decode

        asked, have = self._pages[page], self._have[page]
        if len(have) < asked.k:
            return Outcome.TRANSPORT
        decode(asked.k, asked.m, have, {asked.number: into})
        return Outcome.OK


def _best_first(page: StripedPage, ranks: Sequence[int | None]) -> list[Shard]:
    """The shards that can be reached, near ones first, data before parity."""
    rows = [(ranks[shard.segment], shard.number, shard) for shard in page.shards]
    reached = [(rank, number, shard) for rank, number, shard in rows if rank is not None]
    return [shard for _, _, shard in sorted(reached, key=lambda row: row[:2])]


def _span(segment: SegmentRef, part_bytes: int, some: Sequence[_Wanted]) -> ReadSpan:
    """Shards of one part in one segment, as pages to read."""
    shards = [each.shard for each in some]
    return ReadSpan(
        segment, shards[0].part, part_bytes,
        b"".join([shard.key for shard in shards]),
        _column([shard.offset for shard in shards]),
        _column([shard.generation for shard in shards]),
        _column([shard.checksum for shard in shards]),
        tuple([each.place for each in some]),
    )  # fmt: skip


def _column(values: Sequence[int]) -> bytes:
    return b"".join([value.to_bytes(8, "little") for value in values])
