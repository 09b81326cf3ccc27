"""Moves: pages copied from one segment of a worker to another, as puts whose writer is this master.

Owns what is under way and what a worker may be asked at once: moves and bytes in flight, and a
budget in bytes a second. A move is a put of which no peer knows, its Ingest a command, its pages
are sealed by the worker's reports like those of any put. Must not know why pages are moved.
See the step table "move" in ARCHITECTURE.md.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.ids import KEY_BYTES
from kvstore.replica import Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource, Ingest, Ingested
from master.budget import Budget
from master.events import Command, CommandId
from master.packed import WORD, words
from master.plans import Owner, Plan, PlanPage, Put, Wanted, reserve
from master.puts import fail_plan, keep
from master.segments import Segment
from master.suspects import Suspect, check

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.core import Core
    from master.run import Copy, Run
    from master.wheel import Wakeup

PAGES_MAX: Final = 64
BYTES_MAX: Final = 16 << 20
"""Of one move; a single page may be larger."""
IN_FLIGHT_MAX: Final = 4
BYTES_IN_FLIGHT_MAX: Final = 64 << 20
"""Of one worker."""
REST_S: Final = 1.0
"""A worker that stored nothing of a move is asked for no other so long."""
REQUEST_BYTES: Final = 16
SIZES_MAX: Final = 4096
SIZES_WINDOW: Final = 64
"""Answers after which what was seen before them is forgotten."""
_NAMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}


class MoveKind(StrEnum):
    """Why pages move; the names are those of counters."""

    DEMOTE = "demote"
    PROMOTE = "promote"
    COPY = "copy"
    """To another worker."""


class Lane(msgspec.Struct, eq=False):
    """What one worker may be asked to move."""

    moves: int = 0
    size_bytes: int = 0
    """In flight."""
    budget: Budget = msgspec.field(default_factory=Budget)
    rests_until_s: float = 0.0

    def free_at_s(self, now_s: float, bytes_per_s: float) -> float:
        """When another move may begin: `now_s`, later, or (infinity) once one has ended."""
        if self.moves >= IN_FLIGHT_MAX or self.size_bytes >= BYTES_IN_FLIGHT_MAX:
            return inf
        return max(self.budget.free_at_s(now_s, bytes_per_s), self.rests_until_s)


class Move(msgspec.Struct, eq=False):
    """One Ingest that a worker has not answered yet."""

    kind: MoveKind
    plan: Plan
    source: Segment
    offsets: bytes
    generations: bytes
    """Where the pages lie, as sealed in `source`; packed, one entry a page."""
    lane: Lane

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


class _Seen(msgspec.Struct, eq=False):
    """The longest encoded pages: of this window and of the one before."""

    longest: int = 0
    before: int = 0
    answers: int = 0


class StoredSizes:
    """How long the parts of a namespace are once they are encoded."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._seen: dict[tuple[int, int], _Seen] = {}

    def size_class(self, namespace: int, part: int, part_bytes: int) -> int:
        """The class that lately would have held all of them; the part's own while none is known."""
        seen = self._seen.get((namespace, part))
        longest = part_bytes if seen is None else max(seen.longest, seen.before)
        return size_class_of(min(longest, part_bytes))

    def note(self, namespace: int, part: int, stored_bytes: int) -> None:
        """The longest page of a request took so much."""
        seen = self._seen.get((namespace, part))
        if seen is None:
            if len(self._seen) >= SIZES_MAX:  # I7: those seen longest are moved as they are
                del self._seen[next(iter(self._seen))]
            seen = self._seen[namespace, part] = _Seen()
        seen.longest = max(seen.longest, stored_bytes)
        seen.answers += 1
        if seen.answers % SIZES_WINDOW == 0:
            seen.before, seen.longest = seen.longest, 0


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


