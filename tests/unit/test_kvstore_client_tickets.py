"""What gateways and inference workers ask about tickets, and what they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvstore.client import tickets
from kvstore.client.steps import drive
from kvstore.client.tickets import HandOver, Member, TicketRequest
from kvstore.errors import BadValue, MalformedMessage, Throttled
from kvstore.exit_codes import ExitCode, exit_code_of
from kvstore.ids import KEY_BYTES
from kvstore.namespace import tails
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from tests.unit.client_scripts import PAGE_TOKENS, Script, opened

if TYPE_CHECKING:
    from kvstore.client.steps import Steps
    from kvstore.wire.messages.base import Message

SPACE = opened()
NAMESPACE = SPACE.namespace.id
PROMPT = tuple(range(10))
CHAIN = SPACE.chain(PROMPT)
REQUEST = TicketRequest(SPACE, "request-1", CHAIN, len(PROMPT), 5, 2.0, 60.0, "lora", ("p0",))
MEMBER = Member(NAMESPACE, "d1", 3, 0.5, 3.0)
TAIL = wire.TailRef(tails("tests").id, bytes(KEY_BYTES), 2048)
DONE = HandOver(CHAIN, (7,), TAIL)
COLUMNS: tuple[Any, ...] = (CHAIN.packed, TAIL, (7,))
OPENED = wire.TicketOpened(9, 8, "p1", "host:1")
CLAIMED = wire.TicketClaimed(1, NAMESPACE, PAGE_TOKENS, 10, *COLUMNS)
JOIN = wire.JoinFleet(NAMESPACE, "d1", "decode", "host:2", "host", "", "", 1000, 8)
BEAT = wire.FleetBeat(NAMESPACE, "d1", 3, 0, 0.0, 0.0, 0.0, 0.0, ())
LIST = wire.TicketList(0, (), (), 0, 0)


@pytest.mark.parametrize(
    ("plan", "asked", "reply", "result"),
    [
        (
            tickets.open_ticket(REQUEST),
            wire.OpenTicket(
                NAMESPACE, "request-1", CHAIN.packed, 10, 5, 2.0, 60.0, "lora", ("p0",)
            ),
            OPENED,
            OPENED,
        ),
        (tickets.fail_prefill(9, "p1"), wire.FailPrefill(9, "p1"), OPENED, OPENED),
        (tickets.run_alone(9, 77), wire.RunAlone(9, 77), OPENED, OPENED),
        (
            tickets.await_route(9, 2, timeout_s=5.0),
            wire.AwaitRoute(9, 2, 4.0),
            wire.TicketRouted(3, "d1", "host:2"),
            wire.TicketRouted(3, "d1", "host:2"),
        ),
        (tickets.await_route(9, 2), wire.AwaitRoute(9, 2, 8.0), wire.TicketRouted(0, "", ""), None),
        (tickets.cancel_ticket(9), wire.CancelTicket(9), Done(), None),
        (tickets.join_fleet(JOIN), JOIN, wire.FleetJoined(3, 0.5, 3.0), MEMBER),
        (tickets.beat(BEAT), BEAT, wire.FleetNoted((4, 5)), wire.FleetNoted((4, 5))),
        (tickets.leave_fleet(MEMBER), wire.LeaveFleet(NAMESPACE, "d1", 3), Done(), None),
        (tickets.begin_prefill(9, MEMBER), wire.BeginPrefill(9, "d1", 3), Done(), None),
        (tickets.begin_prefill(9, MEMBER, 70), wire.BeginPrefill(9, "d1", 3, 70), Done(), None),
        (
            tickets.stage_ticket(9, MEMBER, DONE),
            wire.StageTicket(9, "d1", 3, *COLUMNS),
            Done(),
            None,
        ),
        (tickets.claim_ticket(9, 3, MEMBER), wire.ClaimTicket(9, 3, "d1", 3), CLAIMED, CLAIMED),
        (
            tickets.claim_ticket(9, 3, MEMBER, is_ahead=True),
            wire.ClaimTicket(9, 3, "d1", 3, True),
            CLAIMED,
            CLAIMED,
        ),
        (
            tickets.await_parts(9, 77, [1, 0], timeout_s=5.0),
            wire.AwaitParts(9, 77, (1, 0), 4.0),
            wire.PartsSealed((2, 1), False),
            wire.PartsSealed((2, 1), False),
        ),
        (tickets.install_ticket(9, 77), wire.TicketInstalled(9, 77), Done(), None),
        (tickets.shed_ticket(9, 77, DONE), wire.ShedTicket(9, 77, *COLUMNS), Done(), None),
        (tickets.finish_ticket(9, 77), wire.FinishTicket(9, 77), Done(), None),
        (tickets.list_tickets(), wire.ListTickets(), LIST, LIST),
    ],
)
def test_each_verb_asks_one_thing(
    plan: Steps[object], asked: Message, reply: Message, result: object
) -> None:
    script = Script().will(reply)
    assert drive(plan, script) == result
    assert script.asked == [asked]


def test_what_is_throttled_says_when_to_come_again() -> None:
    for plan in (tickets.open_ticket(REQUEST), tickets.fail_prefill(9, "p1")):
        script = Script().will(wire.Throttled(1.5, "staging", "900 of 1000 bytes are staged"))
        with pytest.raises(Throttled, match=r"^900 of 1000 bytes are staged$") as caught:
            drive(plan, script)
        assert (caught.value.retry_after_s, caught.value.reason) == (1.5, "staging")
        assert exit_code_of(caught.value) is ExitCode.UNAVAILABLE


def test_an_answer_to_something_else_is_malformed() -> None:
    for plan in (tickets.open_ticket(REQUEST), tickets.await_route(9, 0)):
        with pytest.raises(MalformedMessage, match="Done in answer to"):
            drive(plan, Script().will(Done()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request", ""),
        ("request", "r" * 513),
        ("chain", CHAIN.slice(0, 1)),
        ("prompt_tokens", 12),
        ("prompt_tokens", 0),
        ("new_tokens", 0),
        ("new_tokens", True),
        ("first_token_s", 0.0),
        ("first_token_s", float("nan")),
        ("deadline_s", float("inf")),
    ],
)
def test_a_wrong_field_is_named_before_anything_is_asked(field: str, value: object) -> None:
    wrong = msgspec.structs.replace(REQUEST, **{field: value})
    script = Script()
    named = "chain" if value == 12 else field
    with pytest.raises(BadValue, match=f"^{named}: got "):
        drive(tickets.open_ticket(wrong), script)
    assert not script.asked


def test_tails_of_one_ticket_have_keys_of_their_own() -> None:
    space = tails("tests").id
    keys = {tickets.tail_key(space, ticket, counter) for ticket in (1, 11) for counter in (1, 11)}
    assert len(keys) == 4
    assert tails("other").id != space
