"""Tickets of an earlier master, presented by whoever holds them, for as long as the grace lasts.

Nothing of a ticket is stored. What is presented counts as it would have here; the decode worker
that is said to have it is waited for as if it had just been heard of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from kvstore import limits
from kvstore.errors import AccessDenied, OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.require import require_text
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import JoinFleet, OpenTicket, Term
from master.admitting import check_wish
from master.fleet_membership import in_grace
from master.fleets import BOTH, FleetWorker
from master.handing_over import check_pages, stage
from master.ticket_changes import change, hold
from master.tickets import Ticket, TicketEvent, TicketState

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import GetTerm, PresentTicket
    from master.core import Core
    from master.fleets import Fleet
    from master.namespaces import KnownNamespace
    from master.sessions import Caller
    from master.tickets import Tail


def get_term(core: Core, caller: Caller, _message: GetTerm) -> None:
    """Answer Term; unlike Status it costs nothing."""
    core.reply(caller, Term(core.epoch))


def present_ticket(core: Core, caller: Caller, message: PresentTicket) -> None:
    """Answer Done; AccessDenied when it is too late, or somebody has presented a later claim.

    Presented again with tokens, one that was being computed is staged: the master before was told.
    """
    require_text("worker", message.worker)
    wish = OpenTicket(
        message.namespace, message.request, message.keys, message.prompt_tokens,
        message.new_tokens, message.first_token_s, message.deadline_s, message.adapter,
    )  # fmt: skip
    known = check_wish(core, caller, wish)
    pages = message.prompt_tokens // known.namespace.layout.page_tokens
    wish = structs.replace(wish, keys=message.keys[: pages * KEY_BYTES])
    tenant = known.namespace.content.tenant
    _, tail = check_pages(core, tenant, message)
    if _is_new(core, tenant, message):
        core.tickets.require_room()
        core.tickets.fleets.require_room()
        if not core.pins.tickets.has_room(message.keys):
            raise OutOfSpace(f"{core.pins.tickets.pages} pages are held by tickets")
        ticket = _taken_in(core, known, wish, message, tail)
        core.tickets.add(ticket, caller.session.owner.key)
        hold(core, ticket)
        core.counters["tickets_presented"] += 1
    else:
        found = core.tickets.find(message.ticket)
        core.tickets.gateways.answers_for(caller.session.owner.key, message.ticket)
        if found is not None and found.state is TicketState.PREFILLING and message.tokens:
            stage(core, found, message.keys, tail, message.tokens)
    core.reply(caller, Done())


def _is_new(core: Core, tenant: str, message: PresentTicket) -> bool:
    """Whether it is to be taken in, instead of one with a lower claim."""
    found = core.tickets.of_request(tenant, message.request)
    if found is None:
        if core.tickets.find(message.ticket) is None and in_grace(core, message.ticket):
            return True
        raise AccessDenied(f"ticket {message.ticket}: nobody waits for it")
    if found.id != message.ticket or message.token < found.token:
        raise AccessDenied(f"ticket {message.ticket}: a later one is known of this request")
    if message.token == found.token:
        return False
    if not in_grace(core, message.token):
        raise AccessDenied(f"ticket {message.ticket}: its claim {message.token} is none of ours")
    change(core, found, TicketEvent.CANCELLED)
    return True


def _taken_in(
    core: Core, known: KnownNamespace, wish: OpenTicket, message: PresentTicket, tail: Tail | None
) -> Ticket:
    fleet = core.tickets.fleets.of(known)
    deadline_s = core.now + min(wish.deadline_s, limits.TICKET_S_MAX)
    ticket = Ticket(
        message.ticket, wish, known, fleet, core.now, deadline_s,
        max(wish.prompt_tokens + wish.new_tokens, wish.prompt_tokens + len(message.tokens) + 1),
        keys=message.keys, tokens=message.tokens, tail=tail, ready_s=core.now,
    )  # fmt: skip
    ticket.staged_bytes = ticket.staging()
    if message.token:
        ticket.state, ticket.token, ticket.tail = TicketState.INSTALLED, message.token, None
        ticket.slot = fleet.workers.get(message.worker) or _expect(core, fleet, message.worker)
    elif message.tokens:
        ticket.state = TicketState.STAGED
    else:
        ticket.state, ticket.prefill = TicketState.PREFILLING, message.worker
    return ticket


def _expect(core: Core, fleet: Fleet, name: str) -> FleetWorker:
    """It has what is presented, and is given up in time if it does not come."""
    wish = JoinFleet(fleet.known.namespace.id, name, BOTH, "", "", "", "", 0, 0)
    worker = FleetWorker(name, fleet, 0, None, wish, core.now)
    core.tickets.fleets.add(worker)
    return worker
