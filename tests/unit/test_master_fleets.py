"""Inference workers: lives, beats, silence, and what becomes of what they had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore import limits
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import GetStatus, Status
from master.metrics import ShellCounts, exposition
from master.tickets import TicketState
from master.tunables import Tunables
from tests.unit.master_rig import failure
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message


def keep_alive(fleet: Fleet, seconds: float, *names: str) -> None:
    """Let time pass while these beat."""
    for _ in range(int(seconds / 0.5)):
        fleet.rig.pass_time(0.5)
        for name in names:
            fleet.beat(name)


def code(fleet: Fleet, message: Message) -> str:
    """Of the failure that answers it."""
    return failure(fleet.rig.ask(fleet.rig.engine, message)).code


def test_joining_again_is_the_same_life_and_another_process_another() -> None:
    fleet = Fleet()
    fleet.join("d1")
    life = fleet.lives["d1"]
    fleet.join("d1", capacity=5)
    assert fleet.lives["d1"] == life
    (own,) = fleet.rig.master.core.tickets.fleets
    assert own.capacity_tokens == 5
    other = fleet.rig.open("engine", "tenant", "engine")
    reply = fleet.rig.ask(other, fleet.joined["d1"])
    assert isinstance(reply, wire.FleetJoined)
    assert reply.life > life
    assert (reply.beat_every_s, reply.lost_after_s) == (0.5, 3.0)
    assert code(fleet, fleet.beat_message("d1")) == "fenced"


def test_a_second_life_has_nothing_of_the_first() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install()
    other = fleet.rig.open("engine", "tenant", "engine")
    reply = fleet.rig.ask(other, fleet.joined["d1"])
    assert isinstance(reply, wire.FleetJoined)
    fleet.rig.settle()
    assert fleet.ticket(ticket).state is TicketState.STAGED
    assert code(fleet, wire.FinishTicket(ticket, claimed.token)) == "fenced"


def test_before_its_first_beat_a_worker_gets_nothing() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1")
    beat = fleet.beat_message("d1")
    fleet.ask(wire.LeaveFleet(fleet.space.id, "d1", fleet.lives["d1"]), Done)
    fleet.ask(fleet.joined["d1"], wire.FleetJoined)
    assert fleet.throttled().reason == "no_decode"
    assert code(fleet, beat) == "fenced"


@pytest.mark.parametrize("state", [TicketState.ROUTED, TicketState.CLAIMED, TicketState.INSTALLED])
def test_a_silent_worker_is_lost_and_its_tickets_go_to_others(state: TicketState) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.stage().ticket
    route = fleet.route(ticket)
    if state is not TicketState.ROUTED:
        claimed = fleet.claim(ticket, route)
        if state is TicketState.INSTALLED:
            fleet.ask(wire.TicketInstalled(ticket, claimed.token), Done)
    fleet.join("d2")
    keep_alive(fleet, limits.FLEET_LOST_AFTER_S - 0.5, "d2", "p1")
    assert fleet.ticket(ticket).state is state
    keep_alive(fleet, 1.0, "d2", "p1")
    assert fleet.route(ticket, above=route.route).decode == "d2"
    assert fleet.rig.master.core.counters["fleet_workers_lost"] == 1
    assert code(fleet, fleet.beat_message("d1")) == "fenced"
    fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.assert_nothing_held()


def test_when_all_have_gone_nothing_is_kept_of_a_fleet() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.stage().ticket
    fleet.rig.pass_time(4.0)
    (own,) = fleet.rig.master.core.tickets.fleets
    assert not own.workers
    fleet.ask(wire.CancelTicket(ticket), Done)
    assert not list(fleet.rig.master.core.tickets.fleets)


def test_a_draining_worker_goes_on_with_what_it_has() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install()
    assert fleet.beat("d1", (ticket, claimed.token, 300), draining=True) == ()
    fleet.beat("d1", (ticket, claimed.token, 301), draining=True)
    assert fleet.ticket(ticket).state is TicketState.INSTALLED
    fleet.ask(wire.FinishTicket(ticket, claimed.token), Done)


def test_what_a_worker_no_longer_names_is_finished() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install()
    fleet.beat("d1", (ticket, claimed.token, 300))
    fleet.beat("d1")
    fleet.beat("d1", (ticket, claimed.token, 301))
    fleet.beat("d1")
    assert fleet.ticket(ticket).missed == 1
    fleet.beat("d1")
    fleet.assert_nothing_held()


def test_what_it_claimed_and_no_longer_names_is_routed_anew() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.stage().ticket
    route = fleet.route(ticket)
    claimed = fleet.claim(ticket, route)
    fleet.beat("d1")
    fleet.beat("d1")
    assert fleet.route(ticket, above=route.route).route > route.route
    assert code(fleet, wire.TicketInstalled(ticket, claimed.token)) == "fenced"


def test_it_is_told_of_tickets_that_are_not_its_own() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install()
    routed = fleet.stage(fleet.wish(seed=2)).ticket
    fleet.route(routed)
    named = (ticket, claimed.token, 300), (ticket + 77, 5, 10), (routed, 0, 10), (12, 5, 10)
    assert fleet.beat("d1", *named) == (ticket + 77, routed, 12)
    assert fleet.beat("d1", (ticket, claimed.token - 1, 300)) == (ticket,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queued_tokens", -1),
        ("tokens_per_s", float("nan")),
        ("step_s", -1.0),
        ("link_bytes_per_s", float("inf")),
        ("rtt_s", -0.1),
        ("running", (wire.Running(1, 1, -1),)),
        ("running", (wire.Running(1, 1, 1),) * 5000),
    ],
)
def test_a_beat_that_cannot_be_right_is_refused(field: str, value: object) -> None:
    fleet = Fleet()
    fleet.join("d1")
    beat = msgspec.structs.replace(fleet.beat_message("d1"), **{field: value})
    bad = failure(fleet.rig.ask(fleet.rig.engine, beat))
    assert (bad.code, bad.text.startswith(field)) == ("bad_value", True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker", ""),
        ("where", ""),
        ("role", "encode"),
        ("host", "x" * 600),
        ("capacity_tokens", 0),
        ("capacity_tokens", -1),
        ("batch_max", 0),
        ("batch_max", 4097),
        ("adapters", ("x" * 600,)),
        ("adapters", ("x",) * 1025),
    ],
)
def test_a_worker_that_cannot_be_right_does_not_join(field: str, value: object) -> None:
    fleet = Fleet()
    fleet.join("d1")
    wish = msgspec.structs.replace(fleet.joined["d1"], **{field: value})
    bad = failure(fleet.rig.ask(fleet.rig.engine, wish))
    assert (bad.code, bad.text.split(":")[0]) == ("bad_value", field)


def alone_on_b1() -> tuple[Fleet, wire.TicketOpened]:
    """A request that one worker runs whole, beside another that could."""
    fleet = Fleet(Tunables("test", replicas=1, colocation="always"))
    fleet.join("b1", "both")
    opened = fleet.open(fleet.wish(pages=0, behind=20))
    fleet.join("b2", "both")
    fleet.begin(opened)
    return fleet, opened


def test_what_ran_alone_and_is_named_no_more_has_ended() -> None:
    fleet, opened = alone_on_b1()
    for _ in range(3):  # it has not begun yet
        assert fleet.beat("b1") == ()
    assert fleet.beat("b1", (opened.ticket, 0, 21)) == ()
    fleet.beat("b1")
    assert fleet.ticket(opened.ticket).slot is not None
    fleet.beat("b1")
    fleet.assert_nothing_held()


def test_who_is_to_run_it_in_place_of_another_may_not_have_begun() -> None:
    fleet, opened = alone_on_b1()
    fleet.beat("b1", (opened.ticket, 0, 21))
    again = fleet.ask(wire.FailPrefill(opened.ticket, "b1"), wire.TicketOpened)
    assert again.prefill == "b2"
    assert fleet.beat("b1", (opened.ticket, 0, 22)) == (opened.ticket,)
    for _ in range(3):
        fleet.beat("b2")
    assert fleet.ticket(opened.ticket).prefill == "b2"


def test_what_ran_alone_and_was_handed_on_is_not_over_because_nobody_names_it() -> None:
    fleet, opened = alone_on_b1()
    fleet.beat("b1", (opened.ticket, 0, 21))
    fleet.ask(fleet.stage_message(opened), Done)
    route = fleet.route(opened.ticket)
    fleet.claim(opened.ticket, route)
    for _ in range(2):
        fleet.beat(route.decode)
    assert fleet.ticket(opened.ticket).state is TicketState.STAGED


def test_there_are_so_many_workers_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FLEET_WORKERS_MAX", 1)
    fleet = Fleet()
    fleet.join("d1")
    fleet.join("d1")
    other = msgspec.structs.replace(fleet.joined["d1"], worker="d2")
    assert code(fleet, other) == "out_of_space"


def test_lists_and_totals_say_what_there_is() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, _, _ = fleet.install(fleet.wish(request="one"))
    fleet.stage(fleet.wish(seed=2, request="two"))
    listed = fleet.ask(wire.ListTickets(), wire.TicketList)
    assert [(r.request, r.state, r.decode) for r in listed.rows] == [
        ("one", "installed", "d1"), ("two", "staged", ""),
    ]  # fmt: skip
    assert listed.rows[0].ticket == ticket
    assert (listed.tickets, listed.rows[0].staged_bytes) == (2, 0)
    assert listed.staging_bytes == listed.rows[1].staged_bytes > 0
    workers = {row.worker: row for row in listed.workers}
    assert (workers["d1"].running, workers["d1"].used_tokens, workers["d1"].state) == (
        1, 366, "live",
    )  # fmt: skip
    stranger = fleet.rig.open("engine", "other", "engine")
    others = fleet.rig.ask(stranger, wire.ListTickets())
    assert isinstance(others, wire.TicketList)
    assert (others.tickets, others.rows, others.workers) == (0, (), ())
    operator = fleet.rig.ask(fleet.rig.open("operator", "", "op"), wire.ListTickets())
    assert isinstance(operator, wire.TicketList)
    assert operator.tickets == 2
    worker = fleet.rig.workers["w1"].session
    assert worker is not None
    assert failure(fleet.rig.ask(worker, wire.ListTickets())).code == "access_denied"
    status = fleet.ask(GetStatus(), Status)
    assert status.tickets.by_state == {"installed": 1, "staged": 1}
    assert status.tickets.workers == {"live": 2}
    assert (status.tickets.credit_tokens, status.tickets.capacity_tokens) == (732, 10_000)
    text = exposition(lambda: (status, ShellCounts())).decode()
    assert '\nkvharbor_tickets{state="staged"} 1.0\n' in text
    assert "\nkvharbor_ticket_credit_tokens 732.0\n" in text
