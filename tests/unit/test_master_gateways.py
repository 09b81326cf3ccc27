"""What a gateway had is given back once it has gone for good, in whatever state; not before."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master import claims
from master.events import Prolonged
from master.tickets import TicketState
from tests.unit.master_rig import chain, failure
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from master.events import SessionId

TOKEN = b"one process"


class Gateway:
    """A fleet whose workers speak over another connection than the gateway."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.fleet.pair()
        self.workers = self.fleet.rig.engine
        self.session = self.open()

    def open(self, token: bytes = TOKEN) -> SessionId:
        """Another connection of the gateway, or of another one."""
        return self.fleet.rig.open("engine", "tenant", "gateway", token)

    def asks(self, wish: wire.OpenTicket | None = None) -> wire.TicketOpened:
        """Its request."""
        self.fleet.rig.engine = self.session
        try:
            return self.fleet.open(wish)
        finally:
            self.fleet.rig.engine = self.workers

    def pass_time(self, seconds: float, *running: tuple[int, int, int]) -> None:
        """While the workers beat."""
        for _ in range(round(seconds / 0.5)):
            self.fleet.rig.pass_time(0.5)
            self.fleet.beat("p1")
            self.fleet.beat("d1", *running)


def opened(gateway: Gateway) -> wire.TicketOpened:
    return gateway.asks()


def prefilling(gateway: Gateway) -> wire.TicketOpened:
    opened = gateway.asks()
    gateway.fleet.begin(opened)
    return opened


def staged(gateway: Gateway) -> wire.TicketOpened:
    opened = prefilling(gateway)
    gateway.fleet.beat("d1", draining=True)
    tail = gateway.fleet.put_tail()
    gateway.fleet.ask(gateway.fleet.stage_message(opened, tail), Done)
    return opened


def routed(gateway: Gateway) -> wire.TicketOpened:
    opened = prefilling(gateway)
    tail = gateway.fleet.put_tail()
    gateway.fleet.ask(gateway.fleet.stage_message(opened, tail), Done)
    gateway.fleet.rig.settle()
    return opened


def claimed(gateway: Gateway) -> wire.TicketOpened:
    opened, fleet = routed(gateway), gateway.fleet
    fleet.claim(opened.ticket, fleet.route(opened.ticket))
    return opened


def installed(gateway: Gateway) -> wire.TicketOpened:
    opened, fleet = claimed(gateway), gateway.fleet
    token = fleet.ticket(opened.ticket).token
    fleet.ask(wire.TicketInstalled(opened.ticket, token), Done)
    return opened


STATES: dict[TicketState, Callable[[Gateway], wire.TicketOpened]] = {
    TicketState.OPENED: opened,
    TicketState.PREFILLING: prefilling,
    TicketState.STAGED: staged,
    TicketState.ROUTED: routed,
    TicketState.CLAIMED: claimed,
    TicketState.INSTALLED: installed,
}


@pytest.mark.parametrize("state", STATES)
def test_the_tickets_of_a_gateway_that_has_gone_are_cancelled(state: TicketState) -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, STATES[state](gateway).ticket
    token = fleet.ticket(ticket).token
    running = ((ticket, token, 300),) if token else ()
    fleet.rig.close(gateway.session)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S - 0.5, *running)
    fleet.rig.master.check_invariants()
    assert len(fleet.rig.master.core.tickets) == 1
    gateway.pass_time(1.0)
    assert fleet.rig.master.core.counters["tickets_abandoned"] == 1
    fleet.assert_nothing_held()
    fleet.rig.master.check_invariants()
    if token:  # and its worker is told to stop
        assert fleet.beat("d1", (ticket, token, 300)) == (ticket,)


def test_who_computes_a_prompt_that_nobody_waits_for_is_told_so() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, prefilling(gateway)
    message = fleet.stage_message(ticket)
    fleet.rig.close(gateway.session)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    assert failure(fleet.rig.ask(fleet.rig.engine, message)).code == "unknown_ticket"


def test_a_gateway_that_comes_back_in_time_has_its_tickets() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, staged(gateway).ticket
    for _ in range(3):
        fleet.rig.close(gateway.session)
        gateway.pass_time(limits.GATEWAY_LOST_AFTER_S - 0.5)
        gateway.session = gateway.open()
        fleet.rig.master.check_invariants()
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    assert fleet.ticket(ticket).state is TicketState.ROUTED
    fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.assert_nothing_held()