def start(core: Core, kind: MoveKind, run: Run, copy: Copy, pages: range, target: Segment) -> int:
    """Have these pages of a copy copied to `target`, as many as find room, of which one does; how
    many.
    """
    known = core.namespaces.by_ordinal(run.namespace)
    assert known is not None, run.namespace
    first = pages.start
    generation = core.new_generation()
    request = generation.to_bytes(REQUEST_BYTES, "little")
    put = Put(core.moves.owner, request, 0.0, core.now, {})
    wanted = Wanted(
        run.namespace, copy.part, copy.part_bytes, class_for(core, run, copy, target.tier),
        known.namespace.layout.page_tokens,
    )  # fmt: skip
    keys = run.keys[first * KEY_BYTES : pages.stop * KEY_BYTES]
    parent = run.key(first - 1) if first else run.parent
    plan = reserve(put, generation, wanted, target, parent, keys)
    at = slice(first * WORD, (first + len(plan)) * WORD)
    plan.checksums = copy.checksums[at]
    core.plans[plan.generation] = plan
    run.plans = (*run.plans, plan)
    columns = copy.offsets[at], copy.generations[at]
    move = Move(kind, plan, copy.segment, *columns, lane_of(core, target))
    put.timeout_s = core.tunables.put_timeout_s(move.size_bytes)
    keep(core, put)
    _send(core, move)
    if kind is MoveKind.DEMOTE:
        copy.segment.demoted_bytes += len(plan) * plan.part_bytes
    core.press(target)
    return len(plan)


def class_for(core: Core, run: Run, copy: Copy, tier: Tier) -> int:
    """The size class that pages of this copy are planned in when they are moved to `tier`."""
    if tier is not Tier.NVME:
        return size_class_of(copy.part_bytes)
    return core.moves.sizes.size_class(run.namespace, copy.part, copy.part_bytes)


def _send(core: Core, move: Move) -> None:
    plan, source, lane = move.plan, move.source, move.lane
    target = plan.segment
    assert target.session is not None, target.id
    message = Ingest(
        core.epoch, target.id, target.incarnation, plan.generation, plan.namespace, plan.part,
        plan.part_bytes, plan.size_class, plan.token_count, plan.parent, plan.keys, plan.offsets,
        plan.checksums,
        ExtentSource(source.id, source.incarnation, move.offsets, move.generations),
    )  # fmt: skip
    command = core.orders.new_command()
    core.moves.in_flight[command] = move
    lane.moves += 1
    lane.size_bytes += move.size_bytes
    lane.budget.spend(move.size_bytes)
    core.counters[f"moves_{move.kind}"] += 1
    core.actions.append(Command(command, target.session, message))


def answered(core: Core, command: CommandId, reply: Message | None) -> bool:
    """Whether this command was a move; then it has ended, and what was not sealed is given up."""
    move = core.moves.in_flight.pop(command, None)
    if move is None:
        return False
    plan, lane = move.plan, move.lane
    lane.moves -= 1
    lane.size_bytes -= move.size_bytes
    core.moves.look(core.now)
    outcomes = b""
    if isinstance(reply, Ingested) and len(reply.outcomes) == len(plan):
        outcomes = reply.outcomes
        is_measured = Outcome.OK in outcomes or Outcome.TOO_BIG in outcomes
        if is_measured and plan.segment.tier is Tier.NVME:
            stored_bytes = reply.stored_max or plan.part_bytes
            core.moves.sizes.note(plan.namespace, plan.part, stored_bytes)
    sealed = plan.states.count(PlanPage.SEALED)
    if plan.open:
        fail_plan(core, plan)
    tier = plan.segment.tier
    core.counters[f"moved_pages_{tier}"] += sealed
    core.counters[f"moved_bytes_{tier}"] += sealed * plan.part_bytes
    core.counters[f"stored_bytes_{tier}"] += sealed * plan.size_class
    if sealed < len(plan):
        if move.kind is MoveKind.DEMOTE:
            lost_bytes = (len(plan) - sealed) * plan.part_bytes
            move.source.demoted_bytes = max(0, move.source.demoted_bytes - lost_bytes)
        core.counters["moves_cut_short"] += 1
        _ask_why(core, move, outcomes)
    if not sealed and Outcome.TOO_BIG not in outcomes:
        lane.rests_until_s = core.now + REST_S
    return True


def _ask_why(core: Core, move: Move, outcomes: bytes) -> None:
    """Count what went wrong; a copy whose bytes are not what was sealed is checked, as a reader's
    suspect is.
    """
    offsets, generations = words(move.offsets), words(move.generations)
    for page, outcome in enumerate(outcomes):
        if outcome != Outcome.OK:
            core.counters[f"moves_{_NAMES.get(outcome, 'unknown')}"] += 1
        if outcome == Outcome.CHECKSUM:
            suspect = Suspect(move.source, offsets[page], generations[page])
            span = move.source.allocator.locate(suspect.offset)
            if span is not None and span.holds(suspect.generation):
                check(core, suspect)
