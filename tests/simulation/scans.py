"""Checks that look at everything: both cores' own, and master against workers' memory.

Run every so many steps, and when all has come to rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.limits import put_timeout_s
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from tests.simulation import master_view

if TYPE_CHECKING:
    from kvstore.record import Record
    from master.segments import Segment
    from tests.simulation.checks import Checks
    from tests.simulation.master_view import Slot
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.store import SegmentStore

OWNER_GRACE_S: Final = put_timeout_s(1 << 20) + 1.0
"""A dead client's plans are gone after this, also where nobody noticed its death (I18)."""


def scan(checks: Checks) -> None:
    """Everything that must hold at any moment."""
    checks.world.counts["scans"] += 1
    for worker in checks.workers.values():
        if worker.core is not None:
            worker.core.check_invariants()
    records = {name: memory.all_records() for name, memory in checks.memories.items()}
    for name, memory in checks.memories.items():
        _records_are_disjoint(checks, memory, records[name])
    for each in checks.masters.values():
        if each.core is not None:
            each.core.check_invariants()
    master = checks.leader
    if master is None:
        return
    for segment in master_view.live_segments(master):
        memory = checks.memories[segment.id]
        if memory.incarnation == segment.incarnation:
            _agrees(checks, segment, memory, records[segment.id])
    _nothing_of_the_dead(checks, master)
    checks.moves.scan(master)
    checks.leases.forget_ended(checks.world.now)


def _records_are_disjoint(checks: Checks, memory: SegmentStore, records: list[Record]) -> None:
    """I5, and I4: sealed bytes are right as long as they are sealed."""
    end = 0
    for record in sorted(records, key=lambda each: each.offset):
        if record.offset < end:
            checks.fail("I5", f"records overlap in {memory.segment} at {record.offset}")
        end = record.offset + record.size_class
        if record.state is RecordState.SEALED and record.offset not in memory.damaged:
            checks.holds_right_bytes(memory, record)


def _agrees(checks: Checks, segment: Segment, memory: SegmentStore, found: list[Record]) -> None:
    """What the master takes for free is free, what it takes for sealed is sealed (I3, I5, I12)."""
    held = {slot.offset: slot for slot in master_view.slots(segment)}
    records = {record.offset: record for record in found}
    for offset, record in records.items():
        slot = held.get(offset)
        if offset in memory.damaged or not memory.is_writable:
            continue  # what a disk that takes no writes still holds can be neither freed nor reused
        if slot is None or slot.size_class != record.size_class:
            checks.fail("I12", f"{segment.id}+{offset} is free for the master, and holds {record}")
        elif slot.state is ExtentState.RESERVED and record.generation != slot.generation:
            checks.fail("I6", f"{segment.id}+{offset} is reserved as {slot}, and holds {record}")
    for offset, slot in held.items():
        if slot.state is ExtentState.SEALED and offset not in memory.damaged:
            _is_sealed(checks, memory, slot)
    seen: set[tuple[bytes, int, int]] = set()
    for offset, slot in held.items():
        there = records.get(offset)
        if slot.state is ExtentState.SEALED and there is not None:
            page = (slot.key, slot.namespace, there.part)
            if page in seen:
                checks.fail("I14", f"two replicas of {slot.key[:4].hex()} in {segment.id}")
            seen.add(page)


def _is_sealed(checks: Checks, memory: SegmentStore, slot: Slot) -> None:
    record = memory.record(slot.offset, slot.size_class)
    if (
        record is None
        or record.state is not RecordState.SEALED
        or (record.key, record.generation) != (slot.key, slot.generation)
    ):
        checks.fail("I3", f"{slot} is sealed for the master, and holds {record}")


def _nothing_of_the_dead(checks: Checks, master: SimMaster) -> None:
    """I18: what a dead client held is gone."""
    core = master_view.core_of(master)
    status = checks.world.nodes[master.name]
    assert master.term is not None
    if checks.world.now >= master.term.until_s:
        return  # it may do nothing before its lease is renewed
    for plan in core.plans.values():
        died_s = checks.dead_owners.get(master_view.owner_token(plan))
        if died_s is None:
            continue
        noticed_s = max(died_s, plan.put.progress_s, status.woken_s, master.term.sure_since_s)
        if not status.paused and checks.world.now > noticed_s + OWNER_GRACE_S:
            checks.fail("I18", f"{plan} of a client that died at {died_s:.3f}")


def at_rest(checks: Checks) -> list[str]:
    """What is still under way although nothing happens any more; empty when all is well."""
    master = checks.leader
    if master is None:
        return ["nobody leads"]
    core = master_view.core_of(master)
    left: list[str] = []
    if core.plans:
        left.append(f"I18: open plans {list(core.plans.values())}")
    if core.moves.in_flight:
        left.append(f"I18: moves under way {list(core.moves.in_flight.values())}")
    if core.relocations.open:
        left.append(f"I18: relocations {list(core.relocations.open.values())}")
    if len(core.waiting):
        left.append(f"I18: {len(core.waiting)} puts wait")
    for segment in core.segments.values():
        if not segment.takes_orders:
            left.append(f"{segment.id} is {segment.state.value}, session {segment.session}")
        by_state = segment.allocator.bytes_in
        left += [
            f"I17: {by_state[state]} bytes of {segment.id} are {state.name}"
            for state in (ExtentState.QUARANTINED, ExtentState.RETIRED, ExtentState.RESERVED)
            if by_state[state]
        ]
        if segment.held:
            left.append(f"held in {segment.id}: {segment.held}")
    if len(core.tombstones):
        left.append(f"tombstones: {list(core.tombstones)}")
    if len(core.replication.queue):
        left.append(f"I34: replicas are too few or too many: {list(core.replication.queue)}")
    if core.replication.scans or core.replication.census.is_running:
        left.append(f"I34: scans are due at {core.replication.scans}")
    if checks.tickets is not None:
        left += checks.tickets.at_rest(master)
    for worker in checks.workers.values():
        if worker.core is None:
            left.append(f"{worker.name} is down")
            continue
        holdings, pulls = worker.core.holdings, worker.core.pulls
        for name, what in (
            ("works", holdings.works),
            ("held", holdings.held),
            ("waiting", pulls.waiting),
            ("reports", pulls.reports),
            ("unreported", pulls.unreported),
            ("commands", worker.core.commands.open),
        ):
            if what:
                left.append(f"I18: {worker.name} has {name}: {what}")
    return left
