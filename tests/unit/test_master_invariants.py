"""Every invariant that the full check names, broken on purpose and found."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvariantBroken
from kvstore.replica import ExtentEvent, ExtentState
from master import moves
from master.packed import word
from master.plans import PlanPage
from master.segments import SegmentState
from master.tunables import Tunables
from master.wheel import NOWHERE
from master.write_behind import IN_FLIGHT_MAX
from tests.unit.master_rig import TENANT, Rig, chain

if TYPE_CHECKING:
    from collections.abc import Callable

    from master.chunks import Span
    from master.core import Core
    from master.moves import Move
    from master.plans import Plan
    from master.run import Run

SEALED_KEYS, OPEN_KEYS = chain(1, 4), chain(2, 4)


@pytest.fixture
def rig() -> Rig:
    """A pool with sealed pages, an open put, a removed page, and a put that waits."""
    made = Rig()
    made.checks = False
    made.add_worker()
    space = made.open_namespace()
    space.put(SEALED_KEYS)
    space.put(chain(3, 2))
    space.plans(OPEN_KEYS)
    other = made.open("engine", TENANT, "other")
    assert space.begin(OPEN_KEYS, wait=True, session=other) is None
    made.holds_commands = True
    space.remove(chain(3, 2))
    made.master.check_invariants()
    return made


def the_run(core: Core) -> Run:
    """The run of sealed pages."""
    run = core.tree(1).get(SEALED_KEYS[:32])
    assert run is not None
    return run


def the_plan(core: Core) -> Plan:
    """The open plan."""
    (plan,) = core.plans.values()
    return plan


def slot_of(core: Core, offset: int) -> Span:
    """One extent."""
    span = core.segments["w1-dram"].allocator.locate(offset)
    assert span is not None
    return span


def stored_otherwise(core: Core) -> None:
    core.saving.forget("w1-dram")
    core.saving.stored["w1-dram"] = {0: 1}


def stored_and_gone(core: Core) -> None:
    core.saving.stored["w1-dram"] = {1 << 16: 1}


def not_stored_and_not_due(core: Core) -> None:
    core.saving.forget("w1-dram")


def too_many_values_under_way(core: Core) -> None:
    core.saving.writing.update({("w1-dram", number): 0.0 for number in range(IN_FLIGHT_MAX + 1)})


def unreadable_but_live(core: Core) -> None:
    core.segments["w1-dram"].readable = False


def readable_but_lost(core: Core) -> None:
    core.segments["w1-dram"].state = SegmentState.LOST


def one_place_twice(core: Core) -> None:
    copy = the_run(core).copies[0]
    copy.offsets = copy.offsets[:8] + copy.offsets


def another_generation(core: Core) -> None:
    copy = the_run(core).copies[0]
    copy.generations = word(99) + copy.generations[8:]


def nowhere(core: Core) -> None:
    copy = the_run(core).copies[0]
    copy.offsets = word(1 << 40) + copy.offsets[8:]


def found_but_not_sealed(core: Core) -> None:
    copy = the_run(core).copies[0]
    span = slot_of(core, copy.offset(0))
    span.chunk.states[span.slot] = ExtentState.RETIRED
    allocator = core.segments["w1-dram"].allocator
    allocator.bytes_in[ExtentState.SEALED] -= 4096
    allocator.bytes_in[ExtentState.RETIRED] += 4096
    allocator.sealed -= 1


def sealed_but_not_found(core: Core) -> None:
    run = the_run(core)
    run.clear(run.copies[0], 0)


def stale_mask(core: Core) -> None:
    run = the_run(core)
    run.readable(1, core.version)
    run.mask = b"\1\1\0\1"


def plan_without_put(core: Core) -> None:
    the_plan(core).put.plans.clear()


def plan_counts_wrongly(core: Core) -> None:
    the_plan(core).open += 1


def closed_plan_kept(core: Core) -> None:
    plan = the_plan(core)
    plan.states[:] = bytes([PlanPage.FAILED]) * 4
    plan.open = 0


def plan_unknown_to_its_pages(core: Core) -> None:
    run = core.tree(1).get(OPEN_KEYS[:32])
    assert run is not None
    run.plans = ()
    run.copies = the_run(core).copies


def run_keeps_a_closed_plan(core: Core) -> None:
    the_run(core).plans = (the_plan(core),)
    run = core.tree(1).get(OPEN_KEYS[:32])
    assert run is not None
    plan = the_plan(core)
    del core.plans[plan.generation]


def reserved_without_plan(core: Core) -> None:
    allocator = core.segments["w1-dram"].allocator
    allocator.plan(4096, 1234, 1, chain(9, 1))


def owner_without_session(core: Core) -> None:
    core.sessions[next(iter(core.sessions))].owner.sessions.clear()


def session_without_owner(core: Core) -> None:
    core.sessions.pop(next(iter(core.sessions)))


def put_without_deadline(core: Core) -> None:
    core.put_deadlines.discard(the_plan(core).put)
    assert the_plan(core).put.bucket == NOWHERE


def put_unknown_to_its_owner(core: Core) -> None:
    the_plan(core).put.owner.puts.clear()


def finished_put_kept(core: Core) -> None:
    put = the_plan(core).put
    put.owner.puts[b"another request."] = put


def wait_unknown_to_its_owner(core: Core) -> None:
    for owner in core.owners.values():
        owner.waits.clear()


def orphaned_removal(core: Core) -> None:
    core.removals.retiring.clear()


def retiring_something_else(core: Core) -> None:
    (held,) = core.removals.retiring.values()
    held[0] = held.pop(next(iter(held)))


def no_tick_wanted(core: Core) -> None:
    core.wakeup.at_s = inf


def run_out_of_the_wheel(core: Core) -> None:
    core.expiry.discard(the_run(core))


def retired_and_forgotten(core: Core) -> None:
    run = the_run(core)
    span = slot_of(core, run.copies[0].offset(0))
    run.clear(run.copies[0], 0)
    core.segments["w1-dram"].allocator.apply(span, ExtentEvent.RETIRED)


def too_many_in_flight(core: Core) -> None:
    core.segments["w1-dram"].orders_in_flight += 1


def held_but_not_quarantined(core: Core) -> None:
    core.segments["w1-dram"].held[0] = 4096


BROKEN: list[tuple[Callable[[Core], None], str]] = [
    (unreadable_but_live, "I3"),
    (readable_but_lost, "I3"),
    (one_place_twice, "I"),
    (another_generation, "I3"),
    (nowhere, "I3"),
    (found_but_not_sealed, "I3"),
    (sealed_but_not_found, "I17"),
    (stale_mask, "I15"),
    (plan_without_put, "I18"),
    (plan_counts_wrongly, "I18"),
    (closed_plan_kept, "I"),
    (plan_unknown_to_its_pages, "I"),
    (run_keeps_a_closed_plan, "I18"),
    (reserved_without_plan, "I17"),
    (owner_without_session, "I18"),
    (session_without_owner, "I18"),
    (put_without_deadline, "I18"),
    (put_unknown_to_its_owner, "I18"),
    (finished_put_kept, "I18"),
    (wait_unknown_to_its_owner, "I18"),
    (orphaned_removal, "I29"),
    (retiring_something_else, "I29"),
    (run_out_of_the_wheel, "I18"),
    (no_tick_wanted, "I18"),
    (retired_and_forgotten, "I6"),
    (too_many_in_flight, "I7"),
    (held_but_not_quarantined, "I17"),
    (stored_otherwise, "I32"),
    (stored_and_gone, "I32"),
    (not_stored_and_not_due, "I32"),
    (too_many_values_under_way, "I7"),
]


@pytest.mark.parametrize(("spoil", "number"), BROKEN, ids=[spoil.__name__ for spoil, _ in BROKEN])
def test_it_is_found(rig: Rig, spoil: Callable[[Core], None], number: str) -> None:
    spoil(rig.master.core)
    with pytest.raises((InvariantBroken, AssertionError), match=number):
        rig.master.check_invariants()


def moving() -> tuple[Rig, Move]:
    """A pool that moves sealed pages to a drive."""
    made = Rig(Tunables(nvme_admission="none"))
    made.checks = False
    made.add_worker(nvme_chunks=1)
    made.open_namespace().put(SEALED_KEYS)
    made.holds_commands = True
    core = made.master.core
    run = the_run(core)
    drive = core.segments["w1-nvme"]
    moves.start(core, moves.MoveKind.DEMOTE, run, run.copies[0], range(len(run)), drive)
    made.tick()
    made.master.check_invariants()
    (move,) = core.moves.in_flight.values()
    return made, move


@pytest.mark.parametrize(
    ("field", "value", "number"), [("moves", 0, "I7"), ("size_bytes", 1, "I7")]
)
def test_a_lane_that_counts_wrongly_is_found(field: str, value: int, number: str) -> None:
    rig, move = moving()
    setattr(move.lanes[0], field, value)
    with pytest.raises(InvariantBroken, match=number):
        rig.master.check_invariants()


@pytest.mark.parametrize("what", ["run", "segment"])
def test_a_copy_that_reads_what_is_not_leased_is_found(what: str) -> None:
    rig, _ = moving()
    rig.add_worker("w2")
    core = rig.master.core
    run = the_run(core)
    moves.start(core, moves.MoveKind.COPY, run, run.copies[0], range(1), core.segments["w2-dram"])
    rig.tick()
    if what == "run":
        run.read_until_s = rig.now
    else:
        run.copies[0].segment.leased_until_s = rig.now
    with pytest.raises(InvariantBroken, match="I35"):
        rig.master.check_invariants()


def test_a_lease_that_nobody_has_is_found() -> None:
    rig, _ = moving()
    the_run(rig.master.core).leased_until_s = rig.now + 1.0
    with pytest.raises(InvariantBroken, match="I9"):
        rig.master.check_invariants()


def test_a_move_that_nobody_was_asked_for_is_found() -> None:
    rig, move = moving()
    rig.master.core.moves.in_flight.clear()
    (lane,) = move.lanes
    lane.moves = lane.size_bytes = 0
    with pytest.raises(InvariantBroken, match="I18"):
        rig.master.check_invariants()


def test_a_move_of_what_was_not_sealed_is_found() -> None:
    rig, move = moving()
    move.plan.checksums = bytes(len(move.plan.checksums))
    with pytest.raises(InvariantBroken, match="I3"):
        rig.master.check_invariants()


def test_copies_that_are_not_fastest_first_are_found() -> None:
    rig, move = moving()
    rig.obey_all()
    run = the_run(rig.master.core)
    assert [copy.segment.id for copy in run.copies] == ["w1-dram", "w1-nvme"]
    run.copies = run.copies[::-1]
    with pytest.raises(InvariantBroken, match="I16"):
        rig.master.check_invariants()
    assert not move.plan.open
