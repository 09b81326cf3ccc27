"""Which inference workers change their role, so that a fleet computes and generates alike.

Looked at when a worker beats, once in LOOK_S: whose role is short of workers, by the policy of
roles. One worker of a fleet is asked at a time, of those that offered it; it is told with its
beats until it leaves, and gets nothing new meanwhile. It hands over what it has as any worker that
leaves does, so that nothing here touches a ticket. None of this is stored: a new master lets
everybody be for as long as after a change.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from master.fleets import DECODE, PREFILL, Turn
from policies.roles.protocol import Crew, Want
from policies.routing.estimates import UNMEASURED_TOKENS_PER_S

if TYPE_CHECKING:
    from master.core import Core
    from master.fleets import Fleet, FleetWorker

LOOK_S: Final = 1.0
BUSY_WEIGHT: Final = 0.1
"""Of the latest look in how many compute lately."""
TURN_S: Final = 120.0
"""Who has not come back in the other role by then is let be."""


def look(core: Core, fleet: Fleet) -> None:
    """Ask a worker to change, if the policy has wanted that for long enough."""
    policy, roles, now_s = core.roles.policy, fleet.roles, core.now
    if not policy.acts:  # an operator may have thought better of it
        roles.turn = None
    if not policy.measures or now_s < roles.look_at_s:
        return
    roles.look_at_s = now_s + LOOK_S
    if roles.turn is not None and now_s > roles.turn.asked_s + TURN_S:
        roles.turn = None
    crew = _crew(core, fleet)
    want = policy.wanted(crew) if roles.turn is None else None
    if want is not roles.want:
        roles.want, roles.want_s = want, now_s
    if want is None or now_s < roles.want_s + policy.lasting_s:
        return
    worker = _spared(fleet, DECODE if want is Want.PREFILL else PREFILL)
    if worker is None:
        return
    roles.want, roles.changed_s = None, now_s
    core.counters[f"roles_{'wanted' if policy.acts else 'observed'}_{want}"] += 1
    if policy.acts:
        roles.turn = Turn(worker, want, now_s)
        core.note(f"inference worker {worker.name} is to change to {want}")


def joined(core: Core, worker: FleetWorker) -> None:
    """Who was asked has come back: whatever its role is now, that was it."""
    roles = worker.fleet.roles
    if roles.turn is None or roles.turn.worker.name != worker.name:
        return
    if worker.wish.role == roles.turn.role:
        core.counters[f"roles_changed_{worker.wish.role}"] += 1
    roles.turn, roles.changed_s = None, core.now


def _crew(core: Core, fleet: Fleet) -> Crew:
    """The state of all who take requests, and how busy they were lately."""
    roles = fleet.roles
    computing = [worker for worker in fleet.workers.values() if worker.prefills]
    working = sum(worker.queued_tokens > 0 for worker in computing)
    roles.busy += BUSY_WEIGHT * (working / max(1, len(computing)) - roles.busy)
    speed = sum(worker.tokens_per_s or UNMEASURED_TOKENS_PER_S for worker in computing)
    return Crew(
        sum(worker.wish.role == PREFILL for worker in computing),
        sum(worker.wish.role == DECODE for worker in fleet.decoders()),
        sum(worker.queued_tokens for worker in computing) / speed if speed else inf,
        roles.busy,
        _load(fleet),
        core.now - max(roles.changed_s, core.started_s),
    )


def _load(fleet: Fleet) -> float:
    """What is generated, and what could be: a prompt that is computed waits for nothing else."""
    decoders = fleet.decoders()
    rows = sum(worker.wish.batch_max for worker in decoders)
    if not rows:
        return inf
    used_tokens = sum(worker.used_tokens + worker.strange_tokens for worker in decoders)
    running = sum(len(worker.tickets) for worker in decoders)
    tokens = (used_tokens + fleet.waiting_tokens) / fleet.capacity_tokens
    return max(tokens, (running + len(fleet.waiting)) / rows)


def _spared(fleet: Fleet, role: str) -> FleetWorker | None:
    """Who has least to hand over, of those of this role that offered to change."""
    able = [w for w in fleet.workers.values() if w.is_open and w.wish.role == role]
    offered = [worker for worker in able if worker.wish.switches]
    return min(offered, key=lambda w: (w.used_tokens, w.queued_tokens, w.name), default=None)
