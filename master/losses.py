"""What is lost with a worker that is away or lost, and with a copy that turned out to be bad.

The copies of a lost segment are misses at once (Segment.readable); taking them out of the tree is
a job in steps. What they were is kept as a new leader would have it, for their return. A slot that
a lost segment's copy leaves may be counted FREE without the worker's word, because nothing is
planned there before its inventory has been compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import AccessDenied, BadValue, Unavailable
from kvstore.replica import ExtentEvent, ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from master import degraded
from master.chunk_writes import keep_chunk
from master.chunks import Span
from master.orders import OrderKind
from master.packed import WORD, words
from master.puts import fail_in_steps, fail_plan, prune
from master.removal import holder_away
from master.segments import Medium, SegmentState
from master.suspects import Suspect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.membership import ReportDamage
    from master.chunks import Chunk
    from master.core import Core
    from master.membership import Worker
    from master.orders import Order
    from master.plans import Plan
    from master.run import Copy, Run
    from master.segments import Segment
    from master.sessions import Caller

SLOTS_PER_STEP: Final = 64
"""Looked at one by one, 20 us each."""
COST_PER_STEP: Final = 512
ROW_COST: Final = 8
"""What pages of one copy in a row cost beside their number."""
ROW_SLOTS_MAX: Final = 64


def detach(core: Core, worker: Worker) -> None:
    """Its control connection is gone or replaced: every order is void, nothing is planned there."""
    worker.session = None
    for segment in worker.segments.values():
        detach_segment(core, segment)


def detach_segment(core: Core, segment: Segment) -> None:
    """Void the segment's orders; what they were about is asked anew after the next inventory."""
    segment.session = None
    segment.held.clear()
    if segment.allocator.bytes_in[ExtentState.RETIRED]:
        # When each of these may be freed was known to its order only.
        leased_until_s = max(core.lease_end_s(), segment.leased_until_s)
        segment.free_not_before_s = max(segment.free_not_before_s, leased_until_s)
    core.suspects = {each for each in core.suspects if each.segment is not segment}
    holder_away(core, segment)
    core.orders.drop(segment)


def lose_segment(core: Core, segment: Segment) -> None:
    """Its copies are misses from now on, its open plans fail."""
    segment.state, segment.readable = SegmentState.LOST, False
    core.version += 1
    detach_segment(core, segment)
    core.start(fail_in_steps(core, _plans_in(core, segment)))
    core.jobs.append(clean(core, segment, segment.registration))
    core.replication.note_loss(core.now + core.tunables.repair_after_s)


def fail_plans(core: Core, segment: Segment) -> None:
    """No pull into the segment can be finished any more."""
    for plan in _plans_in(core, segment):
        fail_plan(core, plan)


def _plans_in(core: Core, segment: Segment) -> list[Plan]:
    return [plan for plan in core.plans.values() if plan.segment is segment]


def clean(core: Core, segment: Segment, registration: int) -> Iterator[None]:
    """A job: take the lost segment's copies out of the tree, until it is registered again.

    `registration` is that of its loss: it may be back before the first step.
    """
    for chunk in list(segment.allocator.chunk_list):
        for _ in _clean_chunk(core, segment, chunk):
            yield
            if registration != segment.registration:
                return


def _clean_chunk(core: Core, segment: Segment, chunk: Chunk) -> Iterator[None]:
    """A job. What it holds, and how long that lives, may be back, unless its medium has failed or
    the segment was given up.
    """
    yield
    if segment.medium is not Medium.FAILED and core.segments.get(segment.id) is segment:
        yield from keep_chunk(core, segment, chunk)
    slot = 0
    while (slot := _clean_slots(core, segment, chunk, slot)) >= 0:
        yield


def _clean_slots(core: Core, segment: Segment, chunk: Chunk, first: int) -> int:
    """Clean some slots from `first` on; where to go on, or -1 at the end."""
    cost = 0
    while (found := chunk.next_sealed(first)) is not None:
        if cost >= COST_PER_STEP:
            return found[0]
        span = _row(core, segment, chunk, *found)
        leased_until_s = drop_copy(core, segment, span)
        segment.free_not_before_s = max(segment.free_not_before_s, leased_until_s)
        segment.allocator.apply(span, ExtentEvent.RETIRED)
        segment.allocator.apply(span, ExtentEvent.FREED)
        core.counters["pages_lost"] += span.count
        cost += ROW_COST + span.count
        first = span.slot + span.count
    return -1


