"""Whoever is admitted has room kept on one worker: a finished prefill has a place to go."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master import admitting, room
from master.tickets import TicketState
from master.tunables import Tunables
from tests.unit.master_rig import failure
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from master.fleets import Fleet as FleetOfMaster
    from master.fleets import FleetWorker
    from master.tickets import Ticket

SEED = 1


def fleet_of(*capacities: int, colocation: str = "never", routing: str = "least_loaded") -> Fleet:
    """Decode workers d0, d1, ... with so many KV tokens, all of which may be promised."""
    fleet = Fleet(Tunables(
        "test", replicas=1, colocation=colocation, decode_routing=routing,
        decode_occupancy_max=1.0, staging_bytes=1 << 30,
    ))  # fmt: skip
    fleet.join("p1", "prefill")
    for number, capacity in enumerate(capacities):
        fleet.join(f"d{number}", capacity=capacity, batch=100)
    return fleet


def of_tokens(fleet: Fleet, tokens: int, adapter: str = "") -> wire.OpenTicket:
    """A request that takes so many, with next to nothing to compute."""
    return fleet.wish(
        pages=0, behind=1, new_tokens=tokens - 1, adapter=adapter, first_token_s=1e6
    )  # fmt: skip


def admit(fleet: Fleet, tokens: int) -> wire.TicketOpened:
    return fleet.open(of_tokens(fleet, tokens))


def stage(fleet: Fleet, opened: wire.TicketOpened) -> int:
    fleet.begin(opened)
    fleet.ask(fleet.stage_message(opened), Done)
    return opened.ticket


def worker(fleet: Fleet, name: str) -> FleetWorker:
    (own,) = fleet.rig.master.core.tickets.fleets
    return own.workers[name]


def kept_on(fleet: Fleet, opened: wire.TicketOpened) -> str:
    found = fleet.ticket(opened.ticket).room
    return "" if found is None else found.name


def test_what_two_workers_have_together_helps_nobody() -> None:
    fleet = fleet_of(1000, 1000)
    first = [admit(fleet, 560), admit(fleet, 560)]
    refused = fleet.throttled(of_tokens(fleet, 480))
    assert refused.reason == "decode_occupancy"
    assert refused.text == (
        "440 KV tokens are the most that one worker has left, 480 more are wanted"
    )
    assert 0.05 <= refused.retry_after_s <= 30
    admit(fleet, 440)
    fleet.ask(wire.CancelTicket(first[0].ticket), Done)
    admit(fleet, 480)


def test_room_is_kept_where_least_is_left_and_whoever_is_ready_first_leaves_it() -> None:
    fleet = fleet_of(1000, 1000, routing="least_loaded")
    opened = [admit(fleet, tokens) for tokens in (480, 600, 400, 520)]
    assert [kept_on(fleet, each) for each in opened] == ["d0", "d1", "d1", "d0"]
    fleet.throttled(of_tokens(fleet, 2))
    # Each goes where it has room, whatever the policy thinks of it.
    routed = [fleet.route(stage(fleet, each)).decode for each in reversed(opened)]
    assert routed == ["d0", "d1", "d1", "d0"]
    assert {kept_on(fleet, each) for each in opened} == {""}


def test_who_has_room_kept_goes_elsewhere_if_that_is_better_and_leaves_it_to_others() -> None:
    fleet = fleet_of(1000, 1000)
    one, other = admit(fleet, 100), admit(fleet, 100)
    assert (kept_on(fleet, one), kept_on(fleet, other)) == ("d0", "d0")
    routed = [fleet.route(stage(fleet, each)).decode for each in (one, other)]
    assert set(routed) == {"d0", "d1"}
    admit(fleet, 900)
    admit(fleet, 900)


@pytest.mark.parametrize("routing", ["least_loaded", "kv_aware"])
def test_a_finished_prefill_always_has_a_place_to_go(routing: str) -> None:
    """Requests of any size come, are ready and end in any order; what was expected is right."""
    dice, fleet = Random(SEED), fleet_of(1000, 700, 1300, routing=routing)
    computing: list[wire.TicketOpened] = []
    running: list[int] = []
    refused = 0
    for step in range(250):
        kind = dice.choice(("open", "open", "open", "stage", "stage", "end"))
        if kind == "open":
            wish = of_tokens(fleet, dice.choice((60, 200, 650)))
            reply = fleet.rig.ask(fleet.rig.engine, wish)
            refused += isinstance(reply, wire.Throttled)
            if isinstance(reply, wire.TicketOpened):
                computing.append(reply)
        elif kind == "stage" and computing:
            ticket = stage(fleet, computing.pop(dice.randrange(len(computing))))
            fleet.rig.tick()
            assert fleet.ticket(ticket).state is TicketState.ROUTED, (SEED, routing, step)
            running.append(ticket)
        elif kind == "end" and running:
            fleet.ask(wire.CancelTicket(running.pop(dice.randrange(len(running)))), Done)
        for name in ("p1", "d0", "d1", "d2"):
            fleet.beat(name)
    assert refused > 10, (SEED, routing)
    assert not fleet.rig.master.core.counters["tickets_expired"]


def test_nobody_is_admitted_without_room() -> None:
    fleet = fleet_of(1000, 1000)
    admit(fleet, 560)
    admit(fleet, 560)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admitting, "_check_credit", lambda *_: None)
        with pytest.raises(AssertionError):  # I44
            fleet.rig.ask(fleet.rig.engine, of_tokens(fleet, 480))


def test_nobody_is_routed_into_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(1000, 1000)
    large, small = admit(fleet, 900), admit(fleet, 100)
    other = admit(fleet, 150)
    assert [kept_on(fleet, each) for each in (large, small, other)] == ["d0", "d0", "d1"]
    monkeypatch.setattr(room, "fits", lambda *_: True)  # the guard, switched off
    fleet.ask(fleet.beat_message("d1", draining=True), wire.FleetNoted)
    fleet.route(stage(fleet, other))
    monkeypatch.undo()
    ticket = stage(fleet, large)
    fleet.rig.settle()
    assert fleet.ticket(ticket).state is TicketState.STAGED  # what the guard is for


def test_those_of_a_lost_worker_have_room_elsewhere_behind_those_that_had_it_before() -> None:
    fleet = fleet_of(1000, 1000)
    runs = stage(fleet, admit(fleet, 700))
    lost = fleet.route(runs).decode
    (stays,) = {"d0", "d1"} - {lost}
    waits = admit(fleet, 300)  # least is left there
    assert kept_on(fleet, waits) == lost
    first, second = admit(fleet, 400), admit(fleet, 300)
    assert (kept_on(fleet, first), kept_on(fleet, second)) == (stays, stays)
    fleet.ask(wire.LeaveFleet(fleet.space.id, lost, fleet.lives[lost]), Done)
    assert list(worker(fleet, stays).kept) == [
        first.ticket, second.ticket, runs, waits.ticket,
    ]  # fmt: skip
    assert worker(fleet, stays).open_tokens == 1000 - 400 - 300 - 700 - 300
    for late in (waits, second, first):
        stage(fleet, late)
    fleet.rig.settle()
    states = [fleet.ticket(each.ticket).state for each in (first, second)]
    assert states == [TicketState.ROUTED, TicketState.ROUTED]
    # 300 are free: enough for the last one, had not the one before it come first.
    assert fleet.ticket(runs).state is TicketState.STAGED
    assert fleet.ticket(waits.ticket).state is TicketState.STAGED
    assert fleet.throttled(of_tokens(fleet, 2)).reason == "decode_occupancy"
    fleet.ask(wire.CancelTicket(first.ticket), Done)
    assert fleet.route(runs, above=fleet.ticket(runs).route).decode == stays
    fleet.ask(wire.CancelTicket(second.ticket), Done)
    assert fleet.route(waits.ticket).decode == stays


def test_where_nobody_is_left_there_is_room_again_once_somebody_joins() -> None:
    fleet = fleet_of(1000)
    opened = admit(fleet, 600)
    fleet.ask(wire.LeaveFleet(fleet.space.id, "d0", fleet.lives["d0"]), Done)
    assert kept_on(fleet, opened) == ""
    fleet.join("d1", capacity=500)
    assert kept_on(fleet, opened) == ""  # nor is it kept where it never fits
    fleet.join("d2", capacity=600)
    assert kept_on(fleet, opened) == "d2"


def test_a_worker_that_takes_nothing_new_keeps_no_room() -> None:
    fleet = fleet_of(1000, 1000)
    opened = admit(fleet, 600)
    fleet.beat("d0", draining=True)
    assert kept_on(fleet, opened) == "d1"
    fleet.throttled(of_tokens(fleet, 500))
    fleet.beat("d0")
    admit(fleet, 1000)


def test_a_worker_that_is_to_change_its_role_keeps_no_room() -> None:
    fleet = fleet_of(1000, 1000)
    opened = admit(fleet, 600)
    (own,) = fleet.rig.master.core.tickets.fleets
    fleet.join("d0", capacity=0, role="prefill")
    assert kept_on(fleet, opened) == "d1"
    assert own.workers["d0"].kept == {}


def test_who_needs_an_adapter_has_room_where_that_is() -> None:
    fleet = fleet_of(1000)
    fleet.join("p1", "prefill", adapters=("lora",))
    fleet.join("d1", capacity=1000, adapters=("lora",))
    opened = fleet.open(of_tokens(fleet, 600, "lora"))
    assert kept_on(fleet, opened) == "d1"
    fleet.throttled(of_tokens(fleet, 600, "lora"))
    admit(fleet, 600)


def test_nothing_is_run_alone_in_room_of_others() -> None:
    fleet = fleet_of(colocation="always")
    fleet.join("b1", "both", capacity=1000)
    fleet.join("d1", capacity=1000)
    fleet.beat("p1", draining=True)
    opened = admit(fleet, 600)
    assert opened.alone == "always"
    wide = stage(fleet, opened)  # it has thought better of it
    assert kept_on(fleet, opened) == "b1"
    again = admit(fleet, 600)
    assert (again.alone, kept_on(fleet, again)) == ("", "d1")
    assert fleet.route(wide).decode == "b1"


def test_an_answer_that_outgrows_its_room_takes_it_from_those_that_come_later() -> None:
    fleet = fleet_of(1000)
    runs = stage(fleet, admit(fleet, 300))
    claimed = fleet.claim(runs, fleet.route(runs))
    waits = stage(fleet, admit(fleet, 600))
    fleet.ask(wire.TicketInstalled(runs, claimed.token), Done)
    fleet.beat("d0", (runs, claimed.token, 500))
    fleet.rig.settle()
    assert fleet.ticket(waits).state is TicketState.STAGED
    assert worker(fleet, "d0").open_tokens == -100
    fleet.throttled(of_tokens(fleet, 2))
    fleet.ask(wire.FinishTicket(runs, claimed.token), Done)
    assert fleet.route(waits).decode == "d0"


def test_an_answer_that_outgrows_its_room_leaves_room_elsewhere_to_those_behind_it() -> None:
    fleet = fleet_of(1000, 1000)
    runs = stage(fleet, admit(fleet, 500))
    route = fleet.route(runs)
    claimed, (other,) = fleet.claim(runs, route), {"d0", "d1"} - {route.decode}
    waits = admit(fleet, 400)
    assert kept_on(fleet, waits) == route.decode
    fleet.ask(wire.TicketInstalled(runs, claimed.token), Done)
    fleet.beat(route.decode, (runs, claimed.token, 900))
    assert fleet.throttled(of_tokens(fleet, 700)).text.startswith("600 KV tokens are the most")
    assert kept_on(fleet, waits) == other
    admit(fleet, 600)
    assert fleet.route(stage(fleet, waits)).decode == other


def test_what_a_new_master_was_told_of_does_not_stay_with_the_first_worker_that_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fleet_of(1000)
    fleet.join("d0", capacity=2100)
    earlier = [fleet.ticket(admit(fleet, 700).ticket) for _ in range(3)]
    fleet.rig.takeover(fleet.rig.master.core.epoch + 1)
    fleet.rig.workers["w1"].join()
    fleet.join("p1", "prefill")
    for each in earlier:
        own = each.id, each.wish.namespace, each.wish.request, each.wish.keys, 1, 699, 1.0, 60.0
        fleet.ask(wire.PresentTicket(*own, 0, "p1", wire.TailRef(), ()), Done)
    for name in ("d0", "d1", "d2"):
        fleet.join(name, capacity=1000)
    assert [len(worker(fleet, name).kept) for name in ("d0", "d1", "d2")] == [3, 0, 0]
    monkeypatch.setattr(room, "SPREAD_MAX", 1)  # so many at once
    for _ in range(2):
        assert "admitted before" in fleet.throttled(of_tokens(fleet, 600)).text
    assert [list(worker(fleet, name).kept) for name in ("d0", "d1", "d2")] == [
        [each.id] for each in earlier
    ]
    assert "300 KV tokens are the most" in fleet.throttled(of_tokens(fleet, 600)).text
    admit(fleet, 300)


def test_room_is_spread_only_to_where_the_adapter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SPREAD_MAX", 1)  # what cannot be moved holds up nobody
    fleet = fleet_of(1000)
    fleet.join("p1", "prefill", adapters=("lora",))
    fleet.join("d1", capacity=1000, adapters=("lora",))
    runs = fleet.open(of_tokens(fleet, 600, "lora"))
    waits = fleet.open(of_tokens(fleet, 400, "lora"))
    fleet.join("d1", capacity=700, adapters=("lora",))
    admit(fleet, 700)
    assert (kept_on(fleet, runs), kept_on(fleet, waits)) == ("d1", "d1")


def test_those_for_whom_there_is_no_room_are_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fleet_of(10_000)
    runs = stage(fleet, admit(fleet, 2000))
    claimed = fleet.claim(runs, fleet.route(runs))
    many = [admit(fleet, 100) for _ in range(80)]
    fleet.ask(wire.TicketInstalled(runs, claimed.token), Done)
    fleet.beat("d0", (runs, claimed.token, 9950))
    for each in many:
        stage(fleet, each)
    asked: list[int] = []
    takes = room.takes

    def noted(where: FleetWorker, ticket: Ticket) -> bool:
        asked.append(ticket.id)
        return takes(where, ticket)

    monkeypatch.setattr(room, "takes", noted)
    fleet.beat("d0", (runs, claimed.token, 9951))
    fleet.rig.tick()
    assert asked == [many[0].ticket]
    fleet.ask(wire.CancelTicket(runs), Done)
    fleet.rig.settle()
    assert {fleet.ticket(each.ticket).state for each in many} == {TicketState.ROUTED}


def test_what_is_open_is_known_after_each_of_many_moves() -> None:
    dice, fleet = Random(SEED), fleet_of(900, 1000, 1100)
    fleet.join("p1", "prefill", adapters=("lora",))
    fleet.join("d3", capacity=950, adapters=("lora",))
    sizes = (dice.randrange(100, 350) for _ in range(20))
    replies = [
        fleet.rig.ask(fleet.rig.engine, of_tokens(fleet, tokens, dice.choice(("", "lora"))))
        for tokens in sizes
    ]
    tickets = [fleet.ticket(each.ticket) for each in replies if isinstance(each, wire.TicketOpened)]
    assert len(tickets) > 8, SEED
    (own,) = fleet.rig.master.core.tickets.fleets
    openings = room.Openings(own)
    for step in range(100):
        openings.move(dice.choice(tickets))
        anew = room.Openings(own)
        for each in tickets:
            assert openings.best(each) is anew.best(each), (SEED, step)
        fleet.rig.master.check_invariants()


def test_workers_are_looked_at_once_for_all_that_a_lost_one_had_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fleet_of(2000, 2000, 2000)
    many = [admit(fleet, 100) for _ in range(15)]
    fleet.beat("d1", draining=True)
    fleet.beat("d2", draining=True)
    for each in many[:5]:
        assert fleet.route(stage(fleet, each)).decode == "d0"
    fleet.beat("d1")
    fleet.beat("d2")
    made: list[object] = []
    begin = room.Openings.__init__

    def noted(self: room.Openings, own: FleetOfMaster) -> None:
        made.append(self)
        begin(self, own)

    monkeypatch.setattr(room.Openings, "__init__", noted)
    fleet.ask(wire.LeaveFleet(fleet.space.id, "d0", fleet.lives["d0"]), Done)
    assert [kept_on(fleet, each) for each in many] == ["d1"] * 15
    assert len(made) == 1


@pytest.mark.parametrize(("prompt", "new", "field"), [(1, 1000, "new_tokens"), (1001, 1, "prompt")])
def test_what_no_worker_could_ever_hold_is_refused_with_both_numbers(
    prompt: int, new: int, field: str
) -> None:
    fleet = fleet_of(1000)
    for _ in range(4):
        fleet.rig.pass_time(1.0)
        for name in ("p1", "d0"):
            fleet.beat(name)
    pages, behind = divmod(prompt, 128)
    wish = fleet.wish(pages=pages, behind=behind, new_tokens=new)
    refused = failure(fleet.rig.ask(fleet.rig.engine, wish))
    assert refused.code == "bad_value"
    assert refused.text.startswith(field)
    assert f"at most 999: {prompt + new} in all" in refused.text
    assert "the largest decode worker has 1000" in refused.text
