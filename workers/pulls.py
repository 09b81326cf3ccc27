"""Ingest as decisions: which extents may be pulled into, which requests wait, what was sealed.

A part of the worker's state machine, called by `workers.state` alone. The rules (I4, I6, W2): one
pull per extent and generation, a repeated Ingest joins the first or gets its result, a higher
generation waits until the extent is not busy, a sealed extent is never a target again, and the
client is answered only after the master acknowledged the seal. Must not know bytes or sockets.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.page import parents_of
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import Ingest, Sealed, SealedNoted
from workers.events import (
    Action,
    AnswerIngest,
    CallMaster,
    CancelPull,
    ExtentGroup,
    RefuseIngest,
    StartPull,
    Stretch,
    WriteFree,
)
from workers.extent_table import NOBODY, ChunkTable, SegmentTable
from workers.holdings import Holdings, Place, Work, WorkKind
from workers.pull_requests import U64_BYTES, UNDECIDED, Request, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.wire.messages.base import Message

_SETTLED: Final = bytes((Outcome.OK, Outcome.PLAN_CLOSED))
"""What a leader says of a seal that it need not be told again."""
UNREPORTED_MAX: Final = limits.WAITING_PUTS_MAX
"""Reports that no leader has answered. Beyond that the oldest is forgotten: its put times out at
the leader, which then fences the extents, or the next inventory lists them."""


class Report(msgspec.Struct, gc=False):
    """A Sealed that the master has not answered.

    `pages` numbers the message's extents within the request; a report for nobody has neither.
    """

    message: Sealed
    request: Request | None = None
    pages: tuple[int, ...] | range = ()


class Pulls:
    """Requests that wait, pulls that run, and seals that the master has not acknowledged."""

    def __init__(
        self,
        holdings: Holdings,
        gate: Callable[[Ingest], Outcome | None],
        is_paused: Callable[[str], bool],
    ) -> None:
        """`gate` gives the reason why no pull may run for a message now, or None.

        What passes the gate names a segment of ours in its present life. `is_paused` tells
        whether requests for a segment wait because its inventory is being offered.
        """
        self._holdings = holdings
        self._gate = gate
        self._is_paused = is_paused
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        """By work number; a request whose client is gone runs on and is not answered."""
        self.reports: dict[int, Report] = {}
        """By call number."""
        self.unreported: dict[tuple[str, int, bytes], Sealed] = {}
        """Seals that no leader has answered, by (segment, generation, offsets)."""

    # --- requests ---------------------------------------------------------------------------

    def request(self, number: int, session: int, message: Ingest) -> list[Action]:
        """Somebody asks; refused outright when the message contradicts itself."""
        try:
            request = opened(number, session, message, self._holdings.segments)
        except BadValue as error:
            return [RefuseIngest(number, session, error.code, str(error))]
        return self._decide(request)

    def forget_session(self, session: int) -> list[Action]:
        """Nobody waits for these any more: waiting ones go, running pulls end soon."""
        self.waiting = [each for each in self.waiting if each.session != session]
        works = (self._holdings.works[n] for n, r in self.running.items() if r.session == session)
        return self.cancel(list(works))

    def resume(self) -> list[Action]:
        """Look at the waiting requests again, in order, after a work or a pause has ended."""
        if not self.waiting:
            return []
        waiting, self.waiting = self.waiting, []
        return [action for request in waiting for action in self._decide(request)]

    def cancel(self, works: list[Work]) -> list[Action]:
        """End these pulls; each is told once."""
        fresh = [work for work in works if not work.is_cancelled]
        for work in fresh:
            work.is_cancelled = True
        return [CancelPull(work.id) for work in fresh]

    def _decide(self, request: Request) -> list[Action]:
        message = request.message
        refusal = self._gate(message)
        if refusal is not None:
            return [
                AnswerIngest(request.id, request.session, bytes((refusal,)) * len(request.offsets))
            ]
        table = self._holdings.segments[message.segment]
        size_class = message.size_class
        try:
            table.check_class(size_class, message.part_bytes)
            stretches = table.stretches(size_class, request.offsets)
        except BadValue as error:
            return [RefuseIngest(request.id, request.session, error.code, str(error))]
        chunks: list[ChunkTable | None] = []
        places: list[Place | None] = []
        if request.sources is not None:
            places = request.sources.places(self._holdings, request.checksums)
        must_wait = self._is_paused(message.segment)
        if places:
            must_wait |= any(place is not None and place.is_busy for place in places)
        for stretch in stretches:
            chunk = table.cut(stretch.offset, size_class)
            chunks.append(chunk)
            must_wait = must_wait or (chunk is not None and chunk.is_busy(stretch))
        if must_wait:
            return self._wait(request)
        wanted: list[Stretch] = []
        for stretch, chunk in zip(stretches, chunks, strict=True):
            wanted += self._claim(request, stretch, chunk, places)
        if not wanted:
            return self._report(request)
        return [self._start(request, ExtentGroup(table.segment, size_class, tuple(wanted)), places)]

    def _start(
        self, request: Request, extents: ExtentGroup, places: list[Place | None]
    ) -> StartPull:
        message = request.message
        sources: tuple[Place, ...] = ()
        classes: tuple[int, ...] = ()
        if places:
            # Those of the pages that are left to be pulled; a move's other sources are let go.
            taken = [
                place if outcome == UNDECIDED else None
                for place, outcome in zip(places, request.outcomes, strict=True)
            ]
            sources = tuple(place for place in taken if place is not None)
            classes = tuple(0 if place is None else place.chunk.size_class for place in taken)
        work = self._holdings.begin(WorkKind.PULL, request.id, extents, message.generation, sources)
        self.running[work.id] = request
        return StartPull(
            work.id, request.id, request.session, message, extents.size_class, extents.stretches,
            classes,
        )  # fmt: skip

    def _wait(self, request: Request) -> list[Action]:
        if len(self.waiting) >= limits.WAITING_PUTS_MAX:
            text = f"{limits.WAITING_PUTS_MAX} requests wait for busy extents"
            return [RefuseIngest(request.id, request.session, OutOfSpace.code, text)]
        self.waiting.append(request)
        return []

    def _claim(
        self,
        request: Request,
        stretch: Stretch,
        chunk: ChunkTable | None,
        places: list[Place | None],
    ) -> list[Stretch]:
        """Reserve what may be pulled of an idle stretch; the other pages get their outcome."""
        page, stop = stretch.page, stretch.page + stretch.count
        if chunk is None:  # extents of another class lie there
            request.outcomes[page:stop] = bytes((Outcome.STALE,)) * stretch.count
            return []
        generation, first = request.message.generation, stretch.slot
        last = first + stretch.count
        all_free = chunk.states.count(RecordState.FREE, first, last) == stretch.count
        are_there = None not in places[page:stop]
        if all_free and are_there and max(chunk.generations[first:last]) < generation:
            found = [stretch]
        else:
            known = (
                _known_outcome(chunk, first + i, generation, request.checksums[page + i])
                for i in range(stretch.count)
            )
            request.outcomes[page:stop] = bytes(known)
            for lost in (i for i, place in enumerate(places[page:stop], page) if place is None):
                if request.outcomes[lost] == UNDECIDED:
                    request.outcomes[lost] = Outcome.SOURCE_LOST
            found = _undecided(request.outcomes, stretch, request.offsets)
        for each in found:
            chunk.reserve(each, generation, request.checksums[each.page : each.page + each.count])
        return found

    # --- pulls and reports ------------------------------------------------------------------

    def ended(self, work: Work, outcomes: bytes, stored_max: int) -> list[Action]:
        """A pull is over; what it sealed is reported, whether or not somebody waits for it."""
        request = self.running.pop(work.id)
        request.stored_max = stored_max
        for place in work.sources:
            place.chunk.works[place.slot] = NOBODY
        for stretch in work.extents.stretches:
            page, stop = stretch.page, stretch.page + stretch.count
            work.table.chunks[stretch.chunk_start].settle(stretch, outcomes[page:stop])
            request.outcomes[page:stop] = outcomes[page:stop]
        return self._report(request)

    def _report(self, request: Request) -> list[Action]:
        outcomes = request.outcomes
        pages: tuple[int, ...] | range = range(len(outcomes))
        if any(outcomes):
            pages = tuple(page for page, outcome in enumerate(outcomes) if not outcome)
        if not pages:
            return [_answer(request)]
        return [self._call(Report(_sealed_message(request, pages), request, pages))]

    def _call(self, report: Report) -> Action:
        number = self._holdings.next_number()
        self.reports[number] = report
        return CallMaster(number, report.message)

    def noted(self, call: int, reply: Message | None) -> list[Action]:
        """The master's answer to a Sealed. Without one the seal is kept for the next leader."""
        report = self.reports.pop(call)
        message, count = report.message, len(report.message.offsets) // U64_BYTES
        outcomes = bytes((Outcome.TRANSPORT,)) * count
        if isinstance(reply, SealedNoted) and len(reply.outcomes) == count:
            outcomes = reply.outcomes
        self._keep(message, is_settled=not outcomes.translate(None, _SETTLED))
        if not any(outcomes):
            return _told(report, outcomes)
        closed = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.PLAN_CLOSED]
        return _told(report, outcomes) + (self._give_up(message, closed) if closed else [])

    def _keep(self, message: Sealed, *, is_settled: bool) -> None:
        """Remember a report for the next leader, or forget it: all of it is settled."""
        place = (message.segment, message.generation, message.offsets)
        if is_settled:
            self.unreported.pop(place, None)
            return
        if len(self.unreported) >= UNREPORTED_MAX and place not in self.unreported:
            del self.unreported[next(iter(self.unreported))]
        self.unreported[place] = message

    def _give_up(self, message: Sealed, pages: list[int]) -> list[Action]:
        """Free extents whose plan the master has closed, unless something newer lies there."""
        table = self._holdings.find(message.segment, message.incarnation)
        mine = array("Q")
        size_class = 0
        for offset, chunk, slot in _still_sealed(table, message, pages):
            chunk.outcomes[slot] = Outcome.PLAN_CLOSED
            size_class = chunk.size_class
            mine.append(offset)
        if table is None or not mine:
            return []
        extents = ExtentGroup(table.segment, size_class, table.stretches(size_class, mine))
        return [WriteFree(self._holdings.begin(WorkKind.FREE, 0, extents).id, extents)]

    def report_again(self) -> list[Action]:
        """Tell a new leader what no leader has acknowledged and still lies there."""
        pending, self.unreported = self.unreported, {}
        actions: list[Action] = []
        for message in pending.values():
            table = self._holdings.find(message.segment, message.incarnation)
            there = {offset for offset, _, _ in _still_sealed(table, message)}
            pages = [i for i, each in enumerate(array("Q", message.offsets)) if each in there]
            if pages:
                actions.append(self._call(Report(_only(message, pages))))
        return actions


