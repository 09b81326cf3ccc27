"""Moves and copies: pages copied from one segment to another, as puts whose writer is this master.

Owns what is under way. A move is between segments of one worker; a copy goes to another, which
reads it as any reader does. Either is a put of which no peer knows, its Ingest a command, its pages
are sealed by the worker's reports like those of any put. Must not know why pages are moved.
See the step tables "move" and "copy" in ARCHITECTURE.md.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.lease import granter_release_s
from kvstore.replica import Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource, Ingest, Ingested, PeerSource, StripeSource
from master import degraded, write_budget
from master.events import Command, CommandId
from master.lanes import REST_S, Lane
from master.packed import NOT_THERE, WORD, index_of, words
from master.plans import Owner, Plan, PlanPage, Put, Wanted, reserve
from master.puts import fail_plan, keep
from master.segments import Segment
from master.stored_sizes import StoredSizes
from master.suspects import Suspect, check

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.core import Core
    from master.run import Copy, Run
    from master.wheel import Wakeup

PAGES_MAX: Final = 64
BYTES_MAX: Final = 16 << 20
"""Of one move; a single page may be larger."""
REQUEST_BYTES: Final = 16
_NAMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}


class MoveKind(StrEnum):
    """Why pages move; the names are those of counters."""

    DEMOTE = "demote"
    PROMOTE = "promote"
    COPY = "copy"
    """To another worker."""


class Move(msgspec.Struct, eq=False):
    """One Ingest that a worker has not answered yet."""

    kind: MoveKind
    plan: Plan
    source: Segment
    incarnation: int
    """Of the source."""
    offsets: bytes
    generations: bytes
    """Where the pages lie, as sealed in `source`; packed, one entry a page."""
    lanes: tuple[Lane, ...]
    """That of the worker; of a copy, those at both ends."""
    leased_until_s: float = 0.0
    """Of a copy: until when what it reads stays where it is (I35)."""

    @property
    def size_bytes(self) -> int:
        """What is read."""
        return len(self.plan) * self.plan.part_bytes


class Wish(msgspec.Struct, eq=False):
    """Pages that are to be brought up."""

    namespace: int
    keys: bytes
    tier: Tier = Tier.DRAM
    """At least so far."""
    tries: int = 0
    """How often some of them found no room."""
    room_bytes: int | None = None
    """What may still be evicted for it: at first as much as it wants, and unknown until then."""


class Moves:
    """What is under way, and when somebody wants to look whether more can be."""

    __slots__ = (
        "_wakeup",
        "demoting",
        "has_drives",
        "in_flight",
        "look_at_s",
        "owner",
        "sizes",
        "wishes",
    )

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with nothing under way; `wakeup` hears of looks."""
        self._wakeup = wakeup
        self.owner = Owner(("master", "", b""), {}, {}, {})
        """Whose puts moves are; no peer is known by it."""
        self.in_flight: dict[CommandId, Move] = {}
        self.sizes = StoredSizes()
        self.demoting: dict[Segment, None] = {}
        """Segments with pages to be demoted."""
        self.wishes: dict[bytes, Wish] = {}
        """By their first page, longest first."""
        self.look_at_s = inf
        self.has_drives = False
        """Whether any segment lies on one: else nobody need look."""

    def look(self, at_s: float) -> None:
        """A look is wanted at `at_s`, if not sooner."""
        self.look_at_s = min(self.look_at_s, at_s)
        self._wakeup.by(at_s)

    def was_filled(self, segment: Segment, now_s: float) -> None:
        """A segment has little room left: pages are to be demoted from it, if there is where to."""
        if segment.tier is Tier.HBM or (segment.tier is Tier.DRAM and self.has_drives):
            self.demoting[segment] = None
            self.look(now_s)


def lane_of(core: Core, segment: Segment) -> Lane:
    """That of the segment's worker."""
    return core.workers[segment.worker].lane


def free_at_s(core: Core, lane: Lane) -> float:
    """When another move may begin."""
    return lane.free_at_s(core.now, core.tunables.move_bytes_per_s)