def _row(core: Core, segment: Segment, chunk: Chunk, slot: int, stop: int) -> Span:
    """These SEALED slots as far as all that is left of a copy lies there, else the first of them.

    Of pages that stripes may have to give each is looked at by itself.
    """
    run, page, copy = _found(core, segment, chunk, slot)
    count = min(len(run) - page, stop - slot, ROW_SLOTS_MAX)
    span, at = Span(chunk, slot, count), slice(page * WORD, (page + count) * WORD)
    generations = chunk.generations[slot : slot + count].tobytes()
    whole = copy.offsets[at] == span.offsets() and copy.generations[at] == generations
    return span if whole and not core.stripes else Span(chunk, slot, 1)


def _found(core: Core, segment: Segment, chunk: Chunk, slot: int) -> tuple[Run, int, Copy]:
    """What lies in this SEALED slot: a page of a run, and its copy."""
    key = chunk.key(slot)
    run = core.tree(chunk.namespaces[slot]).get(key)
    assert run is not None, key
    page = run.page_of(key)
    return run, page, run.copy_at(segment, page, chunk.offset(slot))


def drop_copy(core: Core, segment: Segment, span: Span) -> float:
    """Take what these SEALED slots hold, one copy in a row, out of the tree; the slots themselves
    are the caller's.

    Returns until when somebody may read it.
    """
    run, page, copy = _found(core, segment, span.chunk, span.slot)
    tree = core.tree(run.namespace)
    run.clear(copy, page, span.count)
    if run.thinned and run.copies:  # by so many, and not by this one
        run.thinned = False
        due_s = max(core.now, core.replication.patient_until_s)
        core.replication.note(core, tree, run.keys, due_s)
    if core.stripes:
        for each in range(page, page + span.count):
            degraded.lost(core, run, copy, each)
    prune(core, tree, run)
    return run.free_from_s


def note_dropped(core: Core, chunk: Chunk, slot: int) -> None:
    """What lay in this slot has a replica fewer: another one is to be made, if one is left."""
    tree = core.tree(chunk.namespaces[slot])
    run = tree.get(chunk.key(slot))
    if run is not None:
        core.replication.note(core, tree, run.keys, core.now, presses=True)


def checked(core: Core, order: Order, outcomes: bytes) -> None:
    """What a worker found of suspects."""
    segment = order.segment
    for offset, generation, outcome in zip(order.offsets, order.generations, outcomes, strict=True):
        core.suspects.discard(Suspect(segment, offset, generation))
        if outcome == Outcome.CHECKSUM:
            _drop_damaged(core, segment, offset, generation)


def report_damage(core: Core, caller: Caller, message: ReportDamage) -> None:
    """Drop copies that their worker found damaged. Answer Done. Safe to repeat.

    A segment that is not in service is left alone: its worker tells again once it is.
    """
    session, segment = caller.session, core.segments.get(message.segment)
    session.must_be_worker()
    sizes = len(message.offsets), len(message.generations)
    if sizes[0] != sizes[1] or sizes[0] % WORD or sizes[0] // WORD > limits.BATCH_PAGES_MAX:
        want = f"columns of equally many extents, {limits.BATCH_PAGES_MAX} at most"
        raise BadValue("offsets, generations", sizes, want)
    if segment is None:
        raise Unavailable(f"segment {message.segment} is not registered")
    if segment.worker != session.name:
        raise AccessDenied(f"segment {segment.id} is not of worker {session.name}")
    core.start(_drop_all_damaged(core, caller, segment, message))


def _drop_all_damaged(
    core: Core, caller: Caller, segment: Segment, message: ReportDamage
) -> Iterator[None]:
    """A job: a disk may have lost all that one message can name."""
    rows = zip(words(message.offsets), words(message.generations), strict=True)
    for number, (offset, generation) in enumerate(rows, 1):
        if message.incarnation == segment.incarnation:  # I11
            _drop_damaged(core, segment, offset, generation)
        if number % SLOTS_PER_STEP == 0:
            yield
    core.reply(caller, Done())


def _drop_damaged(core: Core, segment: Segment, offset: int, generation: int) -> None:
    """Let a copy that is bad, and still that copy, go."""
    span = segment.allocator.locate(offset)
    if not segment.takes_orders or span is None or not span.holds(generation):
        return
    core.counters["pages_corrupt"] += 1
    free_at_s = drop_copy(core, segment, span)
    note_dropped(core, span.chunk, span.slot)
    segment.allocator.apply(span, ExtentEvent.RETIRED)
    free = core.orders.new(OrderKind.FREE, segment, span.chunk.size_class)
    free.offsets.append(offset)
    free.generations.append(generation)
    core.orders.give_at(free, max(core.now, free_at_s))
