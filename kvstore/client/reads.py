"""The plans of lookups and reads: find, lease, move, verify, try the next replica, else miss.

Pure: no clock of its own, no sockets, no memory. Every rule of retrying a read is here. The
transport verifies bytes and record; the lease, checked last of all, is checked here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.locations import Locations, Piece
from kvstore.client.outcomes import Hit, Miss, MissReason, ReadOutcome, miss_reason
from kvstore.client.steps import ReadPages, Steps, WipePages, ask, move
from kvstore.errors import KVStoreError, StaleEpoch, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.transfer.transport import COLUMN_BYTES, ReadSpan, column
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import LeaseRenewed, LocatedCopy, RenewLease, ReportSuspect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.clock import Clock

ROUND_BYTES_MAX: Final = 256 * limits.MIB
"""Bytes between two looks at the lease: 1 s at 256 MB/s, a tenth of the lease."""
SUSPECTS_PER_READ_MAX: Final = 32
REPORT_TIMEOUT_S: Final = 1.0
RENEW_TIMEOUT_S: Final = 1.0

_SUSPECT: Final = frozenset((Outcome.CHECKSUM, Outcome.STALE))
"""Under a valid lease neither the bytes nor the record of a page may be anything but its own."""

_DECODED: Final = 1 << 42
"""Rank of pages that are decoded from others: after every replica."""
_HIT: Final = Hit()
_RANKED: Final = itemgetter(0)

Rank = Callable[[SegmentRef], int | None]
"""How good a way to a segment is: lower is better; None when there is none."""
Order = Callable[[Sequence[SegmentRef]], Sequence[int]]
"""Positions of segments of one rank, in the order in which to try them."""


class ReadRequest(msgspec.Struct, frozen=True):
    """A checked read of the first len(places) located pages: places are inside the destination."""

    locations: Locations
    part: int
    places: tuple[int, ...]
    deadline_s: float
    needs_lease: bool = False
    """For views, which stay where they are: what a leader in doubt has located is a miss."""
    is_hedged: bool = False
    """Whoever reads is told where else each page lies."""


class _Stretch(msgspec.Struct):
    """Consecutive pages with the same replicas, and how far down the list of those they are."""

    piece: Piece
    first: int
    """Page of the request at which the stretch begins."""
    start: int
    """Entry of the columns at which the stretch begins."""
    pages: int
    copies: tuple[LocatedCopy, ...]
    """Best first."""
    at: int = 0
    reread: bool = False
    """A second look at the same replica, after its bytes did not match."""

    @property
    def copy(self) -> LocatedCopy:
        """The replica to try."""
        return self.copies[self.at]

    def cut(self, start: int, stop: int) -> _Stretch:
        """Pages [start, stop) of the stretch."""
        return msgspec.structs.replace(
            self, first=self.first + start, start=self.start + start, pages=stop - start
        )

    def columns(self) -> tuple[bytes, bytes, bytes]:
        """Offsets, generations and checksums of the replica to try."""
        copy = self.copy
        span = slice(self.start * COLUMN_BYTES, (self.start + self.pages) * COLUMN_BYTES)
        return copy.offsets[span], copy.generations[span], copy.checksums[span]


class _Read:
    """One read in progress: its outcomes, and the stretches still to be tried."""

    def __init__(self, request: ReadRequest, clock: Clock, rank: Rank, order: Order | None) -> None:
        self.request = request
        self.clock = clock
        self.order = order
        self.outcomes: list[ReadOutcome] = [Miss(MissReason.ABSENT)] * len(request.places)
        self.queue: deque[_Stretch] = deque()
        self.suspects_left = SUSPECTS_PER_READ_MAX
        for stretch in self._stretches(rank):
            self._begin(stretch)

    def _stretches(self, rank: Rank) -> Iterator[_Stretch]:
        """Located pages within the request; replicas that no transport reaches are left out."""
        wanted, part = len(self.request.places), self.request.part
        for piece in self.request.locations.pieces:
            segments = piece.located.segments
            ranks = [rank(segment) for segment in segments]
            ordered: dict[tuple[int, ...], Sequence[int]] = {}
            for run in piece.located.runs:
                first = piece.first + run.first
                pages = min(run.count, wanted - first)
                if pages <= 0:
                    continue
                reachable: list[tuple[int, LocatedCopy]] = []
                for copy in run.copies:
                    ranked = ranks[copy.segment]
                    if copy.stripes and not self.request.needs_lease:
                        ranked = _DECODED
                    if copy.part == part and ranked is not None:
                        reachable.append((ranked, copy))
                reachable.sort(key=_RANKED)  # stable: copies alike keep the master's order
                if self.order is not None and len(reachable) > 1:
                    reachable = self._ordered(reachable, segments, ordered)
                copies = tuple([copy for _, copy in reachable])
                yield _Stretch(piece, first, 0, pages, copies)

    def _ordered(
        self,
        ranked: Sequence[tuple[int, LocatedCopy]],
        segments: Sequence[SegmentRef],
        ordered: dict[tuple[int, ...], Sequence[int]],
    ) -> list[tuple[int, LocatedCopy]]:
        """The replicas, those of one rank in the order wanted, which `ordered` has for a piece.

        One order a piece: pages that lie on the same segments are read from one of them together.
        """
        assert self.order is not None
        result: list[tuple[int, LocatedCopy]] = []
        for _, group in groupby(ranked, key=_RANKED):
            alike = list(group)
            if len(alike) > 1:
                places = tuple([copy.segment for _, copy in alike])
                if places not in ordered:
                    ordered[places] = self.order([segments[place] for place in places])
                alike = [alike[i] for i in ordered[places]]
            result += alike
        return result

    def _begin(self, stretch: _Stretch) -> None:
        """Queue what may be read."""
        if not stretch.copies:
            self.miss(stretch, MissReason.UNREACHABLE)
        elif self.request.needs_lease and stretch.piece.is_in_doubt:
            self.miss(stretch, MissReason.NO_LEASE)
        else:
            self.queue.append(stretch)

    def miss(self, stretch: _Stretch, reason: MissReason) -> None:
        """All pages of the stretch are misses."""
        pages = slice(stretch.first, stretch.first + stretch.pages)
        self.outcomes[pages] = [Miss(reason)] * stretch.pages

    def hit(self, stretch: _Stretch) -> None:
        """All pages of the stretch are in place."""
        self.outcomes[stretch.first : stretch.first + stretch.pages] = [_HIT] * stretch.pages

    def leased(self, stretch: _Stretch) -> bool:
        """Whether nobody may have reused these extents yet, or there never was a lease."""
        deadline_s = stretch.piece.deadline_s
        return deadline_s is None or self.clock.now_s() < deadline_s

    def left_s(self) -> float:
        """Time left before the read must end (I20)."""
        return self.request.deadline_s - self.clock.now_s()

    def next_round(self) -> list[_Stretch]:
        """Take stretches of about ROUND_BYTES_MAX off the queue."""
        taken: list[_Stretch] = []
        room = ROUND_BYTES_MAX
        while self.queue and (room > 0 or not taken):
            stretch = self.queue.popleft()
            part_bytes = stretch.copy.part_bytes
            fits = max(1, room // part_bytes)
            if fits < stretch.pages:
                self.queue.appendleft(stretch.cut(fits, stretch.pages))
                stretch = stretch.cut(0, fits)
            taken.append(stretch)
            room -= stretch.pages * part_bytes
        return taken

    def span(self, stretch: _Stretch) -> ReadSpan:
        """What the transport is to bring."""
        copy, request = stretch.copy, self.request
        first, stop = stretch.first, stretch.first + stretch.pages
        keys = request.locations.chain.packed[first * KEY_BYTES : stop * KEY_BYTES]
        segments = stretch.piece.located.segments
        return ReadSpan(
            segments[copy.segment], request.part, copy.part_bytes, keys,
            *stretch.columns(), request.places[first:stop],
            copy.stripes[stretch.start : stretch.start + stretch.pages],
            segments if copy.stripes else (),
        )  # fmt: skip

    def other(self, stretch: _Stretch) -> ReadSpan | None:
        """The same pages as the next replica has them, if another worker has one.

        Pages to be decoded are no replica, and take several workers as it is.
        """
        segments = stretch.piece.located.segments
        mine = segments[stretch.copy.segment].worker
        for at in range(stretch.at + 1, len(stretch.copies)):
            other = stretch.copies[at]
            if not other.stripes and segments[other.segment].worker != mine:
                return self.span(msgspec.structs.replace(stretch, at=at))
        return None

    def try_further(self, stretch: _Stretch, code: int) -> bool:
        """Queue the next try of pages that failed alike; tells whether they are suspects.

        Bytes that do not match are read once more; then, as after anything else, comes the next
        replica, and after the last a miss.
        """
        is_decoded = bool(stretch.copy.stripes)
        if code == Outcome.CHECKSUM and not stretch.reread and not is_decoded:
            self.queue.append(msgspec.structs.replace(stretch, reread=True))
            return False
        if stretch.at + 1 < len(stretch.copies):
            self.queue.append(msgspec.structs.replace(stretch, at=stretch.at + 1, reread=False))
        else:
            self.miss(stretch, miss_reason(code) if code != Outcome.MISSING else MissReason.STALE)
        return code in _SUSPECT and not is_decoded


def read_steps(
    request: ReadRequest, clock: Clock, rank: Rank, order: Order | None = None
) -> Steps[list[ReadOutcome]]:
    """Bring the pages to their places; one outcome a page, in order.

    Without `order`, replicas of one rank are tried in the master's order.
    """
    read = _Read(request, clock, rank, order)
    while read.queue:
        stretches = yield from _renewed(read, read.next_round())
        if read.left_s() <= 0:
            for stretch in (*stretches, *read.queue):
                read.miss(stretch, MissReason.DEADLINE)
            break
        if not stretches:
            continue
        spans = tuple([read.span(stretch) for stretch in stretches])
        others: tuple[ReadSpan | None, ...] = ()
        if request.is_hedged:
            others = tuple([read.other(stretch) for stretch in stretches])
        results = yield from move(ReadPages(spans, read.left_s(), others))
        for stretch, outcomes in zip(stretches, results, strict=True):
            yield from _settle(read, stretch, outcomes)
    return read.outcomes


def _settle(read: _Read, stretch: _Stretch, outcomes: bytes) -> Steps[None]:
    """Take delivered pages in, if the lease still holds; send the others on."""
    if not read.leased(stretch):
        # The bytes matched, but from here on nobody promises that they are still that page's.
        yield _wipe(read, stretch)
        read.miss(stretch, MissReason.LEASE_ENDED)
        return
    if not any(outcomes):
        read.hit(stretch)
        return
    for start, stop in _alike(outcomes):
        part = stretch.cut(start, stop)
        if outcomes[start] == Outcome.OK:
            read.hit(part)
        elif read.try_further(part, outcomes[start]):
            yield from _report(read, part)


def _alike(outcomes: bytes) -> Iterator[tuple[int, int]]:
    """Stretches [start, stop) of equal Outcome bytes."""
    start = 0
    while start < len(outcomes):
        same = len(outcomes) - len(outcomes[start:].lstrip(outcomes[start : start + 1]))
        yield start, same
        start = same


def _wipe(read: _Read, stretch: _Stretch) -> WipePages:
    places = read.request.places[stretch.first : stretch.first + stretch.pages]
    return WipePages(places, stretch.copy.part_bytes)


def _renewed(read: _Read, stretches: list[_Stretch]) -> Steps[list[_Stretch]]:
    """Those of the stretches that may be read: leases in their second half are renewed first."""
    good: list[_Stretch] = []
    for stretch in stretches:
        if stretch.piece.needs_renewal(read.clock.now_s()):
            good += yield from _renew(read, stretch)
        else:
            good.append(stretch)
    return good


def _renew(read: _Read, stretch: _Stretch) -> Steps[list[_Stretch]]:
    """Ask for the lease again; pages that are gone by now are misses.

    Where nobody can renew it, the read goes on under what is left of it, half of which is kept.
    """
    if read.left_s() <= 0:
        return [stretch]  # whose time is up as well
    patience_s = min(read.left_s(), RENEW_TIMEOUT_S)
    if (lease_left_s := stretch.piece.left_s(read.clock.now_s())) > 0:
        patience_s = min(patience_s, lease_left_s / 2)
    _, generations, _ = stretch.columns()
    keys = read.span(stretch).keys
    sent_at_s = read.clock.now_s()
    message = RenewLease(read.request.locations.opened.namespace.id, keys, generations)
    try:
        reply = yield from ask(message, LeaseRenewed, patience_s)
    except (Unavailable, StaleEpoch):
        if read.leased(stretch):
            piece = stretch.piece.not_renewed(read.clock.now_s())
            return [msgspec.structs.replace(stretch, piece=piece)]
        read.miss(stretch, MissReason.LEASE_ENDED)
        return []
    renewed = reply.renewed.ljust(stretch.pages, b"\0")[: stretch.pages]
    piece = stretch.piece.renewed(sent_at_s, reply.lease_ttl_s)
    good: list[_Stretch] = []
    for start, stop in _alike(renewed):
        part = stretch.cut(start, stop)
        if renewed[start] == 1:
            good.append(msgspec.structs.replace(part, piece=piece))
        else:
            read.miss(part, MissReason.LEASE_ENDED)
    return good


def _report(read: _Read, stretch: _Stretch) -> Steps[None]:
    """Tell the master of replicas whose bytes or record did not match, under a valid lease."""
    if stretch.piece.deadline_s is None:
        return
    offsets, generations, _ = stretch.columns()
    segment = stretch.piece.located.segments[stretch.copy.segment]
    locations = read.request.locations
    for i, (offset, generation) in enumerate(
        zip(column(offsets), column(generations), strict=True)
    ):
        left_s = read.left_s()
        if read.suspects_left == 0 or left_s <= 0:
            return
        read.suspects_left -= 1
        suspect = ReportSuspect(
            locations.opened.namespace.id, locations.chain.key(stretch.first + i),
            read.request.part, segment.segment, segment.incarnation, offset, generation,
        )  # fmt: skip
        try:
            yield from ask(suspect, Done, min(REPORT_TIMEOUT_S, left_s))
        except KVStoreError:
            return
