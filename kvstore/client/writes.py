"""The plan of a put: ask for extents, have workers pull, ask again for what failed.

Pure: no clock of its own, no sockets, no memory. Every rule of retrying a put is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import (
    AlreadyThere,
    PutOutcome,
    Refused,
    Stored,
    refused_reason,
)
from kvstore.client.part_progress import PENDING, STORED, PageState, PartProgress
from kvstore.client.steps import IngestPages, Pause, Steps, ask, move
from kvstore.errors import DeadlineExceeded, KVStoreError, MalformedMessage
from kvstore.hints import Hints
from kvstore.ids import KEY_BYTES, NO_PARENT
from kvstore.namespace import NAME_PART
from kvstore.page import PageChain
from kvstore.transfer.transport import COLUMN_BYTES, IngestSpan
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import (
    AbortPut,
    BeginPut,
    PageRange,
    PlanSpan,
    PutChain,
    PutPlans,
    RefusedRange,
)
from kvstore.wire.messages.reads import Probe, Probed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock

PATIENCE: Final = 0.9
"""Share of the time left for the master to hold an answer back, or for workers to pull: the rest is
for the reply, and for giving up what was not pulled (I20)."""
PAUSE_MIN_S: Final = 0.01
PAUSE_MAX_S: Final = 1.0
ABORT_TIMEOUT_S: Final = 1.0

_STORED: Final = bytes((STORED,))
_VISIBLE: Final = Stored(visible=True)
_NOT_YET_VISIBLE: Final = Stored(visible=False)

_WORTH_WAITING: Final = frozenset(
    (Outcome.IN_PROGRESS, Outcome.OUT_OF_SPACE, Outcome.TOO_MANY_QUARANTINED, Outcome.FENCED)
)
"""Refusals that time can change. A missing parent is the caller's to put first."""


class PartSource(msgspec.Struct, frozen=True):
    """One part of every page of a put: where its bytes lie in the source."""

    part: int
    part_bytes: int
    places: tuple[int, ...]


class PutWishes(msgspec.Struct, frozen=True):
    """How a caller wants its pages put."""

    ttl_s: float | None = None
    wait: bool = True
    timeout_s: float | None = None
    hints: Hints | None = None
    tier: str = ""
    replicas: int = 0
    strict: bool = False
    replicas_now: bool = False


class PutRequest(msgspec.Struct, frozen=True):
    """A checked put: places are inside the source, sizes are the layout's, keys are distinct."""

    opened: OpenedNamespace
    chain: PageChain
    sources: tuple[PartSource, ...]
    deadline_s: float
    """When to stop, on the clock that the plan is given."""
    wait: bool = True
    ttl_s: float | None = None
    hints: Hints | None = None
    tier: str = ""
    replicas: int = 0
    strict: bool = False
    replicas_now: bool = False

    @property
    def awaits_replicas(self) -> bool:
        """Whether the put is over only when its pages have their replicas."""
        return self.strict or self.replicas_now

    @property
    def pages(self) -> int:
        """Pages of the whole put."""
        return len(self.chain)


