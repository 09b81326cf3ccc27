"""After decode workers have failed a request one worker does all that is left of it, by the policy.

What it is handed is the prompt alone; what the pool has of its pages it finds as with any prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import Fenced
from master.admitting import Asked, Refused, choose_prefill, find, name_worker, opened
from master.fleet_membership import unroute
from master.ticket_changes import change, require, require_ticket
from master.tickets import ROUTES, TicketEvent

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import RunAlone
    from master.admitting import Choice
    from master.core import Core
    from master.sessions import Caller
    from master.tickets import Ticket


def run_alone(core: Core, caller: Caller, message: RunAlone) -> None:
    """Answer TicketOpened with who does all of it, by the policy; Fenced: it is routed anew.

    The route has failed, as when AwaitRoute names it: its claim is fenced (I40).
    """
    ticket = require_ticket(core, caller, message.ticket)
    if message.route != ticket.route:
        raise Fenced(f"ticket {ticket.id}: route {message.route} is not the present one")
    if ticket.alone:  # said before
        core.reply(caller, opened(ticket))
        return
    if ticket.state in ROUTES:
        unroute(core, ticket)
    require(ticket, TicketEvent.ALONE)
    found, failures = find(core, ticket.known, ticket.wish.keys), ticket.routes - ticket.sheds
    asked = Asked(ticket, found, failed_routes=failures)
    choice = _choose_alone(core, ticket, asked)
    values: dict[str, object] = {"keys": ticket.wish.keys, "tail": None, "tokens": ()}
    values |= {"staged_bytes": 0, "is_nearly_done": False}
    change(core, ticket, TicketEvent.ALONE, **values, **choice.fields())
    name_worker(core, choice)
    core.reply(caller, opened(ticket))


def _choose_alone(core: Core, ticket: Ticket, asked: Asked) -> Choice:
    try:
        choice = choose_prefill(core, ticket.fleet, asked)
    except Refused as refusal:
        raise Fenced(f"ticket {ticket.id}: {refusal.answer.text}") from refusal
    if choice.alone is None:
        raise Fenced(f"ticket {ticket.id}: it is handed over again")
    return choice
