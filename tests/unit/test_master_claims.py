"""Claims: one counts, every other is fenced; shedding, re-routes, strangers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore import limits
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master.tickets import TicketState
from tests.unit.master_rig import chain, failure
from tests.unit.replaced import replaced
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message


def refusal(fleet: Fleet, message: Message) -> str:
    """The code of the failure that answers it."""
    return failure(fleet.rig.ask(fleet.rig.engine, message)).code


def test_a_failed_route_is_fenced_and_another_worker_chosen() -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.join("d2")
    ticket, claimed, first = fleet.install()
    route = fleet.ticket(ticket).route
    again = fleet.route(ticket, above=route)
    assert again.route > route
    assert again.decode != first
    old = claimed.token
    for message in (
        wire.TicketInstalled(ticket, old),
        wire.FinishTicket(ticket, old),
        wire.ShedTicket(ticket, old, chain(1, 2), wire.TailRef(), (7, 8)),
        wire.ClaimTicket(ticket, route, first, fleet.lives[first]),
    ):
        assert refusal(fleet, message) == "fenced", message
    taken = fleet.claim(ticket, again)
    assert taken.token > old
    assert fleet.beat(first, (ticket, old, 300)) == (ticket,)
    fleet.ask(wire.TicketInstalled(ticket, taken.token), Done)
    assert refusal(fleet, wire.FinishTicket(ticket, taken.token + 1)) == "fenced"
    assert refusal(fleet, wire.FinishTicket(ticket, 0)) == "fenced"
    fleet.ask(wire.FinishTicket(ticket, taken.token), Done)
    fleet.assert_nothing_held()


def test_where_nobody_else_is_the_same_worker_gets_another_try() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.stage().ticket
    route = fleet.route(ticket)
    assert fleet.route(ticket, above=route.route).decode == route.decode


def test_strangers_claim_nothing() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.stage().ticket
    route = fleet.route(ticket)
    fleet.join("d2")
    claim = wire.ClaimTicket(ticket, route.route, "d2", fleet.lives["d2"])
    assert refusal(fleet, claim) == "access_denied"
    unknown = msgspec.structs.replace(claim, worker="d9")
    assert refusal(fleet, unknown) == "fenced"
    wrong_life = wire.ClaimTicket(ticket, route.route, "d1", fleet.lives["d1"] - 1)
    assert refusal(fleet, wrong_life) == "fenced"
    wrong_route = wire.ClaimTicket(ticket, route.route - 1, "d1", fleet.lives["d1"])
    assert refusal(fleet, wrong_route) == "fenced"
    assert refusal(fleet, wire.ClaimTicket(1, 1, "d1", fleet.lives["d1"])) == "unknown_ticket"
    assert fleet.ticket(ticket).state is TicketState.ROUTED


def test_claiming_again_has_a_higher_token_and_installing_ends_that() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket = fleet.stage().ticket
    route = fleet.route(ticket)
    first, second = fleet.claim(ticket, route), fleet.claim(ticket, route)
    assert second.token > first.token
    assert refusal(fleet, wire.TicketInstalled(ticket, first.token)) == "fenced"
    fleet.ask(wire.TicketInstalled(ticket, second.token), Done)
    fleet.ask(wire.TicketInstalled(ticket, second.token), Done)
    claim = wire.ClaimTicket(ticket, route.route, "d1", fleet.lives["d1"])
    assert refusal(fleet, claim) == "fenced"


def test_shedding_hands_on_what_was_generated() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, worker = fleet.install(fleet.wish(seed=1))
    fleet.join("d2")
    tail = wire.TailRef(fleet.tails.id, fleet.put_tail(5), 4096)
    shed = wire.ShedTicket(ticket, claimed.token, chain(1, 3), tail, (7, 8, 9))
    fleet.ask(shed, Done)
    fleet.ask(shed, Done)
    route = fleet.route(ticket, above=fleet.ticket(ticket).route)
    assert (worker, route.decode) == ("d1", "d2")
    taken = fleet.claim(ticket, route)
    assert (taken.keys, taken.tail, taken.tokens) == (chain(1, 3), tail, (7, 8, 9))
    fleet.ask(wire.CancelTicket(ticket), Done)
    assert fleet.tails.probe(tail.key) == b"\0"
    fleet.assert_nothing_held()


def test_what_outgrew_its_expectation_waits_with_more_credit_and_until_its_deadline() -> None:
    """Somebody has been reading the answer: it is not given up as what is staged only is."""
    fleet = Fleet()
    fleet.pair()
    wish = fleet.wish(seed=1, new_tokens=2, deadline_s=90.0)
    ticket, claimed, _ = fleet.install(wish)
    fleet.beat("d1", draining=True)
    said = tuple(range(7, 207))
    fleet.ask(wire.ShedTicket(ticket, claimed.token, chain(1, 2), wire.TailRef(), said), Done)
    grown = wish.prompt_tokens + len(said) + limits.OVERGROWN_TOKENS
    assert fleet.ticket(ticket).credit_tokens == grown
    for _ in range(80):
        fleet.rig.pass_time(1.0)
        fleet.beat("d1", draining=True)
    assert fleet.ticket(ticket).state is TicketState.STAGED
    fleet.rig.pass_time(15.0)
    assert fleet.rig.master.core.tickets.find(ticket) is None
    fleet.assert_nothing_held()


def test_what_outgrew_its_expectation_wants_no_more_than_somebody_has() -> None:
    """It waited until its deadline, though there was a worker that held it and a little more."""
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", capacity=500)
    ticket, claimed, _ = fleet.install(fleet.wish(seed=1, new_tokens=2))
    said = tuple(range(220))
    fleet.beat("d1", (ticket, claimed.token, 266 + len(said)))
    shed = wire.ShedTicket(ticket, claimed.token, chain(1, 2), wire.TailRef(), (7, *said))
    fleet.ask(shed, Done)
    assert fleet.ticket(ticket).credit_tokens == 500
    assert fleet.route(ticket, above=fleet.ticket(ticket).route).decode == "d1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", chain(2, 3)),
        ("keys", b"x"),
        ("keys", bytes(32 * 5000)),
        ("tokens", (8,)),
        ("tokens", (7, -1)),
        ("tokens", (7, 1 << 40)),
        ("tail.namespace", b"other"),
        ("tail.key", b"short"),
        ("tail.size_bytes", 0),
        ("tail.size_bytes", 1 << 40),
    ],
)
def test_what_is_shed_has_to_continue_what_there_was(field: str, value: object) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install(fleet.wish(seed=1))
    tail = wire.TailRef(fleet.tails.id, chain(9, 1), 4096)
    shed = wire.ShedTicket(ticket, claimed.token, chain(1, 2), tail, (7,))
    bad = failure(fleet.rig.ask(fleet.rig.engine, replaced(shed, field, value)))
    assert (bad.code, bad.text.split(":")[0]) == ("bad_value", field)
    assert fleet.ticket(ticket).state is TicketState.INSTALLED


def test_staging_is_the_named_worker_s_and_safe_to_repeat() -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.join("p2", "prefill")
    opened = fleet.open(fleet.wish(seed=1))
    other = {"p1": "p2", "p2": "p1"}[opened.prefill]
    begin = wire.BeginPrefill(opened.ticket, other, fleet.lives[other])
    assert refusal(fleet, begin) == "access_denied"
    early = fleet.stage_message(opened)
    assert refusal(fleet, early) == "fenced"
    fleet.begin(opened)
    fleet.begin(opened)
    wrong = msgspec.structs.replace(early, keys=chain(2, 2))
    assert refusal(fleet, wrong) == "bad_value"
    assert refusal(fleet, msgspec.structs.replace(early, tokens=())) == "bad_value"
    fleet.ask(early, Done)
    fleet.ask(early, Done)
    fleet.route(opened.ticket)
    fleet.ask(early, Done)
    assert refusal(fleet, msgspec.structs.replace(early, tokens=(8,))) == "fenced"
    assert refusal(fleet, wire.FailPrefill(opened.ticket, opened.prefill)) == "fenced"