class _Batch:
    """Pages [first, first + pages) of a put, which fit one BeginPut."""

    def __init__(self, request: PutRequest, first: int, pages: int) -> None:
        self.request = request
        self.first = first
        self.pages = pages
        self.chain = request.chain.slice(first, first + pages)
        self.parts = {source.part: PartProgress(source, pages) for source in request.sources}

    def pending(self) -> list[tuple[int, int]]:
        """Stretches of pages of which some part is pending."""
        if len(self.parts) == 1:
            (part,) = self.parts.values()
            return part.pending()
        waiting = (part.pending() for part in self.parts.values())
        pages = sorted({page for part in waiting for a, b in part for page in range(a, b)})
        stretches: list[tuple[int, int]] = []
        for page in pages:
            if stretches and stretches[-1][1] == page:
                stretches[-1] = (stretches[-1][0], page + 1)
            else:
                stretches.append((page, page + 1))
        return stretches

    def begin(self, stretches: list[tuple[int, int]], request_id: bytes, time_s: float) -> BeginPut:
        """Ask for extents for these stretches, numbered as one row of pages."""
        request = self.request
        # Objects are asked for whole: what was there a moment ago may have been removed since.
        whole = request.opened.namespace.is_opaque
        wanted = [each.source for each in self.parts.values() if whole or PENDING in each.states]
        return BeginPut(
            request=request_id,
            namespace=request.opened.namespace.id,
            chains=self._chains(stretches),
            parts=tuple([source.part for source in wanted]),
            part_bytes=tuple([source.part_bytes for source in wanted]),
            timeout_s=time_s,
            wait=request.wait,
            ttl_s=request.ttl_s,
            hints=request.hints,
            tier=request.tier,
            replicas=request.replicas,
            strict=request.strict,
        )

    def _chains(self, stretches: list[tuple[int, int]]) -> tuple[PutChain, ...]:
        is_opaque = self.request.opened.namespace.is_opaque
        chains: list[PutChain] = []
        for start, stop in stretches:
            piece = self.chain.slice(start, stop)
            chains.append(PutChain(NO_PARENT if is_opaque else piece.parent, piece.packed))
        return tuple(chains)

    def was_refused(self) -> bool:
        """Whether something was said against every pending page."""
        return all(
            part.reasons[page]
            for part in self.parts.values()
            for start, stop in part.pending()
            for page in range(start, stop)
        )

    def refuse_rest(self, reason: int | None = None) -> None:
        """Give up on every pending page."""
        for part in self.parts.values():
            part.refuse_pending(reason)

    def outcome(self, page: int, visible: bool) -> PutOutcome:
        """What to tell the caller of one page: a refused part refuses the page."""
        for part in self.parts.values():
            if part.states[page] == PageState.REFUSED:
                return Refused(refused_reason(part.reasons[page]), part.retry_after_s)
        # An object is its value: a put that failed may have left one that now has its name.
        named = self.request.opened.namespace.keeps_names
        values = [part for n, part in self.parts.items() if not (named and n == NAME_PART)]
        if all(part.states[page] == PageState.PRESENT for part in values):
            return AlreadyThere()
        return Stored(visible)