def _known_outcome(chunk: ChunkTable, slot: int, generation: int, checksum: int) -> int:
    """What is already decided for this generation in an idle extent, or UNDECIDED."""
    there = chunk.generations[slot]
    match chunk.states[slot]:
        case RecordState.FREE if there < generation:
            return UNDECIDED
        case RecordState.FREE if there == generation:
            return chunk.outcomes[slot]
        case RecordState.FREE:
            return Outcome.FENCED
        case RecordState.SEALED if (there, chunk.checksums[slot]) == (generation, checksum):
            return Outcome.OK
        case _:
            return Outcome.STALE


def _undecided(outcomes: bytearray, stretch: Stretch, offsets: array[int]) -> list[Stretch]:
    """The runs of pages within `stretch` that are still to be pulled."""
    found: list[Stretch] = []
    page, stop = stretch.page, stretch.page + stretch.count
    while (first := outcomes.find(UNDECIDED, page, stop)) >= 0:
        page = first
        while page < stop and outcomes[page] == UNDECIDED:
            page += 1
        slot = stretch.slot + first - stretch.page
        found.append(Stretch(first, page - first, stretch.chunk_start, slot, offsets[first]))
    return found


def _sealed_message(request: Request, pages: Sequence[int]) -> Sealed:
    """The report of these pages of a request."""
    ingest = request.message
    whole = Sealed(
        ingest.segment, ingest.incarnation, ingest.generation, ingest.namespace_ordinal,
        ingest.part, ingest.part_bytes, ingest.token_count,
        parents_of(ingest.parent, ingest.keys), ingest.keys, ingest.offsets, ingest.checksums,
    )  # fmt: skip
    return whole if len(pages) == len(request.outcomes) else _only(whole, pages)


