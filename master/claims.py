"""A decode worker claims, installs, sheds, finishes; a gateway cancels; time ends what is left.

So does the loss of a gateway: nobody else would ask for another route, or give its slot back.

Only the present claim counts (I40): its token is higher than any before, and who has an older one
is told that it is fenced.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import AccessDenied, BadValue, Fenced
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import TailRef, TicketClaimed
from master.fleet_membership import unroute
from master.gateways import GRAIN_S
from master.handing_over import check_pages
from master.ticket_changes import change, require, require_ticket
from master.tickets import TicketEvent, TicketState

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import (
        CancelTicket,
        ClaimTicket,
        FinishTicket,
        ShedTicket,
        TicketInstalled,
    )
    from master.core import Core
    from master.sessions import Caller
    from master.tickets import Ticket

EXPIRED_PER_TICK: Final = 8
GATEWAYS_PER_TICK: Final = 1


def claim_ticket(core: Core, caller: Caller, message: ClaimTicket) -> None:
    """Answer TicketClaimed, with a token above all before; whoever had it is fenced."""
    ticket = require_ticket(core, caller, message.ticket)
    worker = core.tickets.fleets.worker(ticket.known, message.worker, message.life)
    if message.route != ticket.route or ticket.slot is None:
        raise Fenced(f"ticket {ticket.id}: route {message.route} is not the present one")
    if ticket.slot is not worker:
        name = ticket.slot.name
        raise AccessDenied(f"ticket {ticket.id} is routed to {name}, not to {worker.name}")
    event = TicketEvent.CLAIMED_AHEAD if message.is_ahead else TicketEvent.CLAIMED
    require(ticket, event)
    change(core, ticket, event, token=core.tickets.new_number(), missed=0)
    tail = TailRef() if ticket.tail is None else ticket.tail.ref
    namespace = ticket.known.namespace
    answer = TicketClaimed(
        ticket.token, namespace.id, namespace.layout.page_tokens, ticket.wish.prompt_tokens,
        ticket.keys, tail, ticket.tokens,
    )  # fmt: skip
    core.reply(caller, answer)


def ticket_installed(core: Core, caller: Caller, message: TicketInstalled) -> None:
    """Answer Done; pins and staging end."""
    ticket = require_ticket(core, caller, message.ticket)
    require_claim(ticket, message.token)
    if ticket.state is not TicketState.INSTALLED:
        require(ticket, TicketEvent.INSTALLED)
        change(core, ticket, TicketEvent.INSTALLED, tail=None, is_confirmed=True)
    core.reply(caller, Done())


def require_claim(ticket: Ticket, token: int) -> None:
    """Fenced unless that is the present claim (I40)."""
    if not ticket.token or token != ticket.token:
        raise Fenced(f"ticket {ticket.id}: claim {token} is not the present one")


def shed_ticket(core: Core, caller: Caller, message: ShedTicket) -> None:
    """Answer Done; it is routed anew, with what was generated so far."""
    ticket = require_ticket(core, caller, message.ticket)
    if message.token and message.token == ticket.shed_token:  # said before
        core.reply(caller, Done())
        return
    require_claim(ticket, message.token)
    require(ticket, TicketEvent.SHED)
    keys, tail = check_pages(core, ticket.tenant, message)
    short = min(len(keys), len(ticket.wish.keys))
    if keys[:short] != ticket.wish.keys[:short]:
        raise BadValue("keys", len(keys) // KEY_BYTES, "pages of the prompt first, in order")
    if message.tokens[: len(ticket.tokens)] != ticket.tokens:
        raise BadValue("tokens", len(message.tokens), "all that were generated before, in order")
    taken = {"shed_token": message.token, "keys": keys, "tail": tail, "tokens": message.tokens}
    taken |= {"credit_tokens": _grown_tokens(ticket, len(message.tokens))}
    unroute(core, ticket, TicketEvent.SHED, sheds=ticket.sheds + 1, **taken)
    core.reply(caller, Done())


def _grown_tokens(ticket: Ticket, generated: int) -> int:
    """Credit of one that may have outgrown it; no more than anybody has, who could take it else."""
    grown = ticket.wish.prompt_tokens + generated + limits.OVERGROWN_TOKENS
    largest = max(worker.wish.capacity_tokens for worker in ticket.fleet.workers.values())
    return max(ticket.credit_tokens, min(grown, largest))


def finish_ticket(core: Core, caller: Caller, message: FinishTicket) -> None:
    """Answer Done, also where it has ended already; Fenced to all but the present claim."""
    if core.tickets.find(message.ticket) is not None:
        ticket = require_ticket(core, caller, message.ticket)
        if message.token != ticket.token:
            raise Fenced(f"ticket {ticket.id}: claim {message.token} is not the present one")
        require(ticket, TicketEvent.FINISHED)
        change(core, ticket, TicketEvent.FINISHED)
    core.reply(caller, Done())


def cancel_ticket(core: Core, caller: Caller, message: CancelTicket) -> None:
    """Answer Done, also where it has ended already."""
    if core.tickets.find(message.ticket) is not None:
        ticket = require_ticket(core, caller, message.ticket)
        change(core, ticket, TicketEvent.CANCELLED)
    core.reply(caller, Done())


def expire(core: Core) -> None:
    """End tickets whose time is up."""
    for ticket in core.tickets.deadlines.take_due(core.now, EXPIRED_PER_TICK):
        change(core, ticket, TicketEvent.EXPIRED)


def end_abandoned(core: Core) -> None:
    """Cancel what gateways had that have gone (I43); who runs any of it hears so when it beats."""
    gateways = core.tickets.gateways
    for gateway in gateways.away.take_due(core.now, GATEWAYS_PER_TICK):
        for number in list(islice(gateway.tickets, EXPIRED_PER_TICK)):
            ticket = core.tickets.find(number)
            assert ticket is not None, number
            core.counters["tickets_abandoned"] += 1
            change(core, ticket, TicketEvent.CANCELLED)
        if gateway.tickets:
            gateways.away.place(gateway, core.now - GRAIN_S)  # with the next tick, which is at once
