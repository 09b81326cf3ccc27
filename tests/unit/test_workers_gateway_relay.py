"""One request's way through a fleet whose parts fail at every point."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import (
    CorruptPage,
    DeadlineExceeded,
    Fenced,
    Throttled,
    Unavailable,
    UnknownTicket,
)
from kvstore.wire.messages import tickets as wire
from tests.unit.client_scripts import opened
from tests.unit.relay_rig import END, PROMPT, STAGED, TICKET, TOKENS, Case, lines, route
from workers.gateway_relay import PREFILLS_MAX
from workers.serve_messages import DecodeAsk, Line, PrefillDone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.wire.messages.base import Message

    Act = Callable[[], Awaitable[Any]]


def test_a_request_goes_through_once() -> None:
    case = Case([STAGED], lines(5, 1, 2, 3, 4))
    assert case.run() == TOKENS
    assert case.passage.answer.finish == "length"
    assert case.master.ends() == [wire.FinishTicket(TICKET, 5)]
    assert len(case.fleet.holder) == 0
    assert case.passage.stages.reused_tokens == 4


@pytest.mark.parametrize("error", [Unavailable("x"), Fenced("x"), CorruptPage("x"), None])
@pytest.mark.parametrize("at", range(5))
def test_tokens_are_told_once_whatever_decode_dies_of(at: int, error: Exception | None) -> None:
    died = [*lines(5, *range(1, at + 1)), *([] if error is None else [error])]
    case = Case([STAGED], died, lines(6, *range(at, 5)))
    assert case.run() == TOKENS
    if at < 4:
        again = case.workers.asked[-1]
        assert isinstance(again, DecodeAsk)
        assert (again.route, again.tokens) == (route(2), (*PROMPT, *TOKENS[: at + 1]))


def test_prefill_is_tried_on_others() -> None:
    failed = [Unavailable("x")] * (PREFILLS_MAX - 1)
    case = Case([*failed, STAGED], lines(5, 1, 2, 3, 4))
    assert case.run() == TOKENS
    names = [wire.FailPrefill(TICKET, name) for name in ("p0", "p1", "p2")]
    assert case.master.heard(wire.FailPrefill) == names


def test_a_request_that_no_prefill_worker_does_is_cancelled() -> None:
    case = Case([Unavailable("x")] * PREFILLS_MAX)
    with pytest.raises(Unavailable):
        case.run()
    assert case.master.ends() == [wire.CancelTicket(TICKET)]


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    case = Case([PrefillDone(END, 0, 0.0, 0.0)])
    assert case.run() == [END]
    assert case.master.ends() == [wire.CancelTicket(TICKET)]


def test_throttled_leaves_nothing() -> None:
    case = Case([])
    case.master.refusals[wire.OpenTicket] = Throttled(2.0, "staging", "full")
    with pytest.raises(Throttled):
        case.run()
    assert (case.master.ends(), len(case.fleet.holder)) == ([], 0)


@pytest.mark.parametrize(
    ("is_satisfied", "end"),
    [(True, wire.FinishTicket(TICKET, 5)), (False, wire.CancelTicket(TICKET))],
)
def test_who_stops_early_ends_the_ticket(is_satisfied: bool, end: Message) -> None:
    case = Case([STAGED], lines(5, 1, 2, 3, 4))

    async def two() -> None:
        await case.passage.open()
        async with aclosing(case.passage.tokens()) as tokens:
            await anext(tokens)
            await anext(tokens)
            case.passage.is_satisfied = is_satisfied

    case.run(two)
    assert case.master.ends() == [end]
    assert case.workers.hung_up == 1


@pytest.mark.parametrize("turns", range(12))
def test_a_request_that_is_cancelled_at_any_moment_leaves_nothing(turns: int) -> None:
    case = Case([STAGED], lines(5, 1, 2, 3, 4))

    async def cancelled() -> None:
        running = asyncio.ensure_future(case.all())
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait((running,))
        for _ in range(20):  # what was asked before comes to its end
            await asyncio.sleep(0)

    case.run(cancelled)
    assert len(case.fleet.holder) == 0
    was_opened = any(isinstance(each, wire.OpenTicket) for each in case.master.asked)
    assert len(case.master.ends()) == was_opened


def test_the_deadline_holds() -> None:
    late = lines(5, 1, 2)
    case = Case([STAGED], late, lines(6, 3))

    async def slow() -> None:
        await case.passage.open()
        async for _ in case.passage.tokens():
            case.clock.advance(25.0)

    with pytest.raises(DeadlineExceeded):
        case.run(slow)
    assert case.master.ends() == [wire.CancelTicket(TICKET)]


def test_a_ticket_that_somebody_else_has_is_cancelled_where_it_cannot_be_finished() -> None:
    case = Case([STAGED], lines(5, 1, 2, 3, 4))
    case.master.refusals[wire.FinishTicket] = Fenced("routed anew")
    assert case.run() == TOKENS
    assert case.master.ends() == [wire.FinishTicket(TICKET, 5), wire.CancelTicket(TICKET)]


def test_a_new_master_is_told_that_a_prompt_is_staged() -> None:
    case = Case([STAGED], [Fenced("full")], lines(6, 1, 2, 3, 4))
    case.master.refusals[wire.AwaitRoute] = UnknownTicket("led by another since")
    assert case.run() == TOKENS
    (presented,) = case.master.heard(wire.PresentTicket)
    assert isinstance(presented, wire.PresentTicket)
    assert presented.tokens == (TOKENS[0],)
    assert presented.keys == opened().chain(PROMPT).packed


def test_a_prefill_worker_that_dies_once_it_has_staged_is_not_followed_by_another() -> None:
    case = Case([Unavailable("x")], lines(5, 0, 1, 2, 3, 4))
    case.master.refusals[wire.FailPrefill] = Fenced("staged")
    assert case.run() == TOKENS
    assert case.passage.stages.prefills == 1


def test_a_prefill_worker_that_dies_with_the_master_is_followed_by_another() -> None:
    case = Case([Unavailable("x"), Unavailable("x"), STAGED], lines(5, 1, 2, 3, 4))
    case.master.refusals[wire.FailPrefill] = UnknownTicket("led by another since")
    case.master.epoch = 2
    assert case.run() == TOKENS
    heard = case.master.heard(wire.PresentTicket)
    presented = [(m.worker, m.tokens) for m in heard if isinstance(m, wire.PresentTicket)]
    assert presented == [("p0", ()), ("p2", (TOKENS[0],))], "and that it is staged by now"


def test_tickets_are_presented_once_however_many_requests_ask_for_it() -> None:
    case = Case([])

    async def presented() -> None:
        await case.passage.open()
        case.master.epoch = 2
        await asyncio.gather(*(case.fleet.present() for _ in range(5)))

    case.run(presented)
    assert len(case.master.heard(wire.PresentTicket)) == 1


# One worker does both.


def test_a_worker_that_is_to_do_all_of_it_is_asked_for_nothing_else() -> None:
    case = Case([], [Line(0, reused_tokens=8), *lines(0, 0, 1, 2, 3, 4)[1:]])
    case.master.alone = ["always"]
    assert case.run() == TOKENS
    assert case.workers.asked == [case.asked_alone()]
    assert case.master.heard(wire.AwaitRoute) == []
    assert case.master.ends() == [wire.FinishTicket(TICKET, 0)]
    assert case.passage.stages.reused_tokens == 8


@pytest.mark.parametrize("alone", ["always", ""])
@pytest.mark.parametrize("at", range(5))
def test_whoever_follows_one_that_did_all_of_it_goes_on_from_its_tokens(
    at: int, alone: str
) -> None:
    died = [*lines(0, *range(at)), Unavailable("x")]
    again = lines(0 if alone else 5, *range(at, 5))
    case = Case([] if alone else [STAGED], died, again)
    case.master.alone = ["always", alone]
    assert case.run() == TOKENS
    assert case.master.heard(wire.FailPrefill) == [wire.FailPrefill(TICKET, "p0")]
    if alone:
        assert case.workers.asked[1] == case.asked_alone(*TOKENS[:at])
    assert case.master.ends() == [wire.FinishTicket(TICKET, 0 if alone else 5)]


def test_one_that_leaves_has_staged_what_it_has_done() -> None:
    case = Case([], lines(0, 0, 1), lines(5, 2, 3, 4))
    case.master.alone = ["break_even"]
    assert case.run() == TOKENS
    routed = case.workers.asked[1]
    assert isinstance(routed, DecodeAsk)
    assert (routed.route, routed.tokens) == (route(1), (*PROMPT, *TOKENS[:2]))
    assert case.master.ends() == [wire.FinishTicket(TICKET, 5)]


@pytest.mark.parametrize("at", range(4))
def test_after_decode_workers_have_failed_one_worker_goes_on_alone(at: int) -> None:
    """Also from the tokens of a claim that was higher than any that it has: it has none."""
    died = [*lines(5, *range(1, at + 1)), Unavailable("x")]
    case = Case([STAGED], died, lines(0, *range(at, 5)))
    case.master.run_alone = "failed_hand_overs"
    assert case.run() == TOKENS
    assert case.master.heard(wire.RunAlone) == [wire.RunAlone(TICKET, route(1))]
    assert case.workers.asked[-1] == case.asked_alone(*TOKENS[: at + 1])
    assert len(case.master.heard(wire.AwaitRoute)) == 1
    assert case.master.ends() == [wire.FinishTicket(TICKET, 0)]


def test_one_that_has_gone_on_alone_and_dies_is_followed_as_any_other() -> None:
    died = [*lines(0, 0, 1), Unavailable("x")]
    case = Case([STAGED, STAGED], [Unavailable("x")], died, lines(6, 2, 3, 4))
    case.master.run_alone = "failed_hand_overs"
    assert case.run() == TOKENS
    assert case.master.heard(wire.FailPrefill) == [wire.FailPrefill(TICKET, "b")]
    assert case.master.ends() == [wire.FinishTicket(TICKET, 6)]


def test_where_the_master_knows_nobody_another_decode_worker_goes_on() -> None:
    case = Case([STAGED], lines(5, 1), lines(6, 2, 3, 4))
    case.workers.decodes[0].append(Unavailable("x"))
    assert case.run() == TOKENS
    assert len(case.master.heard(wire.RunAlone)) == 1
    assert case.passage.stages.routes == 2


def test_who_hands_a_request_on_has_not_failed_it() -> None:
    case = Case([STAGED], lines(5, 1), lines(6, 2, 3, 4))
    case.master.run_alone = "failed_hand_overs"
    assert case.run() == TOKENS
    assert case.master.heard(wire.RunAlone) == []
