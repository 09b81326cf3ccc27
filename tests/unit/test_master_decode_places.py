"""Who finds no place in a decode batch in time is not let in, and no prompt is computed for it.

The rig's workers compute 1000 tokens of a prompt a second, and take steps of 0.02 s.
"""

from __future__ import annotations

import pytest

from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master.tunables import Tunables
from tests.unit.ticket_rig import Fleet


def fleet_of(batch: int = 2, staging_s: float = 30.0) -> Fleet:
    """One prefill and one decode worker with so many places."""
    fleet = Fleet(Tunables("test", replicas=1, colocation="never", staging_s=staging_s))
    fleet.join("p1", "prefill")
    fleet.join("d1", batch=batch)
    return fleet


def small(fleet: Fleet, new_tokens: int = 100) -> wire.OpenTicket:
    """It is computed in no time; an answer of 100 tokens takes 2 s."""
    return fleet.wish(pages=0, behind=1, new_tokens=new_tokens)


def crowd(fleet: Fleet, count: int) -> list[wire.TicketOpened]:
    return [fleet.open(small(fleet)) for _ in range(count)]


def excess_s(fleet: Fleet, wish: wire.OpenTicket | None = None) -> float:
    """How much too long one more would wait."""
    refused = fleet.throttled(wish or small(fleet))
    assert refused.reason == "decode_occupancy", refused
    return refused.retry_after_s


def test_no_more_come_than_wait_as_long_as_their_answers_take() -> None:
    fleet = fleet_of(batch=2)
    opened = crowd(fleet, 4)  # two places, and the two whose turn comes within 2 s
    # The third of those who wait gets a place when three have gone: 3 s.
    assert excess_s(fleet) == pytest.approx(1.0, abs=0.01)
    fleet.ask(wire.CancelTicket(opened[0].ticket), Done)
    fleet.open(small(fleet))
    excess_s(fleet)


def test_a_long_prompt_may_come_where_a_short_one_would_wait_too_long() -> None:
    fleet = fleet_of(batch=2)
    crowd(fleet, 4)
    excess_s(fleet)
    fleet.open(fleet.wish(pages=9, behind=0))  # computed in 1.152 s


def test_who_wants_a_short_answer_waits_no_longer_than_that() -> None:
    fleet = fleet_of(batch=2)
    crowd(fleet, 2)
    # A place is free after 1 s; its answer takes 0.2 s.
    assert excess_s(fleet, small(fleet, 10)) == pytest.approx(0.8, abs=0.01)


def test_nobody_waits_longer_than_computed_prompts_are_kept() -> None:
    fleet = fleet_of(batch=2, staging_s=2.0)
    crowd(fleet, 3)
    assert excess_s(fleet) == pytest.approx(1.0, abs=0.01)


def test_places_come_free_as_fast_as_they_lately_did() -> None:
    fleet = fleet_of(batch=2)
    number, claimed, _ = fleet.install(small(fleet))
    for _ in range(10):
        fleet.rig.pass_time(1.0)
        fleet.beat("p1")
        fleet.beat("d1", (number, claimed.token, 5))
    fleet.ask(wire.FinishTicket(number, claimed.token), Done)
    crowd(fleet, 4)
    # Answers that were said to take 2 s take 10 s: 15 s to the third place, not 3 s.
    assert excess_s(fleet) == pytest.approx(5.0, abs=0.2)


def test_what_went_on_elsewhere_says_nothing_of_how_long_a_place_is_held() -> None:
    fleet = fleet_of(batch=2)
    number, claimed, _ = fleet.install(small(fleet))
    keys = fleet.ticket(number).wish.keys
    fleet.ask(wire.ShedTicket(number, claimed.token, keys, wire.TailRef(), (7, 8)), Done)
    claimed = fleet.claim(number, fleet.route(number, above=fleet.ticket(number).route))
    fleet.ask(wire.TicketInstalled(number, claimed.token), Done)
    fleet.ask(wire.FinishTicket(number, claimed.token), Done)
    (core_fleet,) = fleet.rig.master.core.tickets.fleets
    assert core_fleet.pace.tokens == 0


def test_one_worker_that_runs_all_of_it_takes_a_place_and_measures_too() -> None:
    fleet = Fleet(Tunables(cluster="test", replicas=1, colocation="always"))
    fleet.join("b1", "both", batch=1)
    opened = fleet.open(small(fleet))
    fleet.begin(opened)
    fleet.rig.pass_time(2.5)
    fleet.beat("b1", (opened.ticket, 0, 5))
    fleet.ask(wire.FinishTicket(opened.ticket, 0), Done)
    crowd(fleet, 2)
    assert excess_s(fleet) == pytest.approx(2.5, abs=0.1)


def test_places_of_who_leaves_count_no_more_nor_do_those_who_have_them() -> None:
    fleet = fleet_of(batch=2)
    number, claimed, _ = fleet.install(small(fleet))
    fleet.join("d2", batch=1)
    fleet.beat("d1", (number, claimed.token, 5), draining=True)
    crowd(fleet, 2)
    # A third would wait for two to finish at the one place that takes anybody.
    assert excess_s(fleet) == pytest.approx(2.0, abs=0.01)


def test_what_runs_unpresented_has_its_place() -> None:
    fleet = fleet_of(batch=2)
    fleet.rig.takeover(fleet.rig.master.core.epoch + 1)
    fleet.rig.workers["w1"].join()
    fleet.join("p1", "prefill")
    fleet.join("d1", batch=2)
    old = (1 << 32) + 5
    assert fleet.beat("d1", (old, old + 1, 0)) == ()
    one, other = (fleet.stage(small(fleet)) for _ in range(2))
    assert fleet.route(one.ticket).decode == "d1"
    crowd(fleet, 1)
    excess_s(fleet)  # four, with the one that nobody has presented
    fleet.rig.settle()
    assert fleet.ticket(other.ticket).slot is None  # both places are taken
    fleet.beat("d1")
    assert fleet.route(other.ticket).decode == "d1"
