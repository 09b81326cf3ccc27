"""The put operation: BeginPut, Sealed, and giving up what was planned.

See the step table "put" in ARCHITECTURE.md. Must not know how extents are chosen (planning), how
orders reach workers (orders), or why a put stops (stopping).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import AccessDenied, BadValue, OutOfSpace, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.replica import ExtentEvent, ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import BeginPut, Sealed, SealedNoted
from master import degraded, hinting
from master.orders import OrderKind
from master.packed import WORD, split_keys, word, words
from master.planning import Planner, check_put
from master.plans import OPEN, Incomplete, Plan, PlanPage, Put
from master.run import Copy, Run
from master.segments import Segment, SegmentState
from master.sessions import Caller
from master.waiting import Waiting
from master.wheel import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from master.core import Core
    from master.directory import Tree

_ONCE_SEALED: Final = (ExtentState.SEALED, ExtentState.RETIRED)
_SEALED: Final = ExtentEvent.SEALED
_PAGE_SEALED: Final = PlanPage.SEALED
DUE_PER_TICK_MAX: Final = 32
STRETCHES_PER_STEP: Final = 128
"""Of open pages that fail at once: 10 µs each."""


def begin_put(core: Core, caller: Caller, message: BeginPut) -> None:
    """Reserve extents for a prefix of each chain; answer PutPlans, now or when that is possible."""
    known = core.namespaces.get(message.namespace)
    caller.session.must_own(known.namespace.content)
    check_put(known, message)
    hinting.count(core, message.hints)
    owner = caller.session.owner
    put = owner.puts.get(message.request)
    if put is not None:  # I14: a repeated request gets the same answer while it can be used
        if put.reply is None:
            put.asker = caller
        else:
            core.reply(caller, put.reply)
        return
    if len(owner.puts) >= limits.IDEMPOTENT_REPLIES_MAX:
        raise OutOfSpace(f"{len(owner.puts)} puts are open: finish or abort some first")
    waiting = owner.waits.pop(message.request, None)
    if waiting is not None:
        core.waiting.forget(waiting)
    deadline_s = core.now + min(message.timeout_s, limits.CALL_TIMEOUT_MAX_S)
    if waiting is not None:
        deadline_s = waiting.deadline_s
    core.start(_try(core, caller, message, deadline_s))


def _try(core: Core, caller: Caller, message: BeginPut, deadline_s: float) -> Iterator[None]:
    """A job: plan a put, then answer it or hold the answer back."""
    pages = sum([len(chain.keys) for chain in message.chains]) // KEY_BYTES
    timeout_s = core.tunables.put_timeout_s(pages * sum(message.part_bytes))
    put = Put(caller.session.owner, message.request, timeout_s, core.now, {}, caller)
    planner = Planner(core, core.namespaces.get(message.namespace), put, message)
    try:
        for _ in planner.plan():
            keep(core, put)
            yield
            if put.asker is None:
                return  # its owner is gone
    except BadValue as error:
        asker = stop_planning(core, put)
        give_up(core, [put])
        core.refuse(asker, error)
        return
    for size_class, wanted in planner.wanted_bytes.items():
        core.want_room(size_class, wanted)
    asker = stop_planning(core, put)
    blocked = bool(planner.blocked_on or planner.wanted_bytes)
    if blocked and not put.plans and message.wait and core.now < deadline_s:
        if not core.waiting.is_full:
            _park(core, asker, message, deadline_s, planner)
            return
        core.counters["waiting_puts_refused"] += 1
    put.reply = planner.answer()
    if put.plans:
        keep(core, put)
    core.reply(asker, put.reply)


def keep(core: Core, put: Put) -> None:
    """Let a put be found, and time out."""
    put.owner.puts[put.request] = put
    put.progress_s = core.now
    core.put_deadlines.place(put, core.now + put.timeout_s)


def stop_planning(core: Core, put: Put) -> Caller:
    """Nothing is planned any more; who is to be answered."""
    asker, put.asker = put.asker, None
    assert asker is not None, put.request
    if not put.plans:
        _forget(core, put)
    return asker


def _forget(core: Core, put: Put) -> None:
    core.put_deadlines.discard(put)
    put.owner.puts.pop(put.request, None)


def _park(
    core: Core, caller: Caller, message: BeginPut, deadline_s: float, planner: Planner
) -> None:
    if caller.session.id not in core.sessions:
        return  # it has gone meanwhile, and repeats this by another connection
    waiting = Waiting(
        caller.session.id,
        caller.request_id,
        message,
        deadline_s,
        tuple(planner.blocked_on),
        bool(planner.wanted_bytes),
    )
    core.waiting.park(waiting)
    caller.session.owner.waits[message.request] = waiting


def retry_woken(core: Core) -> None:
    """Try held-back puts again for which something has changed."""
    for waiting in core.waiting.take_woken():
        _retry(core, waiting)


def answer_overdue_waits(core: Core) -> None:
    """Answer the held-back puts whose time is up, with whatever can be granted now."""
    for waiting in core.waiting.by_deadline.take_due(core.now, DUE_PER_TICK_MAX):
        core.waiting.forget(waiting)
        _retry(core, waiting)


def _retry(core: Core, waiting: Waiting) -> None:
    session = core.sessions[waiting.session]
    session.owner.waits.pop(waiting.message.request, None)
    caller = Caller(session, waiting.request_id)
    core.start(_try(core, caller, waiting.message, waiting.deadline_s))


def sealed(core: Core, caller: Caller, message: Sealed) -> None:
    """Make verified extents part of the directory; one Outcome a page. Safe to repeat."""
    segment = _sealing_segment(core, caller, message)
    count = len(message.keys) // KEY_BYTES
    if message.incarnation != segment.incarnation:
        core.reply(caller, SealedNoted(bytes([Outcome.STALE]) * count))
        return
    if segment.state is not SegmentState.LIVE:
        raise Unavailable(f"segment {segment.id} is {segment.state.value}: its inventory is first")
    plan = core.plans.get(message.generation)
    if plan is not None and not _is_for(message, plan):
        core.counters["seals_unlike_plan"] += count
        plan = None
    if plan is not None:
        first = plan.page_of(message.keys[:KEY_BYTES])
        if (
            first >= 0
            and plan.matches(first, message.keys, message.offsets)
            and plan.has_parents(first, message.parents)
            and plan.has_checksums(first, message.checksums)
            and plan.all_open(first, count)
        ):
            seal_pages(core, plan, first, count, message.checksums)
            core.reply(caller, SealedNoted(bytes(count)))
            return
    core.reply(caller, SealedNoted(_seal_singly(core, segment, plan, message)))


def _sealing_segment(core: Core, caller: Caller, message: Sealed) -> Segment:
    caller.session.must_be_worker()
    count = len(message.keys) // KEY_BYTES
    sizes = len(message.parents), len(message.keys), len(message.offsets), len(message.checksums)
    if not count or sizes != (count * KEY_BYTES, count * KEY_BYTES, count * WORD, count * WORD):
        raise BadValue("parents, keys, offsets, checksums", sizes, "columns of equally many pages")
    segment = core.segments.get(message.segment)
    if segment is None:
        raise Unavailable(f"segment {message.segment} is not registered")
    if segment.worker != caller.session.name:
        raise AccessDenied(f"segment {segment.id} is not of worker {caller.session.name}")
    return segment


def _is_for(message: Sealed, plan: Plan) -> bool:
    """Whether the records say of their pages what was planned; otherwise none may be served."""
    return (
        message.segment == plan.segment.id
        and message.namespace_ordinal == plan.namespace
        and message.part == plan.part
        and message.part_bytes == plan.part_bytes
        and message.token_count == plan.token_count
    )


def _seal_singly(core: Core, segment: Segment, plan: Plan | None, message: Sealed) -> bytes:
    """The uncommon case: a repeated report, gaps, or pages that are no longer planned."""
    outcomes = bytearray()
    offsets = words(message.offsets)
    for i, key in enumerate(split_keys(message.keys)):
        at = slice(i * WORD, (i + 1) * WORD)
        if plan is not None:
            page = plan.page_of(key)
            if (
                page >= 0
                and plan.matches(page, key, message.offsets[at])
                and plan.states[page] == OPEN
            ):
                parents = message.parents[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                if plan.has_parents(page, parents) and plan.has_checksums(
                    page, message.checksums[at]
                ):
                    seal_pages(core, plan, page, 1, message.checksums[at])
                    outcomes.append(Outcome.OK)
                else:
                    core.counters["seals_unlike_plan"] += 1
                    outcomes.append(Outcome.PLAN_CLOSED)
                continue
        known = _was_sealed(segment, message.generation, key, offsets[i])
        outcomes.append(Outcome.OK if known else Outcome.PLAN_CLOSED)
    return bytes(outcomes)


def _was_sealed(segment: Segment, generation: int, key: bytes, offset: int) -> bool:
    """Whether this report was taken in before: also when the page has been dropped since.

    Then its extent waits for its leases to end, and the worker must not free it on its own (I9).
    """
    span = segment.allocator.locate(offset)
    if span is None or span.chunk.states[span.slot] not in _ONCE_SEALED:
        return False
    return (span.chunk.generations[span.slot], span.chunk.key(span.slot)) == (generation, key)


def seal_pages(core: Core, plan: Plan, first: int, count: int, checksums: bytes) -> None:
    """Settle these open pages of a plan and note where they lie (I3)."""
    for span in plan.pieces(first, count):
        plan.segment.allocator.apply(span, _SEALED)
    plan.close(first, count, _PAGE_SEALED)
    plan.put.progress_s = core.now
    keys = plan.keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
    offsets = plan.offsets[first * WORD : (first + count) * WORD]
    columns = offsets, word(plan.generation) * count, checksums
    piece = Copy(plan.part, plan.segment, plan.part_bytes, *columns, absent=0)
    runs = fill(core, core.tree(plan.namespace), keys, piece)
    core.waiting.wake_pages(keys)
    if core.tickets.part_waits:
        core.tickets.part_waits.sealed(core, plan.namespace, keys)
    if not plan.open:
        _close_plan(core, plan, runs if keys == plan.keys else None)
    if plan.put.owner is not core.moves.owner:
        core.counters["pages_sealed"] += count


def fill(core: Core, tree: Tree, keys: bytes, piece: Copy) -> list[Run]:
    """Note where these pages, all in the tree, lie, one entry of `piece` each; their runs."""
    runs, found = [], 0
    for stretch in tree.stretches(keys):
        first, count, run = stretch.first, stretch.count, stretch.run
        part = piece.piece(first, first + count)
        assert part is not None, stretch
        run.fill(stretch.page, part)
        if core.stripes:
            degraded.found(core, run, piece.part, stretch.page, count)
        run.progress_s = core.now
        runs.append(run)
        found += count
    assert found * KEY_BYTES == len(keys), (found, tree.namespace)
    return runs


def _close_plan(core: Core, plan: Plan, runs: list[Run] | None) -> list[Run]:
    """Forget a plan without open pages; the runs that it was part of, if not known already."""
    assert not plan.open, plan
    del core.plans[plan.generation]
    put = plan.put
    del put.plans[plan.generation]
    if not put.plans and put.asker is None:
        _forget(core, put)
    tree = core.tree(plan.namespace)
    if runs is None:
        runs = [stretch.run for stretch in tree.stretches(plan.keys)]
    for run in runs:
        run.plans = tuple([other for other in run.plans if other is not plan])
        if run.bucket == NOWHERE:
            core.expiry.place(run, max(core.now, run.expires_s))
    core.press(plan.segment)  # only now can what was sealed be moved on
    if tree.parts > 1 and any(0 in run.readable(tree.parts, core.version) for run in runs):
        watch_incomplete(core, tree, plan.keys, put.timeout_s)
    if core.replication.is_needed:
        core.replication.note_closed(core, tree, plan, runs)
    return runs


def watch_incomplete(core: Core, tree: Tree, keys: bytes, timeout_s: float) -> None:
    """Look at these pages again when their other parts have had time to come."""
    watched = Incomplete(tree.namespace, keys, timeout_s)
    core.incomplete.place(watched, core.now + timeout_s)


def fail_pages(core: Core, plan: Plan, first: int, count: int) -> None:
    """Give up these open pages: quarantined until the worker has confirmed the fence (I6)."""
    segment = plan.segment
    order = core.orders.new(OrderKind.FENCE, segment, plan.size_class)
    for span in plan.pieces(first, count):
        segment.allocator.apply(span, ExtentEvent.PLAN_FAILED)
    order.offsets.frombytes(plan.offsets[first * WORD : (first + count) * WORD])
    order.generations.frombytes(word(plan.generation) * count)
    core.orders.give(order)
    plan.close(first, count, PlanPage.FAILED)
    core.counters["pages_failed"] += count
    keys = plan.keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
    tree = core.tree(plan.namespace)
    runs = [stretch.run for stretch in tree.stretches(keys)]
    if not plan.open:
        runs = _close_plan(core, plan, runs if keys == plan.keys else None)
    for run in reversed(runs):
        prune(core, tree, run)
    core.waiting.wake_pages(keys)


def prune(core: Core, tree: Tree, run: Run) -> None:
    """Drop holes that nothing hangs below; runs that lost their last child may be overdue."""
    for bared in tree.prune(run):
        if bared.bucket == NOWHERE:
            core.expiry.place(bared, max(core.now, bared.expires_s))


def fail_plan(core: Core, plan: Plan) -> None:
    """Give up every open page of a plan."""
    for first, count in list(plan.open_stretches()):
        fail_pages(core, plan, first, count)


def give_up(core: Core, puts: Sequence[Put]) -> None:
    """Their owners have nothing to do with them any more; open plans fail bit by bit (I27)."""
    fails_already = bool(core.given_up.puts)
    for put in puts:
        _forget(core, put)
        if put.plans:
            put.owner = core.given_up
            put.request = min(put.plans).to_bytes(WORD, "little")  # owners may name theirs alike
            core.given_up.puts[put.request] = put
    if not fails_already:
        core.start(fail_in_steps(core, _given_up(core)))


def _given_up(core: Core) -> Iterator[Plan]:
    while core.given_up.puts:
        put = next(iter(core.given_up.puts.values()))
        yield from put.plans.copy().values()


def fail_in_steps(core: Core, plans: Iterable[Plan]) -> Iterator[None]:
    """A job: give up every open page of these plans."""
    left = STRETCHES_PER_STEP
    for plan in plans:
        while plan.open:
            first, count = next(plan.open_stretches())
            fail_pages(core, plan, first, count)
            left -= 1
            if not left:
                yield
                left = STRETCHES_PER_STEP