def pages_at_once(part_bytes: int) -> int:
    """How many pages one move may have."""
    return max(1, min(PAGES_MAX, BYTES_MAX // part_bytes))


def copy_free_at_s(core: Core, source: Segment, target: Segment) -> float:
    """When another copy between the workers of these two may begin: now, later, or (infinity) once
    one has ended.
    """
    rate = core.tunables.copy_bytes_per_s
    return max(lane.free_at_s(core.now, rate) for lane in _copy_lanes(core, source, target))


def may_copy_from(core: Core, worker: str) -> bool:
    """Whether another copy from this worker may begin now, as far as that is up to it."""
    known = core.workers.get(worker)
    rate = core.tunables.copy_bytes_per_s
    return known is None or known.copies.free_at_s(core.now, rate) <= core.now


def _copy_lanes(core: Core, source: Segment, target: Segment) -> tuple[Lane, ...]:
    both = (
        {target.worker: 0} if source is core.stripes.place else {source.worker: 0, target.worker: 0}
    )
    return tuple(core.workers[each].copies for each in both)


def start(core: Core, kind: MoveKind, run: Run, copy: Copy, pages: range, target: Segment) -> int:
    """Have these pages of a copy copied to `target`, as many as find room; how many.

    Room for one was seen there, or, if it is of another worker, the answer may be 0. Then only
    pages are copied that the target neither has nor is given, as many as go at once.
    """
    if kind is MoveKind.COPY:
        pages = _lacking(run, copy, pages, target)
        if not pages or not copy.segment.readable or not target.takes_plans:
            return 0
    plan = _plan(core, run, copy, pages, target)
    if not len(plan):
        return 0
    at = slice(pages.start * WORD, (pages.start + len(plan)) * WORD)
    plan.checksums = copy.checksums[at]
    core.plans[plan.generation] = plan
    run.plans = (*run.plans, plan)
    source, is_copy = copy.segment, kind is MoveKind.COPY
    lanes = _copy_lanes(core, source, target) if is_copy else (lane_of(core, target),)
    columns = copy.offsets[at], copy.generations[at]
    move = Move(kind, plan, source, source.incarnation, *columns, lanes)
    plan.put.timeout_s = core.tunables.put_timeout_s(move.size_bytes)
    if is_copy:
        plan.put.timeout_s = min(plan.put.timeout_s, limits.LEASE_TTL_MAX_S)
        move.leased_until_s = _lease(core, run, source, plan.put.timeout_s)
    keep(core, plan.put)
    _send(core, move)
    if kind is MoveKind.DEMOTE:
        source.demoted_bytes += len(plan) * plan.part_bytes
    if target.tier is Tier.NVME:
        write_budget.spend(core, len(plan) * plan.size_class)
    core.press(target)
    return len(plan)


def _plan(core: Core, run: Run, copy: Copy, pages: range, target: Segment) -> Plan:
    """A put of its own for as many of the pages as the target has room for."""
    known = core.namespaces.by_ordinal(run.namespace)
    assert known is not None, run.namespace
    generation = core.new_generation()
    request = generation.to_bytes(REQUEST_BYTES, "little")
    put = Put(core.moves.owner, request, 0.0, core.now, {})
    wanted = Wanted(
        run.namespace, copy.part, copy.part_bytes, class_for(core, run, copy, target.tier),
        known.namespace.layout.page_tokens,
    )  # fmt: skip
    keys = run.keys[pages.start * KEY_BYTES : pages.stop * KEY_BYTES]
    parent = run.key(pages.start - 1) if pages.start else run.parent
    return reserve(put, generation, wanted, target, parent, keys)


def _lacking(run: Run, copy: Copy, pages: range, target: Segment) -> range:
    """The first of these pages, in a row, that the copy has and the target lacks (I14)."""
    there = run.held_by(c for c in run.copies_of(copy.part) if c.segment is target)
    given = [p for p in run.plans if p.part == copy.part and p.segment is target]
    for page in pages:
        is_given = any(plan.is_open(run.key(page)) for plan in given)
        if there[page] or is_given or not copy.generation(page):
            pages = range(pages.start, page)
            break
    return pages[: pages_at_once(copy.part_bytes)]


def _lease(core: Core, run: Run, source: Segment, lasts_s: float) -> float:
    """Keep what a copy reads where it is, for so long (I35); it is no use of the pages."""
    until_s = granter_release_s(core.now, lasts_s)
    run.read_until_s = max(run.read_until_s, until_s)
    source.leased_until_s = max(source.leased_until_s, until_s)
    return until_s


def _end_lease(core: Core, move: Move, *, is_over: bool) -> None:
    """Let what a copy has read go again; unless nobody said that it is over: it may read on."""
    plan = move.plan
    others = [m for m in core.moves.in_flight.values() if m.plan.namespace == plan.namespace]
    for stretch in core.tree(plan.namespace).stretches(plan.keys):
        run = stretch.run
        if not is_over:
            run.lease(move.leased_until_s)
        reading = [other.leased_until_s for other in others if _is_of(other.plan, run)]
        run.read_until_s = max(reading, default=0.0)


def _is_of(plan: Plan, run: Run) -> bool:
    """Whether some pages of a plan are the run's; they are neighbours in both."""
    at = index_of(run.keys, plan.keys[:KEY_BYTES])
    return max(at, plan.page_of(run.keys[:KEY_BYTES])) != NOT_THERE


def class_for(core: Core, run: Run, copy: Copy, tier: Tier) -> int:
    """The size class that pages of this copy are planned in when they are moved to `tier`."""
    if tier is not Tier.NVME:
        return size_class_of(copy.part_bytes)
    return core.moves.sizes.size_class(run.namespace, copy.part, copy.part_bytes)


def _send(core: Core, move: Move) -> None:
    plan = move.plan
    target = plan.segment
    assert target.session is not None, target.id
    message = Ingest(
        core.epoch, target.id, target.incarnation, plan.generation, plan.namespace, plan.part,
        plan.part_bytes, plan.size_class, plan.token_count, plan.parent, plan.keys, plan.offsets,
        plan.checksums, _source(core, move),
    )  # fmt: skip
    command = core.orders.new_command()
    core.moves.in_flight[command] = move
    for lane in move.lanes:
        lane.take(move.size_bytes)
    core.counters[f"moves_{move.kind}"] += 1
    core.actions.append(Command(command, target.session, message))


def _source(core: Core, move: Move) -> ExtentSource | PeerSource | StripeSource:
    source = move.source
    if source is core.stripes.place:
        return degraded.source(core, move)
    if source.worker != move.plan.segment.worker:
        return PeerSource(source.ref, move.offsets, move.generations)
    return ExtentSource(source.id, move.incarnation, move.offsets, move.generations)


def answered(core: Core, command: CommandId, reply: Message | None) -> bool:
    """Whether this command was a move; then it has ended, and what was not sealed is given up."""
    move = core.moves.in_flight.pop(command, None)
    if move is None:
        return False
    plan = move.plan
    for lane in move.lanes:
        lane.give_back(move.size_bytes)
    core.moves.look(core.now)
    core.relocations.wake(core.now)
    if move.kind is MoveKind.COPY:
        _end_lease(core, move, is_over=isinstance(reply, Ingested))
    outcomes = _outcomes(core, plan, reply)
    sealed = plan.states.count(PlanPage.SEALED)
    if plan.open:
        fail_plan(core, plan)
    _count(core, move, sealed)
    if sealed < len(plan):
        if move.kind is MoveKind.DEMOTE:
            lost_bytes = (len(plan) - sealed) * plan.part_bytes
            move.source.demoted_bytes = max(0, move.source.demoted_bytes - lost_bytes)
        _ask_why(core, move, outcomes)
    if not sealed and Outcome.TOO_BIG not in outcomes:
        for lane in move.lanes:
            lane.rests_until_s = core.now + REST_S
    return True


def _outcomes(core: Core, plan: Plan, reply: Message | None) -> bytes:
    """One byte a page, none if nobody said; how long pages are in a drive's extents is noted."""
    if not isinstance(reply, Ingested) or len(reply.outcomes) != len(plan):
        return b""
    is_measured = Outcome.OK in reply.outcomes or Outcome.TOO_BIG in reply.outcomes
    if is_measured and plan.segment.tier is Tier.NVME:
        stored_bytes = reply.stored_max or plan.part_bytes
        core.moves.sizes.note(plan.namespace, plan.part, stored_bytes)
    return reply.outcomes


def _count(core: Core, move: Move, sealed: int) -> None:
    plan = move.plan
    tier, word = plan.segment.tier, "copied" if move.kind is MoveKind.COPY else "moved"
    core.counters[f"{word}_pages_{tier}"] += sealed
    core.counters[f"{word}_bytes_{tier}"] += sealed * plan.part_bytes
    core.counters[f"stored_bytes_{tier}"] += sealed * plan.size_class
    core.counters["moves_cut_short"] += int(sealed < len(plan))


def _ask_why(core: Core, move: Move, outcomes: bytes) -> None:
    """Count what went wrong; what was read and is not what was sealed, or was not found by another
    worker, is checked, as a reader's suspect is.
    """
    is_copy = move.kind is MoveKind.COPY
    doubts = (Outcome.CHECKSUM, Outcome.SOURCE_LOST) if is_copy else (Outcome.CHECKSUM,)
    is_its_life = move.source.incarnation == move.incarnation
    offsets, generations = words(move.offsets), words(move.generations)
    for page, outcome in enumerate(outcomes):
        if outcome != Outcome.OK:
            name = _NAMES.get(outcome, "unknown")
            core.counters[f"{'copies' if is_copy else 'moves'}_{name}"] += 1
        if outcome in doubts and is_its_life:
            check(core, Suspect(move.source, offsets[page], generations[page]))
