"""Full checks of what the master does about replicas (I33, I34). Test and idle use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvariantBroken
from master import replica_counts
from master.awaited import WAITS_MAX
from master.census import repairable
from master.moves import MoveKind
from master.packed import split_keys
from master.plans import OPEN
from master.repair_queue import NEEDS_MAX
from master.wheel import NOWHERE

if TYPE_CHECKING:
    from master.core import Core


def check_replicas(core: Core) -> None:
    """Raise InvariantBroken, naming the invariant, when the state contradicts itself."""
    _check_bounds(core)
    _check_places(core)
    if not _scan_comes(core):
        _check_noted(core)


def _check_bounds(core: Core) -> None:
    """The queue is bounded, and everything in it is looked at some time (I7)."""
    state = core.replication
    if len(state.queue) > NEEDS_MAX or len(state.awaited) > WAITS_MAX:
        raise InvariantBroken(f"I7: {len(state.queue)} needs, {len(state.awaited)} waits")
    for need in state.queue:
        if (need.bucket == NOWHERE) is (need.rank < 0):
            raise InvariantBroken(f"I34: {need} is neither ready nor waits, or both")


def _check_places(core: Core) -> None:
    """No two copies of one page are on their way to one domain (I33)."""
    found: set[tuple[int, int, bytes, str]] = set()
    for move in core.moves.in_flight.values():
        plan = move.plan
        if move.kind is MoveKind.COPY:
            place = replica_counts.domain(core, plan.segment)
            for page, key in enumerate(split_keys(plan.keys)):
                if plan.states[page] == OPEN:
                    copy = plan.namespace, plan.part, key, place
                    if copy in found:
                        raise InvariantBroken(f"I33: a page is copied to {place} twice")
                    found.add(copy)


def _scan_comes(core: Core) -> bool:
    state = core.replication
    return bool(state.scans) or state.queue.is_cut or state.census.is_running


def _check_noted(core: Core) -> None:
    """What may have another replica is noted, or thinned out, or will be by a plan's end (I34)."""
    noted: dict[int, set[bytes]] = {}
    for need in core.replication.queue:
        noted.setdefault(need.namespace, set()).update(split_keys(need.keys))
    for known in core.namespaces:
        there = noted.get(known.ordinal, set())
        for run in known.tree.all_runs():
            if run.thinned or run.plans:
                continue
            lacking = repairable(core, known.tree, run, replica_counts.wanted(core, run))
            forgotten = [run.key(page) for page, each in enumerate(lacking) if each]
            if not there.issuperset(forgotten):
                raise InvariantBroken(
                    f"I34: {len(forgotten)} pages lack replicas, and are forgotten"
                )
