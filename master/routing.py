"""Phase 2: tickets get a decode worker, in batches at the next tick; callers wait for it.

A worker is chosen when the prompt is computed, or nearly so, not before, by what each has then.
Must not know how a ticket came to be that far.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.tickets import AwaitRoute, TicketRouted
from master import room
from master.admitting import find
from master.fleet_membership import unroute
from master.seconds import check_seconds
from master.ticket_changes import change, require_ticket
from master.tickets import AHEAD, ROUTES, Ticket, TicketEvent, Wait
from policies.routing.protocol import DecodeOffer, Place, Wish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.admitting import Found
    from master.core import Core
    from master.fleets import Fleet, FleetWorker
    from master.sessions import Caller

ORDERED_MAX: Final = 64
"""Waiting tickets of one fleet that are put in order at once (I27)."""
LOOKED_AT_MAX: Final = 512
"""Those that are looked at while there is room; who is behind them waits until one of them has
gone, which takes no longer than `staging_s`."""
ROUTED_PER_TICK: Final = 8
ANSWERED_PER_TICK: Final = 64


def await_route(core: Core, caller: Caller, message: AwaitRoute) -> None:
    """Answer TicketRouted once there is a route above the one that is known, or in time.

    Who names the present route says that it has failed: its claim is fenced (I40).
    """
    ticket = require_ticket(core, caller, message.ticket)
    check_seconds("timeout_s", message.timeout_s)
    if ticket.wait is not None:  # one caller a ticket: the later one has the earlier one's place
        _answer(core, ticket.wait, 0)
    if ticket.state in ROUTES and message.above < ticket.route:
        core.reply(caller, _routed(ticket))
        return
    if ticket.state in ROUTES:
        unroute(core, ticket)
    wait = Wait(caller, ticket)
    if not message.timeout_s:
        core.reply(caller, TicketRouted(0, "", ""))
        return
    timeout_s = min(message.timeout_s, limits.CALL_TIMEOUT_MAX_S)
    core.tickets.park(wait, core.now + timeout_s)


def _routed(ticket: Ticket) -> TicketRouted:
    assert ticket.slot is not None, ticket.id
    where, is_ahead = ticket.slot.wish.where, ticket.state in AHEAD
    return TicketRouted(ticket.route, ticket.slot.name, where, is_ahead)


def _answer(core: Core, wait: Wait, route: int) -> None:
    core.tickets.unpark(wait)
    core.reply(wait.caller, _routed(wait.ticket) if route else TicketRouted(0, "", ""))


def look(core: Core) -> None:
    """Route what waits, as far as there is room; answer those whose time is up."""
    book = core.tickets
    for wait in book.waits.take_due(core.now, ANSWERED_PER_TICK):
        _answer(core, wait, 0)
    book.part_waits.look(core)
    left = ROUTED_PER_TICK
    while book.to_route and left > 0:
        fleet = next(iter(book.to_route))
        del book.to_route[fleet]
        routed = _route_some(core, fleet, left)
        left -= max(1, routed)
        if routed:
            book.look_at(fleet)


def next_s(core: Core) -> float:
    """When to look again."""
    due_s = core.now if core.tickets.to_route else inf
    waits = core.tickets.waits.next_s(), core.tickets.part_waits.by_deadline.next_s()
    return min(due_s, *waits)


def _route_some(core: Core, fleet: Fleet, most: int) -> int:
    """How many of the first tickets that wait got a worker."""
    workers = [w for w in fleet.decoders() if w.free_places > 0 and w.free_tokens > 0]
    if not workers:
        return 0
    routed = 0
    too_much: dict[str, int] = {}
    served = {number for worker in workers for number in room.served(worker)}
    for ticket in _in_turn(core, fleet, too_much, served):
        if routed == most:
            break
        if _route(core, ticket, workers):
            routed += 1
        else:
            too_much[ticket.wish.adapter] = room.needed_tokens(ticket)
    return routed


def _in_turn(
    core: Core, fleet: Fleet, too_much: dict[str, int], served: set[int]
) -> Iterator[Ticket]:
    """Those that wait, some after the others: whom nobody can take holds up none behind.

    Nor takes it much time: who wants as much as found no room, by its adapter, is left out, unless
    it has room of its own (I27).
    """
    policy = core.decode_routing.policy
    waiting = list(islice(fleet.waiting, LOOKED_AT_MAX))
    for first in range(0, len(waiting), ORDERED_MAX):
        found = [core.tickets.find(number) for number in waiting[first : first + ORDERED_MAX]]
        tickets = [each for each in found if each is not None and _may_fit(each, too_much, served)]
        wishes = [_wish(ticket, _maker(ticket)) for ticket in tickets]
        for at in policy.order(wishes, core.now):
            if _may_fit(tickets[at], too_much, served):
                yield tickets[at]


def _may_fit(ticket: Ticket, too_much: dict[str, int], served: set[int]) -> bool:
    if room.needed_tokens(ticket) < too_much.get(ticket.wish.adapter, inf):
        return True
    return ticket.id in served and ticket.room is not None and ticket.room.free_places > 0


def _maker(ticket: Ticket) -> Place:
    """Who computed it: near enough to put tickets in order without looking up pages."""
    worker = ticket.fleet.workers.get(ticket.prefill)
    if worker is None:
        return Place()
    return Place(worker.wish.host, worker.wish.rack, worker.wish.zone)


def _wish(ticket: Ticket, place: Place, prefix_tokens: int = 0) -> Wish:
    wish = ticket.wish
    still = max(1, ticket.credit_tokens - ticket.kv_tokens)
    return Wish(
        ticket.kv_tokens, still, ticket.kv_bytes, ticket.ready_s,
        ticket.opened_s + wish.first_token_s, place, prefix_tokens=prefix_tokens,
        needs_adapter=bool(wish.adapter),
    )  # fmt: skip


def _route(core: Core, ticket: Ticket, workers: list[FleetWorker]) -> bool:
    """Turn its credit into a slot on one of these workers, if one has room."""
    candidates = _candidates(ticket, workers)
    if not candidates:
        return False
    found = find(core, ticket.known, ticket.keys)
    prefix_tokens = found.pages * ticket.known.namespace.layout.page_tokens
    wish = _wish(ticket, found.place, prefix_tokens)
    source_bytes = core.tickets.source_bytes[wish.place.host]
    offers = [_offer(ticket, worker, found, source_bytes) for worker in candidates]
    at = core.decode_routing.policy.choose(wish, offers, core.now)
    if at is None:
        return False
    route = core.tickets.new_number()
    place = {
        "slot": candidates[at],
        "host": wish.place.host,
        "credit_tokens": room.needed_tokens(ticket),
    }
    place |= {"route": route, "routes": ticket.routes + 1, "routed_s": core.now}
    change(core, ticket, TicketEvent.ROUTED, **place)
    if ticket.wait is not None:
        _answer(core, ticket.wait, route)
    return True


def _candidates(ticket: Ticket, workers: list[FleetWorker]) -> list[FleetWorker]:
    """Those with its adapter and room; who has failed it only where nobody else has."""
    fitting = [worker for worker in workers if room.takes(worker, ticket)]
    return [w for w in fitting if w.name not in ticket.failed] or fitting


def _offer(ticket: Ticket, worker: FleetWorker, found: Found, source_bytes: int) -> DecodeOffer:
    wish, beat, first = worker.wish, worker.beat, ticket.keys[:KEY_BYTES]
    assert beat is not None, worker.name
    return DecodeOffer(
        worker.name, wish.host, wish.rack, wish.zone, worker.free_tokens, wish.capacity_tokens,
        len(worker.tickets), wish.batch_max, beat.step_s, found.tokens_by_host[wish.host],
        worker.prefixes[first] if first else 0, worker.link_bytes, beat.link_bytes_per_s,
        source_bytes,
    )  # fmt: skip
