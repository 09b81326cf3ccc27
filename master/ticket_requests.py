"""What operators and tenants ask about tickets and inference workers, and their totals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import AccessDenied
from kvstore.wire.messages.reads import TicketTotals
from kvstore.wire.messages.tickets import FleetRow, TicketList, TicketRow
from master.admitting import staging_budget
from master.sessions import OPERATOR, WORKER
from master.tickets import HOLDING

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import ListTickets
    from master.core import Core
    from master.fleets import FleetWorker
    from master.sessions import Caller
    from master.tickets import Ticket


def list_tickets(core: Core, caller: Caller, _message: ListTickets) -> None:
    """Answer TicketList: everybody's to an operator, an engine's own tenant's to that."""
    session = caller.session
    if session.role == WORKER:
        raise AccessDenied(f"role {session.role}: this is for engines and operators")
    sees_all = session.role == OPERATOR
    tickets = [t for t in core.tickets.all() if sees_all or t.tenant == session.tenant]
    workers = [
        worker
        for fleet in core.tickets.fleets
        if sees_all or fleet.known.namespace.content.tenant == session.tenant
        for worker in fleet.workers.values()
    ]
    most = limits.TICKETS_LISTED_MAX
    rows = tuple(_ticket_row(core, ticket) for ticket in tickets[:most])
    members = tuple(_fleet_row(worker) for worker in workers[:most])
    staged, budget = core.tickets.staged_bytes, staging_budget(core)
    core.reply(caller, TicketList(len(tickets), rows, members, staged, budget))


def _ticket_row(core: Core, ticket: Ticket) -> TicketRow:
    return TicketRow(
        ticket.id, ticket.wish.request, ticket.tenant, ticket.known.namespace.content.model,
        ticket.state, ticket.prefill, "" if ticket.slot is None else ticket.slot.name,
        ticket.wish.prompt_tokens, ticket.wish.new_tokens, ticket.credit_tokens,
        ticket.staged_bytes if ticket.state in HOLDING else 0, ticket.routes,
        core.now - ticket.opened_s, ticket.deadline_s - core.now,
    )  # fmt: skip


def _fleet_row(worker: FleetWorker) -> FleetRow:
    content, wish, beat = worker.fleet.known.namespace.content, worker.wish, worker.beat
    return FleetRow(
        worker.name, content.tenant, content.model, content.revision, wish.role, worker.state,
        wish.host, 0 if beat is None else beat.queued_tokens,
        worker.used_tokens + worker.strange_tokens, wish.capacity_tokens, len(worker.tickets),
        wish.batch_max,
    )  # fmt: skip


def totals(core: Core) -> TicketTotals:
    """Of all tenants together."""
    states = Counter(str(ticket.state) for ticket in core.tickets.all())
    fleets = list(core.tickets.fleets)
    workers = Counter(worker.state for fleet in fleets for worker in fleet.workers.values())
    return TicketTotals(
        dict(states),
        dict(workers),
        sum(fleet.taken_tokens for fleet in fleets),
        sum(fleet.capacity_tokens for fleet in fleets),
        core.tickets.staged_bytes,
        staging_budget(core),
        min((fleet.first_tokens.share for fleet in fleets), default=1.0),
    )
