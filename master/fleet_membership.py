"""Inference workers join, beat, leave and fall silent; beats say what really runs.

A beat reconciles: what is not a worker's any more it is told to stop, what it no longer names is
over, and what holds more tokens than were expected takes more credit.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.require import require_text
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import FleetJoined, FleetNoted
from master import roles, room
from master.fleets import PREFILL, ROLES, FleetWorker
from master.ticket_changes import change
from master.tickets import CLAIMS, ROUTES, TICKET_TRANSITIONS, TicketEvent, TicketState

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import FleetBeat, JoinFleet, LeaveFleet, Running
    from master.core import Core
    from master.namespaces import KnownNamespace
    from master.sessions import Caller
    from master.tickets import Ticket

LOST_PER_TICK: Final = 1
MISSED_MAX: Final = 2
"""Beats in a row that do not name a ticket: it is over."""
FAILED_MAX: Final = 16
"""Decode workers that a ticket remembers as those that did not do it."""
TOKENS_MAX: Final = 1 << 40
SPEED_KEPT: Final = 0.99
"""Of the best speed at prompts, from one beat to the next: half of it after 35 s."""


def own_namespace(core: Core, caller: Caller, namespace: bytes) -> KnownNamespace:
    """One with pages of tokens that the caller may use; BadValue, AccessDenied otherwise."""
    known = core.namespaces.get(namespace)
    caller.session.must_own(known.namespace.content)
    if known.namespace.is_opaque:
        raise BadValue("namespace", namespace.hex(), "one of pages, not of named objects")
    return known


def join_fleet(core: Core, caller: Caller, message: JoinFleet) -> None:
    """Answer FleetJoined. A repetition changes what is told; another process is another life."""
    known = own_namespace(core, caller, message.namespace)
    _check_wish(message)
    fleets, owner = core.tickets.fleets, caller.session.owner.key
    found = fleets.find(known)
    worker = None if found is None else found.workers.get(message.worker)
    if worker is None:
        fleets.require_room()
    fleet = fleets.of(known)
    if worker is None or worker.owner not in {None, owner}:
        life = core.tickets.new_number()
        joined = FleetWorker(message.worker, fleet, life, owner, message, core.now)
        fleets.add(joined)
        if worker is not None:
            lose(core, worker)
        worker = joined
    elif worker.owner is None:
        worker.life, worker.owner = core.tickets.new_number(), owner
    worker.wish = message
    fleets.heard(worker, core.now)
    roles.joined(core, worker)
    room.settle(core.tickets, fleet)
    core.tickets.look_at(fleet)
    times = limits.FLEET_BEAT_S, limits.FLEET_LOST_AFTER_S
    core.reply(caller, FleetJoined(worker.life, *times))


def _check_wish(message: JoinFleet) -> None:
    for field in ("worker", "where", "host", "rack", "zone"):
        require_text(field, getattr(message, field))
    for field in ("worker", "where"):
        if not getattr(message, field):
            raise BadValue(field, "", "a name")
    if message.role not in ROLES:
        raise BadValue("role", message.role, f"one of {', '.join(ROLES)}")
    least = int(message.role != PREFILL)
    # Who ran more could not name all in a beat; and what one runs is what its loss takes (I27).
    for field, most in (("capacity_tokens", TOKENS_MAX), ("batch_max", limits.FLEET_RUNNING_MAX)):
        value = getattr(message, field)
        if not least <= value <= most:
            raise BadValue(field, value, f"{least} to {most}")
    if len(message.adapters) > limits.FLEET_ADAPTERS_MAX:
        want = f"at most {limits.FLEET_ADAPTERS_MAX}"
        raise BadValue("adapters", len(message.adapters), want)
    for adapter in message.adapters:
        require_text("adapters", adapter)


def fleet_beat(core: Core, caller: Caller, message: FleetBeat) -> None:
    """Answer FleetNoted: which of the tickets named are not this worker's any more."""
    known = own_namespace(core, caller, message.namespace)
    worker = core.tickets.fleets.worker(known, message.worker, message.life)
    _check_beat(message)
    core.tickets.fleets.heard(worker, core.now)
    before, turn = _open_room(worker), worker.fleet.roles.turn
    takes = worker.decodes
    worker.beat, worker.given_tokens = message, 0
    worker.tokens_per_s = max(message.tokens_per_s, worker.tokens_per_s * SPEED_KEPT)
    fenced: list[int] = []
    named: set[int] = set()
    strange_tokens = strange_tickets = 0
    for each in message.running:
        ticket = core.tickets.find(each.ticket)
        if ticket is not None and _runs(ticket, worker, each):
            named.add(ticket.id)
            grow(core, ticket, each.tokens)
        elif ticket is None and in_grace(core, each.ticket):
            strange_tokens += each.tokens
            strange_tickets += 1
        else:
            fenced.append(each.ticket)
    worker.strange_tokens, worker.strange_tickets = strange_tokens, strange_tickets
    _end_missing(core, worker, named)
    roles.look(core, worker.fleet)
    if worker.decodes != takes or worker.fleet.roles.turn is not turn:
        room.settle(core.tickets, worker.fleet)
    if _open_room(worker) != before:
        core.tickets.look_at(worker.fleet)
    core.reply(caller, FleetNoted(tuple(fenced), worker.wanted_role))


