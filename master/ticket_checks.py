"""Full checks of tickets against what they take (I39 to I44). Test and idle use, as invariants."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.ids import KEY_BYTES
from master import room
from master.packed import split_keys
from master.tickets import CLAIMS, HOLDING, LIVE, MOVING, ROUTES, TicketState
from master.wheel import NOWHERE

if TYPE_CHECKING:
    from master.core import Core
    from master.fleets import Fleet
    from master.tickets import Ticket


def check_tickets(core: Core) -> None:
    """Raise InvariantBroken, naming the invariant, when tickets and sums contradict each other."""
    tickets = core.tickets.all()
    if len(tickets) > limits.TICKETS_MAX:
        raise InvariantBroken(f"I7: {len(tickets)} tickets are open")
    for ticket in tickets:
        _check_ticket(core, ticket)
    core.tickets.gateways.check((ticket.id for ticket in tickets), core.owners)
    _check_pins(core, tickets)
    staged = sum(ticket.staged_bytes for ticket in tickets if ticket.state in HOLDING)
    if core.tickets.staged_bytes != staged:
        raise InvariantBroken(f"I39: {core.tickets.staged_bytes} bytes are staged, not {staged}")
    sources: Counter[str] = Counter()
    for ticket in tickets:
        if ticket.state in MOVING:
            sources[ticket.host] += ticket.kv_bytes
    if core.tickets.source_bytes != sources:
        raise InvariantBroken(f"I39: {core.tickets.source_bytes} are on their way, not {sources}")
    for fleet in {id(each.fleet): each.fleet for each in tickets}.values():
        if fleet not in list(core.tickets.fleets):
            raise InvariantBroken("I39: a ticket of a fleet that was forgotten")
    for fleet in core.tickets.fleets:
        _check_fleet(fleet, [ticket for ticket in tickets if ticket.fleet is fleet])


def _check_ticket(core: Core, ticket: Ticket) -> None:
    name, state, slot = f"ticket {ticket.id}", ticket.state, ticket.slot
    if state not in LIVE or ticket.bucket == NOWHERE:
        raise InvariantBroken(f"I18: {name} is {state} and never ends")
    for wait in (ticket.wait, ticket.parts_wait):
        if wait is not None and wait.caller.session.id not in core.sessions:
            raise InvariantBroken(f"I18: nobody waits any more for {name}")
    if ticket.parts_wait is not None and state is not TicketState.CLAIMED_AHEAD:
        raise InvariantBroken(f"I40: {name} is {state}, and parts of it are waited for")
    if (ticket.id in ticket.fleet.waiting) != ticket.wants_route:
        raise InvariantBroken(f"I39: {name} is {state} and is routed or forgotten")
    if (slot is not None) != (state in ROUTES or bool(ticket.alone)):
        raise InvariantBroken(f"I41: {name} is {state}, and its slot is not")
    if slot is not None and ticket.fleet.workers.get(slot.name) is not slot:
        raise InvariantBroken(f"I41: {name} has a slot on {slot.name}, which has gone")
    if bool(ticket.token) != (state in CLAIMS):
        raise InvariantBroken(f"I40: {name} is {state}, and its claim is not")
    if core.tickets.of_request(ticket.tenant, ticket.wish.request) is not ticket:
        raise InvariantBroken(f"I42: {name} is not the one of its request")


def _check_pins(core: Core, tickets: list[Ticket]) -> None:
    wanted: Counter[tuple[int, bytes]] = Counter()
    for ticket in tickets:
        if ticket.state in HOLDING:
            ordinal = ticket.known.ordinal
            wanted.update((ordinal, key) for key in split_keys(ticket.keys))
            if ticket.tail is not None:
                wanted[ticket.tail.known.ordinal, ticket.tail.key] += 1
    held = {
        (known.ordinal, key): count
        for known in core.namespaces
        for key, count in core.pins.tickets.of(known.ordinal).items()
    }
    if held != wanted or core.pins.tickets.pages != wanted.total():
        raise InvariantBroken(f"I39: {len(held)} pages are held by tickets, {len(wanted)} wanted")


def _check_fleet(fleet: Fleet, tickets: list[Ticket]) -> None:
    credit = sum(ticket.credit_tokens for ticket in tickets)
    if (fleet.credit_tokens, fleet.tickets) != (credit, len(tickets)):
        raise InvariantBroken(f"I39: {fleet.credit_tokens} tokens of credit, not {credit}")
    if fleet.answer_tokens != sum(ticket.wish.new_tokens for ticket in tickets):
        raise InvariantBroken(f"I39: {fleet.answer_tokens} tokens of answers are expected")
    waiting = sum(ticket.credit_tokens for ticket in tickets if ticket.wants_route)
    if fleet.waiting_tokens != waiting:
        raise InvariantBroken(f"I39: {fleet.waiting_tokens} tokens wait, not {waiting}")
    room.check(fleet, tickets)
    for worker in fleet.workers.values():
        mine = [ticket for ticket in tickets if ticket.slot is worker]
        counted = worker.used_tokens, worker.link_bytes, set(worker.tickets)
        used = sum(ticket.credit_tokens for ticket in mine)
        moving = sum(ticket.kv_bytes for ticket in mine if ticket.state in MOVING)
        if counted != (used, moving, {ticket.id for ticket in mine}):
            raise InvariantBroken(f"I39: {worker.name} counts {counted[:2]}, not {used, moving}")
        if worker.prefixes != Counter(ticket.keys[:KEY_BYTES] for ticket in mine):
            raise InvariantBroken(f"I39: {worker.name} counts prefixes wrongly")
        if worker.bucket == NOWHERE:
            raise InvariantBroken(f"I18: {worker.name} is never given up")
