"""What happens to tickets: the only way in which one changes, and what becomes of what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import Fenced, IllegalTransition, UnknownTicket
from master.decode_places import note_end
from master.part_waits import answer
from master.pinning import let_expire
from master.retiring import retire_pages
from master.tickets import HOLDING, LIVE, TICKET_TRANSITIONS, TicketEvent

if TYPE_CHECKING:
    from master.core import Core
    from master.namespaces import KnownNamespace
    from master.sessions import Caller
    from master.tickets import Ticket


def require(ticket: Ticket, event: TicketEvent) -> None:
    """Fenced unless this may happen to a ticket now; peers may always ask too late."""
    if (ticket.state, event) not in TICKET_TRANSITIONS:
        raise Fenced(f"ticket {ticket.id} is {ticket.state}: {event} comes too late")


def change(core: Core, ticket: Ticket, event: TicketEvent, **values: object) -> None:
    """Let something happen to a ticket, with new values of its fields; pins and sums follow (I39).

    IllegalTransition, which is our own bug, where the table has no such row.
    """
    after = TICKET_TRANSITIONS.get((ticket.state, event))
    if after is None:
        raise IllegalTransition(f"ticket {ticket.id}", ticket.state, event)
    note_end(core, ticket, event)
    core.tickets.withdraw(ticket)
    ticket.state = after
    for name, value in values.items():
        setattr(ticket, name, value)
    core.tickets.enter(ticket)
    hold(core, ticket)
    if ticket.parts_wait is not None and event is not TicketEvent.GROWN:
        answer(core, ticket.parts_wait)
    if event is not TicketEvent.GROWN:
        core.counters[f"tickets_{event.name.lower()}"] += 1
    if after not in LIVE and ticket.wait is not None:
        wait = ticket.wait
        core.tickets.unpark(wait)
        core.refuse(wait.caller, UnknownTicket(f"ticket {ticket.id} is {after}"))


def hold(core: Core, ticket: Ticket) -> None:
    """Pin what the ticket is to hold in its state, and nothing else; a tail goes with its pin."""
    wanted: tuple[tuple[KnownNamespace, bytes], ...] = ()
    if ticket.state in HOLDING:
        wanted = ((ticket.known, ticket.keys),)
        if ticket.tail is not None:
            wanted += ((ticket.tail.known, ticket.tail.key),)
    before, pins = ticket.held, core.pins.tickets
    if wanted == before:
        return
    for known, keys in wanted:
        pins.hold(known.ordinal, keys)
    ticket.held = wanted
    for known, keys in before:
        pins.let_go(known.ordinal, keys)
        if (known, keys) in wanted:
            continue
        if known is not ticket.known:
            _remove_tail(core, known, keys)
        let_expire(core, known, [keys])


def _remove_tail(core: Core, known: KnownNamespace, key: bytes) -> None:
    """Nobody will ask for it; where it is being put, or not found, its TTL ends it."""
    run = known.tree.get(key)
    if run is not None and not run.plans:
        retire_pages(core, known.tree, run, run.page_of(key), 1)


def require_ticket(core: Core, caller: Caller, ticket: int) -> Ticket:
    """The caller's ticket; UnknownTicket where there is none, AccessDenied to another tenant."""
    found = core.tickets.find(ticket)
    if found is None:
        raise UnknownTicket(f"ticket {ticket} has ended, or was not presented to this master")
    caller.session.must_own(found.known.namespace.content)
    return found