def put_steps(
    request: PutRequest, clock: Clock, new_request_id: Callable[[], bytes]
) -> Steps[list[PutOutcome]]:
    """Store the pages, batch by batch; one outcome a page, in the order of the pages.

    One round trip of metadata a batch of at most `limits.BATCH_PAGES_MAX` parts when all goes
    well. Raises what the master link raises. A batch whose last page was refused ends the put:
    the pages after it would have no parent.
    """
    pages = request.pages
    step = max(1, limits.BATCH_PAGES_MAX // max(1, len(request.sources)))
    outcomes: list[PutOutcome] = []
    for first in range(0, pages, step):
        batch = _Batch(request, first, min(step, pages - first))
        yield from _put_batch(batch, clock, new_request_id)
        outcomes += yield from _results(batch, clock)
        last = outcomes[-1]
        if isinstance(last, Refused) and not request.opened.namespace.is_opaque:
            outcomes += [last] * (pages - len(outcomes))
            break
    return outcomes


def _put_batch(batch: _Batch, clock: Clock, new_request_id: Callable[[], bytes]) -> Steps[None]:
    """Plan, ingest and plan again until no page is pending or the deadline has come."""
    while stretches := batch.pending():
        left_s = batch.request.deadline_s - clock.now_s()
        if left_s <= 0:
            batch.refuse_rest()
            return
        begin = batch.begin(stretches, new_request_id(), left_s * PATIENCE)
        try:
            plans = yield from ask(begin, PutPlans, left_s)
        except DeadlineExceeded:
            # The time ran out on asking again: what was said before is the answer.
            if not batch.was_refused():
                raise
            batch.refuse_rest()
            return
        pages = _pages_of(stretches)
        try:
            _note_answers(batch, pages, plans)
            if plans.spans:
                yield from _ingest(batch, pages, plans, clock)
            elif not batch.request.wait:
                batch.refuse_rest()
            else:
                yield from _wait(batch, clock)
        except GeneratorExit:
            raise  # Nobody carries out another step.
        except BaseException:
            # An interrupt, a cancelled task, a bug: nobody will pull into these extents any more.
            planned = tuple(plan.generation for plan in plans.spans)
            yield from _abort(planned, batch.request.deadline_s - clock.now_s())
            raise


def _pages_of(stretches: list[tuple[int, int]]) -> Sequence[int]:
    """The pages of these stretches, in order."""
    if len(stretches) == 1:
        return range(*stretches[0])
    return [page for start, stop in stretches for page in range(start, stop)]


def _wait(batch: _Batch, clock: Clock) -> Steps[None]:
    """Nothing was planned: pause as long as the master advised, within the deadline."""
    if not batch.pending():
        return
    advised_s = max(part.retry_after_s for part in batch.parts.values())
    left_s = batch.request.deadline_s - clock.now_s()
    yield Pause(max(0.0, min(max(advised_s, PAUSE_MIN_S), PAUSE_MAX_S, left_s)))


def _part_and_pages(
    batch: _Batch, pages: Sequence[int], item: PlanSpan | PageRange | RefusedRange
) -> tuple[PartProgress, Sequence[int]]:
    """The part and the batch's pages that an item of the answer is about."""
    part = batch.parts.get(item.part)
    if part is None or not 0 <= item.first < item.first + item.count <= len(pages):
        raise MalformedMessage(f"PutPlans names pages that were not asked for: {item!r}")
    return part, pages[item.first : item.first + item.count]


def _note_answers(batch: _Batch, pages: Sequence[int], plans: PutPlans) -> None:
    """Take down what the master says is there, and what it refuses."""
    for present in plans.present:
        part, mine = _part_and_pages(batch, pages, present)
        for page in mine:
            if part.states[page] == PageState.PENDING:
                part.states[page] = PageState.PRESENT
    for refused in plans.refused:
        part, mine = _part_and_pages(batch, pages, refused)
        waits = batch.request.wait and refused.reason in _WORTH_WAITING
        orphaned = refused.reason == Outcome.PARENT_MISSING
        if not orphaned:
            part.retry_after_s = refused.retry_after_s
        for page in mine:
            if part.states[page] == PageState.PENDING:
                # Where pages waited for room, their parent was of this put and made room itself.
                if not (orphaned and part.reasons[page]):
                    part.reasons[page] = refused.reason & 0xFF
                if not waits:
                    part.states[page] = PageState.REFUSED


def _ingest(batch: _Batch, pages: Sequence[int], plans: PutPlans, clock: Clock) -> Steps[None]:
    """Have the planned pages pulled, note what became of each, give failed plans up."""
    planned = [(plan, *_part_and_pages(batch, pages, plan)) for plan in plans.spans]
    spans = tuple([_span(batch, plans, plan, part, mine) for plan, part, mine in planned])
    for _, part, mine in planned:  # whatever was known of them: they are not there now
        part.states[mine[0] : mine[-1] + 1] = bytes((PENDING,)) * len(mine)
    left_s = max(0.0, batch.request.deadline_s - clock.now_s())
    # A plan lasts no longer without progress: its worker hangs, and another one may not.
    lasts_s = limits.put_timeout_s(sum(span.part_bytes * len(span) for span in spans))
    results = yield from move(IngestPages(spans, min(left_s * PATIENCE, lasts_s)))
    failed: list[int] = []
    for (plan, part, mine), outcomes in zip(planned, results, strict=True):
        if not any(outcomes):
            part.states[mine[0] : mine[-1] + 1] = _STORED * len(mine)
            continue
        if any(code not in (Outcome.OK, Outcome.PLAN_CLOSED) for code in outcomes):
            failed.append(plan.generation)
        _note_failures(part, mine, outcomes)
    yield from _abort(tuple(failed), batch.request.deadline_s - clock.now_s())


def _note_failures(part: PartProgress, pages: Sequence[int], outcomes: bytes) -> None:
    """A page is tried PULL_TRIES_MAX times; a reader's lock (BUSY) is no try."""
    for page, code in zip(pages, outcomes, strict=True):
        if code == Outcome.OK:
            part.states[page] = STORED
            continue
        part.reasons[page] = code
        if code != Outcome.BUSY:
            part.tries[page] += 1
        if part.tries[page] >= limits.PULL_TRIES_MAX:
            part.states[page] = PageState.REFUSED


def _span(
    batch: _Batch, plans: PutPlans, plan: PlanSpan, part: PartProgress, pages: Sequence[int]
) -> IngestSpan:
    """A plan with the source's places and the identity that the record will hold."""
    if len(plan.offsets) != COLUMN_BYTES * plan.count:
        raise MalformedMessage(f"PlanSpan: {len(plan.offsets)} bytes of offsets for {plan.count}")
    first, stop = pages[0], pages[-1] + 1
    if stop - first != plan.count:
        raise MalformedMessage("PlanSpan: pages of more than one chain")
    if not 0 <= plan.segment < len(plans.segments):
        raise MalformedMessage(f"PlanSpan: segment {plan.segment} of {len(plans.segments)}")
    opened = batch.request.opened
    return IngestSpan(
        epoch=plans.epoch,
        segment=plans.segments[plan.segment],
        generation=plan.generation,
        namespace_ordinal=opened.ordinal,
        part=plan.part,
        part_bytes=part.source.part_bytes,
        token_count=opened.namespace.layout.page_tokens,
        parent=NO_PARENT if opened.namespace.is_opaque else batch.chain.parent_of(first),
        keys=batch.chain.packed[first * KEY_BYTES : stop * KEY_BYTES],
        offsets=plan.offsets,
        places=part.source.places[batch.first + first : batch.first + stop],
    )


def _abort(generations: tuple[int, ...], left_s: float) -> Steps[None]:
    """Give plans up now. When that fails they time out at the master by themselves."""
    if not generations or left_s <= 0:
        return
    try:
        yield from ask(AbortPut(generations), Done, min(ABORT_TIMEOUT_S, left_s))
    except KVStoreError:
        return


def _results(batch: _Batch, clock: Clock) -> Steps[list[PutOutcome]]:
    """Outcomes in order. Where others hold parts too, one Probe tells what is visible.

    What nobody could tell within the deadline counts as not visible.
    """
    namespace, parts = batch.request.opened.namespace, batch.parts.values()
    stored = [part.states.count(STORED) for part in parts]
    visible = b"\1" * batch.pages
    if any(stored) and not namespace.is_opaque and len(parts) != len(namespace.parts):
        visible = yield from _visible(batch, batch.request.deadline_s - clock.now_s())
    if stored.count(batch.pages) == len(parts):
        return [_VISIBLE if each == 1 else _NOT_YET_VISIBLE for each in visible[: batch.pages]]
    return [batch.outcome(page, visible[page] == 1) for page in range(batch.pages)]


def _visible(batch: _Batch, left_s: float) -> Steps[bytes]:
    """One byte a page: 1 where all parts are known to be in."""
    if left_s <= 0:
        return bytes(batch.pages)
    question = Probe(batch.request.opened.namespace.id, batch.chain.packed)
    try:
        probed = yield from ask(question, Probed, left_s)
    except DeadlineExceeded:
        return bytes(batch.pages)
    return probed.present.ljust(batch.pages, b"\0")
