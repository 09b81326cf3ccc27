"""What a gateway tells a new master of the tickets that it holds."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.client.steps import drive
from kvstore.client.ticket_holder import TicketHolder
from kvstore.client.tickets import HandOver, TicketRequest
from kvstore.errors import AccessDenied, BadValue, CallerError, DeadlineExceeded, UnknownTicket
from kvstore.ids import KEY_BYTES, Epoch, generation_of
from kvstore.namespace import tails
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import (
    AwaitRoute,
    GetTerm,
    PresentTicket,
    TailRef,
    Term,
    TicketOpened,
    TicketRouted,
)
from tests.unit.client_scripts import Script, opened

SPACE = opened()
CHAIN = SPACE.chain(range(10))
REQUEST = TicketRequest(SPACE, "request-1", CHAIN, 10, 5, 2.0, 60.0, "lora")
ONE, TWO = generation_of(Epoch(1), 1), generation_of(Epoch(1), 2)
FIRST, SECOND = TicketOpened(ONE, 0, "p1", "host:1"), TicketOpened(TWO, 0, "p1", "host:1")
TAIL = TailRef(tails("tests").id, bytes(KEY_BYTES), 2048)
ROUTED = TicketRouted(generation_of(Epoch(2), 3), "d1", "host:2")


def presented(ticket: int = ONE, passed_s: float = 0.0) -> PresentTicket:
    """As it was opened so long ago, and no more is known."""
    left_s = max(0.0, 2.0 - passed_s), 60.0 - passed_s
    return PresentTicket(
        ticket, SPACE.namespace.id, "request-1", CHAIN.packed, 10, 5, *left_s, 0, "p1",
        TailRef(), (), "lora",
    )  # fmt: skip


def held(script: Script, *tickets: TicketOpened) -> TicketHolder:
    """A holder of these, whose master has the epoch 1."""
    holder = TicketHolder(script.clock)
    drive(holder.keep(), script.will(Term(1)))
    for each in tickets:
        holder.hold(REQUEST, each)
    script.asked.clear()
    return holder


def test_nothing_is_presented_while_the_same_master_leads() -> None:
    script = Script()
    holder = held(script, FIRST)
    assert drive(holder.keep(), script.will(Term(1))) == []
    assert script.asked == [GetTerm()]


def test_a_new_master_hears_of_all_that_is_held_once() -> None:
    script = Script()
    holder = held(script, FIRST, SECOND)
    holder.note(TWO, worker="d1", token=9)
    holder.note(TWO, token=8, done=HandOver(CHAIN.slice(0, 1), (7, 8), TAIL))
    script.clock.advance(5.0)
    assert drive(holder.keep(), script.will(Term(2), Done(), Done())) == []
    second = msgspec.structs.replace(
        presented(TWO, 5.0), token=9, worker="d1", keys=CHAIN.packed[:KEY_BYTES], tokens=(7, 8),
        tail=TAIL,
    )  # fmt: skip
    assert script.asked == [GetTerm(), presented(ONE, 5.0), second]
    drive(holder.keep(), script.will(Term(2)))
    assert script.asked[3:] == [GetTerm()]


def test_what_one_worker_does_alone_is_presented_as_that() -> None:
    script = Script()
    holder = held(script, FIRST)
    holder.note(ONE, worker="d1", token=9, done=HandOver(CHAIN, (7,)))
    holder.runs_alone(ONE, "b1")
    drive(holder.keep(), script.will(Term(2), Done()))
    assert script.asked[-1] == msgspec.structs.replace(presented(), worker="b1")


def test_what_is_refused_is_given_up() -> None:
    script = Script()
    holder = held(script, FIRST, SECOND)
    answers = Term(2), AccessDenied("another holds it"), Done()
    assert drive(holder.keep(), script.will(*answers)) == [ONE]
    assert len(holder) == 1
    holder.note(ONE, token=9)  # by whoever has not heard of that yet
    drive(holder.keep(), script.will(Term(3), Done()))
    assert script.asked[-1] == presented(TWO)


def test_a_master_that_goes_away_meanwhile_is_followed_by_another_try() -> None:
    script = Script()
    holder = held(script, FIRST)
    with pytest.raises(DeadlineExceeded):
        drive(holder.keep(), script.will(Term(2), DeadlineExceeded("gone")))
    assert drive(holder.keep(), script.will(Term(3), Done())) == []
    assert script.asked[-1] == presented()


def test_a_route_is_awaited_at_a_master_that_did_not_know_the_ticket() -> None:
    script = Script()
    holder = held(script, FIRST)
    answers = UnknownTicket("ticket 1"), Done(), ROUTED
    assert drive(holder.await_route(ONE, 0, timeout_s=5.0), script.will(*answers)) == ROUTED
    assert script.asked == [AwaitRoute(ONE, 0, 4.0), presented(), AwaitRoute(ONE, 0, 4.0)]


@pytest.mark.parametrize("refusal", [AccessDenied("too late"), BadValue("keys", 1, "fewer")])
def test_a_request_whose_ticket_a_new_master_refuses_has_to_begin_anew(
    refusal: CallerError,
) -> None:
    """Not to be mended by who asked: it was told that access is denied, or its request is bad."""
    script = Script()
    holder = held(script, FIRST)
    answers = UnknownTicket("ticket 1"), refusal
    with pytest.raises(UnknownTicket, match=str(refusal)):
        drive(holder.await_route(ONE, 0), script.will(*answers))
    holder = held(script, FIRST)
    drive(holder.keep(), script.will(Term(2), Done()))
    holder.note(ONE, done=HandOver(CHAIN, (7,)))
    with pytest.raises(UnknownTicket, match=str(refusal)):
        drive(holder.await_route(ONE, 0), script.will(refusal))


def test_what_is_staged_only_after_it_was_presented_is_presented_again() -> None:
    script = Script()
    holder = held(script, FIRST)
    drive(holder.keep(), script.will(Term(2), Done()))
    holder.note(ONE, done=HandOver(CHAIN, (7,)))
    script.asked.clear()
    staged = msgspec.structs.replace(presented(), tokens=(7,))
    drive(holder.await_route(ONE, 2), script.will(Done(), ROUTED))
    later = TicketRouted(ROUTED.route + 1, "d2", "host:3")
    drive(holder.await_route(ONE, ROUTED.route), script.will(later))
    assert script.asked == [staged, AwaitRoute(ONE, 2, 8.0), AwaitRoute(ONE, ROUTED.route, 8.0)]


def test_what_a_new_master_has_routed_ahead_is_not_presented_again() -> None:
    """By now there may be a claim of it that its gateway does not know: it would be refused."""
    script = Script()
    holder = held(script, FIRST)
    drive(holder.keep(), script.will(Term(2), Done()))
    drive(holder.await_route(ONE, 0), script.will(ROUTED))
    holder.note(ONE, done=HandOver(CHAIN, (7,)))
    script.asked.clear()
    assert drive(holder.await_route(ONE, 0), script.will(ROUTED)) == ROUTED
    assert script.asked == [AwaitRoute(ONE, 0, 8.0)]


def test_what_the_master_before_had_opened_is_presented_however_late_that_is_heard() -> None:
    script = Script()
    holder = held(script)
    drive(holder.keep(), script.will(Term(2)))
    holder.hold(REQUEST, FIRST)
    holder.hold(REQUEST, TicketOpened(generation_of(Epoch(2), 1), 0, "p1", "host:1"))
    script.asked.clear()
    drive(holder.keep(), script.will(Term(2), Done()))
    assert script.asked == [GetTerm(), presented()]


def test_what_a_master_has_routed_it_knows() -> None:
    script = Script()
    holder = held(script, FIRST)
    drive(holder.await_route(ONE, 0), script.will(UnknownTicket("ticket 1"), Done(), ROUTED))
    script.asked.clear()
    drive(holder.keep(), script.will(Term(2)))
    assert script.asked == [GetTerm()]


def test_what_is_not_held_is_not_presented() -> None:
    script = Script()
    holder = held(script, FIRST)
    holder.drop(ONE)
    holder.drop(ONE)
    with pytest.raises(UnknownTicket):
        drive(holder.await_route(ONE, 0), script.will(UnknownTicket("ticket 1")))
    drive(holder.keep(), script.will(Term(2)))
    assert script.asked == [AwaitRoute(ONE, 0, 8.0), GetTerm()]