def test_one_connection_of_several_may_end() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, opened(gateway).ticket
    gateway.open()
    fleet.rig.close(gateway.session)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    assert fleet.ticket(ticket).state is TicketState.OPENED


def test_another_process_that_asks_the_same_again_answers_for_it() -> None:
    gateway = Gateway()
    fleet, wish = gateway.fleet, gateway.fleet.wish(request="one")
    ticket = gateway.asks(wish).ticket
    fleet.rig.close(gateway.session)
    gateway.session = gateway.open(b"restarted")
    assert gateway.asks(wish).ticket == ticket
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    fleet.rig.master.check_invariants()
    assert fleet.ticket(ticket).state is TicketState.OPENED
    fleet.rig.close(gateway.session)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    fleet.assert_nothing_held()


def test_whoever_presents_a_ticket_to_a_new_master_answers_for_it() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, opened(gateway).ticket
    fleet.rig.takeover(fleet.rig.master.core.epoch + 1)
    fleet.rig.workers["w1"].join()
    fleet.pair()
    gateway.workers = fleet.rig.engine
    session = gateway.open()
    message = wire.PresentTicket(
        ticket, fleet.space.id, "one", chain(1, 2), 266, 100, 1.0, 30.0, 0, "p1", wire.TailRef(), ()
    )
    assert isinstance(fleet.rig.ask(session, message), Done)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    assert fleet.ticket(ticket).state is TicketState.PREFILLING
    fleet.rig.close(session)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    fleet.assert_nothing_held()


def test_whoever_presents_it_last_answers_for_it() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, opened(gateway).ticket
    fleet.rig.takeover(fleet.rig.master.core.epoch + 1)
    fleet.rig.workers["w1"].join()
    fleet.pair()
    gateway.workers = fleet.rig.engine
    first, last = gateway.open(b"first"), gateway.open(b"last")
    message = wire.PresentTicket(
        ticket, fleet.space.id, "one", chain(1, 2), 266, 100, 1.0, 30.0, 0, "p1", wire.TailRef(), ()
    )
    for session in (first, last):
        assert isinstance(fleet.rig.ask(session, message), Done)
    fleet.rig.close(first)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    assert fleet.ticket(ticket).state is TicketState.PREFILLING
    fleet.rig.close(last)
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S + 0.5)
    fleet.assert_nothing_held()


def test_one_that_had_many_is_given_up_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "EXPIRED_PER_TICK", 3)
    gateway = Gateway()
    fleet, book = gateway.fleet, gateway.fleet.rig.master.core.tickets
    many = 3 * claims.EXPIRED_PER_TICK + 1
    for seed in range(many):
        gateway.asks(fleet.wish(seed, 0))
    fleet.rig.close(gateway.session)
    fleet.rig.tick(limits.GATEWAY_LOST_AFTER_S + 0.2)
    assert len(book) == many - claims.EXPIRED_PER_TICK
    fleet.rig.master.check_invariants()
    for _ in range(3):  # which take no longer than they have to
        assert fleet.rig.master.wakeup_s <= fleet.rig.now
        fleet.rig.tick()
    fleet.assert_nothing_held()


def test_time_in_doubt_counts_neither_as_silence_nor_as_absence() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, prefilling(gateway).ticket
    rig = fleet.rig
    rig.pass_time(1.0)
    rig.close(gateway.session)
    rig.send(Prolonged(rig.now))
    rig.pass_time(10.0)
    refused = failure(rig.ask(gateway.workers, fleet.beat_message("d1")))
    assert refused.code == "unavailable"
    rig.send(Prolonged(inf))
    rig.settle()
    rig.pass_time(limits.FLEET_LOST_AFTER_S - 1.0 - 0.5)
    fleet.beat("p1")
    fleet.beat("d1")
    gateway.pass_time(1.0)
    assert fleet.ticket(ticket).state is TicketState.PREFILLING
    gateway.pass_time(limits.GATEWAY_LOST_AFTER_S)  # but it has to come back
    fleet.assert_nothing_held()
    rig.pass_time(limits.FLEET_LOST_AFTER_S + 1.0)  # and they have to beat
    assert rig.master.core.counters["fleet_workers_lost"] == 2


def test_a_gateway_without_tickets_is_not_waited_for() -> None:
    gateway = Gateway()
    fleet, ticket = gateway.fleet, opened(gateway).ticket
    fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.rig.close(gateway.session)
    assert not len(fleet.rig.master.core.tickets.gateways.away)
