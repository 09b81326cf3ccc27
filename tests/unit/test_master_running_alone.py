"""A request whose decode workers have failed goes on in one worker alone, by the policy."""

from __future__ import annotations

import pytest

from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master.tickets import TicketState
from master.tunables import Tunables
from tests.unit.master_rig import chain, failure
from tests.unit.ticket_rig import Fleet

PAGES = 4
"""More than a break-even's tokens."""


def fleet_of(*roles: str) -> Fleet:
    fleet = Fleet(Tunables(cluster="test", replicas=1))
    for number, role in enumerate(roles):
        fleet.join(f"{role}{number}", role)
    return fleet


def failed(fleet: Fleet, times: int) -> tuple[int, int]:
    """A ticket, and the last of so many routes, all but that one told of as failed."""
    opened = fleet.stage(fleet.wish(pages=PAGES), tail=fleet.put_tail())
    route = 0
    for _ in range(times):
        found = fleet.route(opened.ticket, above=route)
        route = found.route
        fleet.claim(opened.ticket, found)
    return opened.ticket, route


def refused(fleet: Fleet, ticket: int, route: int) -> str:
    return failure(fleet.rig.ask(fleet.rig.engine, wire.RunAlone(ticket, route))).code


def test_after_two_failed_routes_one_worker_does_all_of_it() -> None:
    fleet = fleet_of("prefill", "both", "decode")
    ticket, route = failed(fleet, 2)
    tail = fleet.ticket(ticket).tail
    assert tail is not None
    opened = fleet.ask(wire.RunAlone(ticket, route), wire.TicketOpened)
    assert (opened.prefill, opened.alone) == ("both1", "failed_hand_overs")
    assert fleet.ask(wire.RunAlone(ticket, route), wire.TicketOpened) == opened
    assert fleet.rig.master.core.counters["alone_failed_hand_overs"] == 1
    assert fleet.tails.probe(tail.key) == b"\0"
    assert fleet.rig.master.core.tickets.staged_bytes == 0
    fleet.begin(opened)
    fleet.ask(wire.FinishTicket(ticket, 0), Done)
    fleet.assert_nothing_held()


@pytest.mark.parametrize("roles", [("prefill", "both", "decode"), ("prefill", "decode", "decode")])
def test_before_that_or_where_there_is_nobody_it_is_routed_anew(roles: tuple[str, ...]) -> None:
    fleet = fleet_of(*roles)
    ticket, route = failed(fleet, 1 if "both" in roles else 2)
    assert refused(fleet, ticket, route) == "fenced"
    assert fleet.ticket(ticket).state is TicketState.STAGED
    assert fleet.route(ticket, above=route).route > route


def test_a_route_that_is_none_of_the_present_ends_no_claim() -> None:
    fleet = fleet_of("prefill", "both", "decode")
    ticket, route = failed(fleet, 2)
    assert refused(fleet, ticket, route - 1) == "fenced"
    assert refused(fleet, ticket, route + 1) == "fenced"
    assert fleet.ticket(ticket).state is TicketState.CLAIMED


def test_who_has_shed_a_request_has_not_failed_it() -> None:
    fleet = fleet_of("prefill", "both", "decode")
    opened = fleet.stage(fleet.wish(seed=1, pages=PAGES))
    route = 0
    for _ in range(3):
        found = fleet.route(opened.ticket, above=route)
        route, claimed = found.route, fleet.claim(opened.ticket, found)
        fleet.ask(wire.TicketInstalled(opened.ticket, claimed.token), Done)
        shed = wire.ShedTicket(opened.ticket, claimed.token, chain(1, PAGES), wire.TailRef(), (7,))
        fleet.ask(shed, Done)
    assert refused(fleet, opened.ticket, route) == "fenced"


def test_one_that_was_to_go_on_alone_and_leaves_has_staged_it() -> None:
    fleet = fleet_of("prefill", "both", "decode")
    ticket, route = failed(fleet, 2)
    opened = fleet.ask(wire.RunAlone(ticket, route), wire.TicketOpened)
    fleet.begin(opened)
    fleet.ask(fleet.stage_message(opened, tokens=(7, 8, 9)), Done)
    assert fleet.ticket(ticket).alone == ""
    assert fleet.route(ticket, above=route).route > route


def test_of_what_was_routed_ahead_before_nothing_is_left() -> None:
    fleet = fleet_of("prefill", "both", "decode")
    fleet.ask(fleet.beat_message("both1", link=5e3), wire.FleetNoted)
    first, ahead = fleet.route_ahead(fleet.wish(pages=PAGES), "decode2")
    fleet.ask(fleet.stage_message(first), Done)
    route = fleet.route(first.ticket, above=ahead.route).route
    opened = fleet.ask(wire.RunAlone(first.ticket, route), wire.TicketOpened)
    fleet.begin(opened)
    fleet.rig.settle()
    ticket = fleet.ticket(opened.ticket)
    assert (ticket.state, ticket.alone) == (TicketState.PREFILLING, opened.alone)
    fleet.ask(wire.LeaveFleet(fleet.space.id, "both1", fleet.lives["both1"]), Done)
    again = fleet.ask(wire.FailPrefill(opened.ticket, "both1"), wire.TicketOpened)
    fleet.begin(again, ticket.wish.prompt_tokens)
    routed = fleet.route(opened.ticket, above=route)
    assert routed.is_ahead
    assert fleet.claim(opened.ticket, routed).tokens == ()
