"""The table of tickets: every row, every other pair refused, and a whole passage."""

from __future__ import annotations

from itertools import product

import pytest

from kvstore.errors import Fenced, IllegalTransition
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.reads import Remove, Removed
from master.ticket_changes import change, require
from master.tickets import LIVE, TICKET_TRANSITIONS, TicketEvent, TicketState
from tests.unit.master_rig import chain, failure
from tests.unit.ticket_rig import Fleet

ENDS = set(TicketState) - set(LIVE)


def at_state(fleet: Fleet, state: TicketState) -> int:
    """A ticket that has come so far."""
    if state is TicketState.OPENED:
        return fleet.open().ticket
    if state is TicketState.PREFILLING:
        opened = fleet.open()
        fleet.begin(opened)
        return opened.ticket
    if state is TicketState.ROUTED_AHEAD:
        return fleet.route_ahead()[0].ticket
    if state is TicketState.CLAIMED_AHEAD:
        return fleet.claim_ahead()[0].ticket
    if state is TicketState.INSTALLED:
        return fleet.install()[0]
    ticket = fleet.stage().ticket
    if state is not TicketState.STAGED:
        route = fleet.route(ticket)
        if state is TicketState.CLAIMED:
            fleet.claim(ticket, route)
    return ticket


@pytest.mark.parametrize(("state", "event"), list(product(LIVE, TicketEvent)))
def test_only_rows_of_the_table_change_a_ticket(state: TicketState, event: TicketEvent) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.ticket(at_state(fleet, state))
    assert ticket.state is state
    if (state, event) in TICKET_TRANSITIONS:
        require(ticket, event)
        return
    with pytest.raises(Fenced, match="too late"):
        require(ticket, event)
    with pytest.raises(IllegalTransition):
        change(fleet.rig.master.core, ticket, event)
    fleet.rig.master.check_invariants()


def test_every_state_is_reached_and_every_event_happens() -> None:
    assert set(TICKET_TRANSITIONS.values()) | {TicketState.OPENED} == set(TicketState)
    assert {event for _, event in TICKET_TRANSITIONS} == set(TicketEvent)
    assert not ENDS & {state for state, _ in TICKET_TRANSITIONS}


def test_a_request_passes_from_prefill_to_decode() -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.space.put(chain(1, 1))
    opened = fleet.open(fleet.wish(seed=1))
    assert (opened.prefill, opened.where, opened.alone) == ("p1", "p1:1", "")
    fleet.begin(opened)
    key = fleet.put_tail()
    fleet.ask(fleet.stage_message(opened, key), Done)
    route = fleet.route(opened.ticket)
    assert (route.decode, route.where) == ("d1", "d1:1")
    claimed = fleet.claim(opened.ticket, route)
    assert claimed.tail == wire.TailRef(fleet.tails.id, key, 4096)
    assert claimed.tokens == (7,)
    assert (claimed.prompt_tokens, claimed.page_tokens) == (266, 128)
    assert fleet.tails.probe(key) == b"\1"
    fleet.ask(wire.TicketInstalled(opened.ticket, claimed.token), Done)
    assert fleet.tails.probe(key) == b"\0"
    assert fleet.rig.master.core.pins.tickets.pages == 0
    fleet.ask(wire.FinishTicket(opened.ticket, claimed.token), Done)
    fleet.assert_nothing_held()
    fleet.ask(wire.FinishTicket(opened.ticket, claimed.token), Done)


@pytest.mark.parametrize("state", LIVE)
def test_cancelling_gives_everything_back(state: TicketState) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = at_state(fleet, state)
    fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.assert_nothing_held()
    fleet.ask(wire.CancelTicket(ticket), Done)


@pytest.mark.parametrize("state", LIVE)
def test_a_ticket_ends_when_its_time_is_up(state: TicketState) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.ticket(at_state(fleet, state))
    fleet.rig.now = ticket.deadline_s + 1.0
    fleet.rig.tick()
    fleet.rig.settle()
    fleet.assert_nothing_held()


def test_a_staged_ticket_waits_so_long_for_a_route() -> None:
    fleet = Fleet()
    fleet.pair()
    key = fleet.put_tail()
    opened = fleet.open(fleet.wish(deadline_s=600.0))
    fleet.begin(opened)
    fleet.rig.ask(fleet.rig.engine, fleet.beat_message("d1", draining=True))
    fleet.ask(fleet.stage_message(opened, key), Done)
    fleet.rig.tick(29.9)
    assert fleet.ticket(opened.ticket).state is TicketState.STAGED
    fleet.rig.tick(0.3)
    fleet.rig.settle()
    fleet.assert_nothing_held()
    assert fleet.tails.probe(key) == b"\0"


def test_another_tenant_has_no_part_in_a_ticket() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, worker = fleet.install()
    stranger = fleet.rig.open("engine", "other", "engine")
    messages = [
        wire.AwaitRoute(ticket, 0, 1.0),
        wire.ClaimTicket(ticket, 1, worker, fleet.lives[worker]),
        wire.TicketInstalled(ticket, claimed.token),
        wire.FinishTicket(ticket, claimed.token),
        wire.CancelTicket(ticket),
        fleet.wish(),
        fleet.joined["d1"],
        fleet.beat_message("d1"),
        wire.LeaveFleet(fleet.space.id, "d1", fleet.lives["d1"]),
    ]
    for message in messages:
        assert failure(fleet.rig.ask(stranger, message)).code == "access_denied", message
    assert fleet.ticket(ticket).state is TicketState.INSTALLED


def test_a_removed_page_is_no_longer_there_and_the_ticket_goes_on() -> None:
    fleet = Fleet()
    fleet.pair()
    keys = chain(1, 2)
    fleet.space.put(keys)
    ticket = fleet.stage(fleet.wish(seed=1)).ticket
    reply = fleet.rig.settled(fleet.rig.engine, fleet.rig.ask(
        fleet.rig.engine, Remove(fleet.space.id, keys, 5.0)
    ))  # fmt: skip
    assert isinstance(reply, Removed)
    fleet.claim(ticket, fleet.route(ticket))
    fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.assert_nothing_held()


def test_pages_of_a_ticket_outlive_their_time_and_end_after_it() -> None:
    fleet = Fleet()
    fleet.pair()
    keys = chain(1, 2)
    fleet.space.put(keys, ttl_s=5.0)
    ticket = fleet.open(fleet.wish(seed=1)).ticket
    fleet.rig.pass_time(20.0)
    assert fleet.space.probe(keys) == b"\1\1"
    fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.rig.pass_time(1.0)
    assert fleet.space.probe(keys) == b"\0\0"


def fill(fleet: Fleet, first: int) -> None:
    """Put more than the pool holds, and let room be made for it."""
    for seed in range(first, first + 40):
        keys = chain(seed, 2)
        reply = fleet.space.begin(keys)
        if isinstance(reply, PutPlans):
            fleet.space.report(fleet.space.write(reply, keys))
        fleet.rig.pass_time(0.5)


def test_pages_of_a_ticket_stay_where_room_is_wanted() -> None:
    fleet = Fleet(chunks=4)
    fleet.pair()
    keys = chain(1, 2)
    fleet.space.put(keys)
    ticket = fleet.open(fleet.wish(seed=1)).ticket
    fill(fleet, 10)
    assert fleet.rig.master.core.counters["pages_evicted"] > 0
    assert fleet.space.probe(keys) == b"\1\1"
    fleet.ask(wire.CancelTicket(ticket), Done)
    fill(fleet, 60)
    assert fleet.space.probe(keys) == b"\0\0"