def _only(message: Sealed, pages: Sequence[int]) -> Sealed:
    """The same report of fewer extents."""
    return msgspec.structs.replace(
        message,
        parents=_picked(message.parents, KEY_BYTES, pages),
        keys=_picked(message.keys, KEY_BYTES, pages),
        offsets=_picked(message.offsets, U64_BYTES, pages),
        checksums=_picked(message.checksums, U64_BYTES, pages),
    )


def _picked(column: bytes, width: int, pages: Sequence[int]) -> bytes:
    return b"".join(column[page * width : (page + 1) * width] for page in pages)


def _still_sealed(
    table: SegmentTable | None, message: Sealed, pages: Iterable[int] | None = None
) -> Iterator[tuple[int, ChunkTable, int]]:
    """(offset, chunk, slot) of the message's extents that are idle and still what it says."""
    if table is None:
        return
    offsets = array("Q", message.offsets)
    for page in range(len(offsets)) if pages is None else pages:
        found = table.slot_at(offsets[page])
        if found is None:
            continue  # the chunk was cut anew for another class
        chunk, slot = found
        same = chunk.generations[slot] == message.generation
        if same and chunk.states[slot] == RecordState.SEALED and chunk.works[slot] == NOBODY:
            yield offsets[page], chunk, slot


def _answer(request: Request) -> AnswerIngest:
    return AnswerIngest(request.id, request.session, bytes(request.outcomes), request.stored_max)


def _told(report: Report, outcomes: bytes) -> list[Action]:
    """The reply to whoever asked for these pages, if somebody waits."""
    request = report.request
    if request is None:
        return []
    if any(outcomes):
        for page, outcome in zip(report.pages, outcomes, strict=True):
            request.outcomes[page] = outcome
    return [_answer(request)]
