"""Phase 2: who waits for a route, who gets one, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master import routing
from master.tickets import TicketState
from master.tunables import Tunables
from tests.unit.master_rig import chain, failure
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from master.fleets import FleetWorker
    from master.tickets import Ticket


def test_the_answer_is_held_back_until_there_is_a_route() -> None:
    fleet = Fleet()
    fleet.pair()
    opened = fleet.open()
    rig = fleet.rig
    assert rig.ask(rig.engine, wire.AwaitRoute(opened.ticket, 0, 5.0)) is None
    asked = rig.last_request
    fleet.begin(opened)
    fleet.ask(fleet.stage_message(opened), Done)
    assert rig.reply(rig.engine, asked) is None
    rig.tick()
    routed = rig.reply(rig.engine, asked)
    assert isinstance(routed, wire.TicketRouted)
    assert routed.decode == "d1"
    assert fleet.route(opened.ticket) == routed


def test_the_answer_is_empty_when_the_time_is_up_and_at_once_without_any() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, rig = fleet.open().ticket, fleet.rig
    none = wire.TicketRouted(0, "", "")
    assert rig.ask(rig.engine, wire.AwaitRoute(ticket, 0, 0.0)) == none
    assert rig.ask(rig.engine, wire.AwaitRoute(ticket, 0, 1.0)) is None
    first = rig.last_request
    assert rig.ask(rig.engine, wire.AwaitRoute(ticket, 0, 2.0)) is None
    assert rig.reply(rig.engine, first) == none  # the later caller has its place
    second = rig.last_request
    rig.tick(1.9)
    assert rig.reply(rig.engine, second) is None
    rig.tick(0.2)
    assert rig.reply(rig.engine, second) == none


def test_who_waits_hears_that_the_ticket_has_ended() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, rig = fleet.open().ticket, fleet.rig
    assert rig.ask(rig.engine, wire.AwaitRoute(ticket, 0, 5.0)) is None
    asked = rig.last_request
    fleet.ask(wire.CancelTicket(ticket), Done)
    assert failure(rig.reply(rig.engine, asked)).code == "unknown_ticket"
    gone = wire.AwaitRoute(ticket, 0, 5.0)
    assert failure(rig.ask(rig.engine, gone)).code == "unknown_ticket"


def test_a_wait_goes_with_its_session_and_the_ticket_stays() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, rig = fleet.open().ticket, fleet.rig
    gateway = rig.open("engine", "tenant", "gateway")
    assert rig.ask(gateway, wire.AwaitRoute(ticket, 0, 5.0)) is None
    rig.close(gateway)
    assert fleet.ticket(ticket).wait is None
    assert not len(rig.master.core.tickets.waits)


def test_a_finished_prefill_waits_for_room_and_gets_it() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", batch=1)
    first, claimed, _ = fleet.install(fleet.wish(seed=1))
    waits = fleet.stage(fleet.wish(seed=2)).ticket
    rig = fleet.rig
    assert rig.ask(rig.engine, wire.AwaitRoute(waits, 0, 5.0)) is None
    asked = rig.last_request
    rig.settle()
    assert rig.reply(rig.engine, asked) is None
    fleet.ask(wire.FinishTicket(first, claimed.token), Done)
    rig.tick()
    routed = rig.reply(rig.engine, asked)
    assert isinstance(routed, wire.TicketRouted)
    assert routed.decode == "d1"


def test_a_tick_routes_some_and_the_next_ones_the_others() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", capacity=100_000, batch=100)
    many = routing.ROUTED_PER_TICK * 2 + 1
    for seed in range(many):
        fleet.stage(fleet.wish(seed=seed, pages=0, behind=5))
    (own,) = fleet.rig.master.core.tickets.fleets
    for left in (many - 8, many - 16, 0):
        fleet.rig.tick()
        assert len(own.waiting) == left


def test_no_worker_is_offered_beyond_its_room() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    for name in ("d1", "d2"):
        fleet.join(name, capacity=1000, batch=1)
    names = {fleet.route(fleet.stage(fleet.wish(seed=seed)).ticket).decode for seed in range(2)}
    assert names == {"d1", "d2"}


def test_who_wants_much_does_not_starve_behind_those_that_want_little() -> None:
    fleet = Fleet(Tunables(
        cluster="test", replicas=1, decode_routing="least_loaded", colocation="never",
        decode_occupancy_max=1.0,
    ))  # fmt: skip
    fleet.join("p1", "prefill")
    for name in ("d1", "d2"):
        fleet.join(name, capacity=2000)

    def staged(tokens: int) -> int:
        return fleet.stage(fleet.wish(pages=0, behind=60, new_tokens=tokens - 60)).ticket

    first = [staged(260) for _ in range(2)]
    on = {fleet.route(ticket).decode: ticket for ticket in first}
    assert set(on) == {"d1", "d2"}
    large = staged(750)
    for name in ("d1", "d2"):
        fleet.join(name, capacity=1000)
    (filled,) = {fleet.route(staged(260)).decode for _ in range(2)}
    assert fleet.ticket(large).state is TicketState.STAGED
    (kept,) = {"d1", "d2"} - {filled}
    fleet.ask(wire.CancelTicket(on[kept]), Done)
    assert fleet.route(large).decode == kept


def test_nothing_is_kept_for_who_fits_nobody_and_others_go_on() -> None:
    fleet = Fleet()
    fleet.pair()
    large = fleet.stage(fleet.wish(pages=1, new_tokens=900)).ticket
    small = fleet.stage(fleet.wish(seed=2)).ticket
    fleet.join("d1", capacity=1000)
    assert fleet.route(small).decode == "d1"
    assert fleet.ticket(large).state is TicketState.STAGED


def test_many_whom_nobody_can_take_hold_up_none_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "ORDERED_MAX", 2)
    fleet = Fleet()
    fleet.join("p1", "prefill", adapters=("lora",))
    fleet.join("d1", adapters=("lora",))
    for seed in range(5):
        fleet.stage(fleet.wish(seed=seed, adapter="lora"))
    fleet.ask(wire.LeaveFleet(fleet.space.id, "d1", fleet.lives["d1"]), Done)
    fleet.join("d2")
    ticket = fleet.stage(fleet.wish(seed=9)).ticket
    assert fleet.route(ticket).decode == "d2"
    monkeypatch.setattr(routing, "LOOKED_AT_MAX", 4)
    late = fleet.stage(fleet.wish(seed=10)).ticket
    fleet.rig.settle()
    assert fleet.ticket(late).state is TicketState.STAGED
    for _ in range(31):  # until the others have expired
        fleet.rig.pass_time(1.0)
        for name in ("p1", "d2"):
            fleet.beat(name)
    again = fleet.stage(fleet.wish(seed=11)).ticket
    assert fleet.route(again).decode == "d2"


def test_no_more_is_tried_for_those_that_want_as_much_as_found_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(Tunables("test", replicas=1, colocation="never", decode_occupancy_max=1.0))
    fleet.join("p1", "prefill", adapters=("lora",))
    names = [f"d{number}" for number in range(8)]

    def hold(capacity: int) -> None:
        for name in names:
            fleet.join(name, capacity=capacity, batch=8, adapters=("lora",))

    hold(2000)
    for _ in names:
        fleet.route(fleet.stage(fleet.wish(pages=0, new_tokens=1500)).ticket)
    hold(4000)
    for new_tokens, adapter in ((600, ""), (601, ""), (600, "lora"), (600, ""), (400, "")):
        fleet.stage(fleet.wish(pages=0, new_tokens=new_tokens, adapter=adapter))
    hold(2000)  # each has 490 left
    tried: list[int] = []

    def candidates(ticket: Ticket, workers: list[FleetWorker]) -> list[FleetWorker]:
        tried.append(ticket.wish.new_tokens)
        return real(ticket, workers)

    real = routing._candidates  # noqa: SLF001 -- a call costs as much as there are workers
    monkeypatch.setattr(routing, "_candidates", candidates)
    fleet.rig.tick()
    assert tried == [600, 600, 400, 600, 600]  # once more after the last one was routed


def test_who_waits_is_looked_at_when_a_beat_tells_of_other_room_not_at_each() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", batch=1)
    first, claimed, _ = fleet.install(fleet.wish(seed=1))
    fleet.stage(fleet.wish(seed=2))
    fleet.rig.settle()
    book, runs = fleet.rig.master.core.tickets, (first, claimed.token, 300)
    fleet.beat("d1", runs)
    assert not book.to_route
    fleet.beat("d1", runs, draining=True)
    fleet.rig.settle()
    fleet.beat("d1", runs)
    assert book.to_route


@pytest.mark.parametrize("policy", ["same_prefix", "transfer_balance", "least_loaded"])
def test_policies_of_all_kinds_are_asked(policy: str) -> None:
    fleet = Fleet(Tunables(cluster="test", replicas=1, decode_routing=policy, colocation="never"))
    fleet.pair()
    fleet.join("d2")
    fleet.space.put(chain(1, 2))
    first = fleet.stage(fleet.wish(seed=1)).ticket
    fleet.route(first)
    ticket = fleet.ticket(first)
    book = fleet.rig.master.core.tickets
    host = fleet.rig.master.core.workers["w1"].host
    assert ticket.slot is not None
    assert (ticket.slot.link_bytes, dict(book.source_bytes)) == (
        ticket.kv_bytes, {host: ticket.kv_bytes},
    )  # fmt: skip
    assert ticket.slot.prefixes[ticket.keys[:32]] == 1
    fleet.ask(wire.CancelTicket(first), Done)
    fleet.assert_nothing_held()


def test_prompts_without_a_full_page_share_no_prefix() -> None:
    policy = Tunables(cluster="test", replicas=1, decode_routing="same_prefix", colocation="never")
    fleet = Fleet(policy)
    fleet.join("p1", "prefill")
    for name in ("d1", "d2"):
        fleet.join(name)
    shorts = [fleet.stage(fleet.wish(pages=0)).ticket for _ in range(2)]
    assert len({fleet.route(ticket).decode for ticket in shorts}) == 2


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_timeout_is_a_time(value: float) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.open().ticket
    reply = fleet.rig.ask(fleet.rig.engine, wire.AwaitRoute(ticket, 0, value))
    assert failure(reply).code == "bad_value"
