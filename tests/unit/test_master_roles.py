"""A fleet that is short of workers of one role asks one of the other to change, and only one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.operator import SetPolicy
from master.roles import TURN_S
from master.tunables import Tunables
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = ("p1", "p2", "d1", "d2")


def crew(policy: str = "enforce", offered: Iterable[str] = NAMES) -> Fleet:
    """Two prefill and two decode workers that offer to change, after the time that they rest."""
    fleet = Fleet(Tunables("test", replicas=1, colocation="never", roles=policy))
    for name in NAMES:
        fleet.join(name, "prefill" if name[0] == "p" else "decode", switches=name in offered)
    live(fleet, 40.0)
    return fleet


def live(fleet: Fleet, seconds: float, queued: int = 0) -> set[tuple[str, str]]:
    """Everybody beats, prefill workers with so much to do: who is asked for which role."""
    asked = set()
    for _ in range(round(seconds / limits.FLEET_BEAT_S)):
        fleet.rig.pass_time(limits.FLEET_BEAT_S)
        for name, wish in fleet.joined.items():
            mine = queued if wish.role == "prefill" else 0
            running = [
                (ticket.id, ticket.token, 200)
                for ticket in fleet.rig.master.core.tickets.all()
                if ticket.slot is not None and ticket.slot.name == name
            ]
            message = fleet.beat_message(name, *running, queued=mine)
            noted = fleet.ask(message, wire.FleetNoted)
            asked |= {(name, noted.role)} if noted.role else set()
    return asked


def change(fleet: Fleet, name: str, role: str) -> None:
    """A worker does what it was asked for."""
    fleet.ask(wire.LeaveFleet(fleet.space.id, name, fleet.lives[name]), Done)
    fleet.join(name, role, switches=True)


def test_one_worker_is_asked_until_it_has_changed() -> None:
    fleet = crew()
    assert live(fleet, 20.0) == set()
    assert live(fleet, 3.0, queued=5000) == set()  # it has to last
    assert live(fleet, 3.0, queued=5000) == {("d1", "prefill")}
    assert live(fleet, 40.0, queued=5000) == {("d1", "prefill")}
    change(fleet, "d1", "prefill")
    # Now d2 is the last one that generates.
    assert live(fleet, 60.0, queued=50_000) == set()
    counters = fleet.rig.master.core.counters
    assert counters["roles_wanted_prefill"] == counters["roles_changed_prefill"] == 1


def test_who_is_asked_gets_nothing_new_and_is_said_to_be_changing() -> None:
    fleet = crew()
    live(fleet, 6.0, queued=5000)
    rows = fleet.ask(wire.ListTickets(), wire.TicketList).workers
    assert {row.worker: row.state for row in rows}["d1"] == "changing"
    opened = [fleet.stage(fleet.wish(seed=seed, first_token_s=60.0)) for seed in range(3)]
    assert {fleet.route(each.ticket).decode for each in opened} == {"d2"}


def test_what_it_has_is_shed_and_nothing_is_lost_of_it() -> None:
    fleet = crew()
    number, claimed, name = fleet.install()
    other = "d2" if name == "d1" else "d1"
    assert live(fleet, 6.0, queued=5000) == {(other, "prefill")}  # who has least to hand over
    change(fleet, other, "prefill")
    fleet.ask(wire.FinishTicket(number, claimed.token), Done)
    fleet.assert_nothing_held()


def test_answers_that_wait_take_a_worker_from_prompts() -> None:
    fleet = crew()
    for seed in range(13):  # of 16 rows
        fleet.stage(fleet.wish(seed=seed))
    assert live(fleet, 6.0) == {("p1", "decode")}
    change(fleet, "p1", "decode")
    assert fleet.rig.master.core.counters["roles_changed_decode"] == 1


def test_only_those_that_offered_it_are_asked() -> None:
    fleet = crew(offered=["d2"])
    assert live(fleet, 6.0, queued=5000) == {("d2", "prefill")}
    fleet = crew(offered=[])
    assert live(fleet, 60.0, queued=5000) == set()


@pytest.mark.parametrize("role", ["decode", "both"])
def test_who_comes_back_as_something_else_is_let_be(role: str) -> None:
    fleet = crew()
    live(fleet, 6.0, queued=5000)
    change(fleet, "d1", role)
    assert live(fleet, 20.0, queued=5000) == set()  # for as long as after a change
    assert fleet.rig.master.core.counters["roles_changed_prefill"] == 0


def test_who_does_not_come_back_is_not_waited_for() -> None:
    fleet = crew()
    fleet.join("d3", switches=True)
    live(fleet, 6.0, queued=5000)
    for name in ("d1", "p1"):
        fleet.ask(wire.LeaveFleet(fleet.space.id, name, fleet.lives[name]), Done)
        del fleet.joined[name]
    assert live(fleet, TURN_S - 10, queued=5000) == set()
    assert live(fleet, 20.0, queued=5000) == {("d2", "prefill")}


def test_observing_counts_what_would_be_asked() -> None:
    fleet = crew("observe")
    assert live(fleet, 6.0, queued=5000) == set()
    assert fleet.rig.master.core.counters["roles_observed_prefill"] == 1
    operator = fleet.rig.open("operator", "", "kvharbor")
    fleet.rig.ask(operator, SetPolicy("roles", "enforce", {"dwell_s": "1"}))
    assert live(fleet, 6.0, queued=5000) == {("d1", "prefill")}


def test_nobody_is_asked_any_more_once_an_operator_says_so() -> None:
    fleet = crew()
    assert live(fleet, 6.0, queued=5000) == {("d1", "prefill")}
    operator = fleet.rig.open("operator", "", "kvharbor")
    fleet.rig.ask(operator, SetPolicy("roles", "observe", {}))
    assert live(fleet, 6.0, queued=5000) == set()
    rows = fleet.ask(wire.ListTickets(), wire.TicketList).workers
    assert {row.state for row in rows} == {"live"}


def test_off_looks_at_nothing() -> None:
    fleet = crew("off")
    assert live(fleet, 6.0, queued=5000) == set()
    assert not any(name.startswith("roles_") for name in fleet.rig.master.core.counters)