def _open_room(worker: FleetWorker) -> tuple[bool, int, int]:
    """What it has for tickets that wait."""
    return worker.decodes, worker.free_tokens, worker.free_places


def _runs(ticket: Ticket, worker: FleetWorker, each: Running) -> bool:
    is_its = ticket.slot is worker and ticket.token == each.token
    if ticket.slot is None and not each.token:  # run alone since before this master
        is_its = ticket.prefill == worker.name
    return is_its and (ticket.state, TicketEvent.GROWN) in TICKET_TRANSITIONS


def _check_beat(message: FleetBeat) -> None:
    if not 0 <= message.queued_tokens <= TOKENS_MAX:
        raise BadValue("queued_tokens", message.queued_tokens, f"0 to {TOKENS_MAX}")
    for field in ("tokens_per_s", "step_s", "link_bytes_per_s", "rtt_s"):
        value = getattr(message, field)
        if not (isfinite(value) and value >= 0):
            raise BadValue(field, value, "a number, at least 0")
    if len(message.running) > limits.FLEET_RUNNING_MAX:
        most = f"at most {limits.FLEET_RUNNING_MAX} tickets"
        raise BadValue("running", len(message.running), most)
    for each in message.running:
        if not 0 <= each.tokens <= TOKENS_MAX:
            raise BadValue("running.tokens", each.tokens, f"0 to {TOKENS_MAX}")


def grow(core: Core, ticket: Ticket, tokens: int) -> None:
    """It holds so many tokens: credit that was too small is what they are (predictions err)."""
    is_whole = ticket.state is TicketState.INSTALLED or bool(ticket.alone)
    ticket.missed, ticket.is_confirmed = 0, is_whole
    if tokens > ticket.credit_tokens:
        change(core, ticket, TicketEvent.GROWN, credit_tokens=tokens)


def in_grace(core: Core, number: int) -> bool:
    """Whether an earlier master gave out this number and somebody may still present it."""
    is_earlier = 0 < number >> 32 < core.epoch
    return is_earlier and core.now < core.started_s + limits.TICKET_GRACE_S


def _end_missing(core: Core, worker: FleetWorker, named: set[int]) -> None:
    """What a worker has not named in two beats: it has finished it, or never got it in.

    One that was to run all of it may not have begun: it counts once it was named.
    """
    for number in [each for each in worker.tickets if each not in named]:
        ticket = core.tickets.find(number)
        assert ticket is not None, number
        runs_alone = bool(ticket.alone) and ticket.is_confirmed
        if not (runs_alone or ticket.state in CLAIMS):
            continue
        ticket.missed += 1
        if ticket.missed < MISSED_MAX:
            continue
        if ticket.is_confirmed:
            change(core, ticket, TicketEvent.FINISHED)
        else:
            unroute(core, ticket)


def leave_fleet(core: Core, caller: Caller, message: LeaveFleet) -> None:
    """Answer Done; what it had is routed anew."""
    known = own_namespace(core, caller, message.namespace)
    lose(core, core.tickets.fleets.worker(known, message.worker, message.life))
    core.reply(caller, Done())


def lose_silent(core: Core) -> None:
    """Give up those that have not been heard of for too long."""
    for worker in core.tickets.fleets.silence.take_due(core.now, LOST_PER_TICK):
        core.counters["fleet_workers_lost"] += 1
        core.note(f"inference worker {worker.name} is lost")
        lose(core, worker)


def lose(core: Core, worker: FleetWorker) -> None:
    """It has nothing any more (I41): its tickets are routed anew, or computed by somebody else.

    Those of which somebody may be reading the answer find room before those that it was kept for.
    """
    core.tickets.fleets.take_out(worker)
    with room.found_at_once(worker.fleet):
        for number in list(worker.tickets):
            ticket = core.tickets.find(number)
            assert ticket is not None, number
            if ticket.state in ROUTES:
                unroute(core, ticket)
            else:  # it was to run all of it: others would have to stage it
                event, staged = TicketEvent.PREFILL_FAILED, ticket.staging()
                change(core, ticket, event, slot=None, alone="", staged_bytes=staged)
        room.keep_anew(core.tickets, worker.fleet, worker.kept)


def unroute(
    core: Core, ticket: Ticket, event: TicketEvent = TicketEvent.UNROUTED, **more: object
) -> None:
    """Whoever has it has it no longer (I40); it waits for another, without a new prefill."""
    assert ticket.slot is not None, ticket.id
    failed = (*ticket.failed, ticket.slot.name)[-FAILED_MAX:]
    values = {"slot": None, "token": 0, "is_confirmed": False, "failed": failed}
    change(core, ticket, event, missed=0, ready_s=core.now, **values, **more)
