"""One request's way through a fleet whose parts fail at every point."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.steps import Ask
from kvstore.errors import (
    CorruptPage,
    DeadlineExceeded,
    Fenced,
    KVStoreError,
    Throttled,
    Unavailable,
    UnknownTicket,
)
from kvstore.ids import Epoch, generation_of
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from tests.fakes import ManualClock
from tests.unit.client_scripts import opened
from workers.gateway_relay import PREFILLS_MAX, Fleet, Passage, Patience
from workers.gateway_requests import Wish
from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrefillDone, PrepareAsk, Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from types import UnionType

    from kvstore.client.steps import Steps
    from kvstore.wire.messages.base import Message

    Act = Callable[[], Awaitable[Any]]

PROMPT = tuple(range(10))
TOKENS = [30, 31, 32, 33, 34]
END = 99
WISH = Wish(
    is_chat=False, tokens=PROMPT, max_tokens=5, temperature=0.0, top_p=1.0, seed=None,
    stop=(), stream=False, usage_at_end=False, timings=False,
)  # fmt: skip
TICKET = generation_of(Epoch(1), 7)


class FakeMaster:
    """Answers every question of a plan, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.route = 0
        self.epoch = 1
        self.refusals: dict[type[Message], Exception] = {}
        """Raised once, of the next message of that type."""
        self.run_alone = ""
        """Why one worker is to go on alone, where a route has failed."""
        self.alone: list[str] = []
        """Why the first, second, ... worker that is named is to do all of it."""
        self.is_staged = asyncio.Event()
        """Cleared while a prompt is being computed: nobody is routed, unless `routes_ahead`."""
        self.is_staged.set()
        self.routes_ahead = False

    async def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        await asyncio.sleep(0)
        try:
            step = next(plan)
            while True:
                assert isinstance(step, Ask)
                if isinstance(step.message, wire.AwaitRoute) and not self.routes_ahead:
                    await self.is_staged.wait()
                try:
                    answer = self._answer(step.message)
                except KVStoreError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(answer)
        except StopIteration as stop:
            return stop.value

    def ends(self) -> list[Message]:
        return self.heard(wire.FinishTicket | wire.CancelTicket)

    def heard(self, kind: UnionType | type[Message]) -> list[Message]:
        return [message for message in self.asked if isinstance(message, kind)]

    def _answer(self, message: Message) -> Message:
        self.asked.append(message)
        if type(message) in self.refusals:
            raise self.refusals.pop(type(message))
        match message:
            case wire.OpenTicket() | wire.FailPrefill():
                fails = len(self.heard(wire.FailPrefill))
                alone = self.alone.pop(0) if self.alone else ""
                return wire.TicketOpened(TICKET, 0, f"p{fails}", f"p{fails}:1", alone)
            case wire.RunAlone():
                if not self.run_alone:
                    raise Fenced("another one decodes")
                return wire.TicketOpened(TICKET, 0, "b", "b:1", self.run_alone)
            case wire.GetTerm():
                return wire.Term(self.epoch)
            case wire.AwaitRoute():
                self.route += 1
                number = generation_of(Epoch(self.epoch), self.route)
                where, is_ahead = f"d{self.route}:1", not self.is_staged.is_set()
                return wire.TicketRouted(number, f"d{self.route}", where, is_ahead)
        return Done()


class FakeWorkers:
    """Each call is answered by the next of a script: a result, or an error."""

    def __init__(
        self, prefills: list[object], decodes: list[list[object]], is_staged: asyncio.Event
    ) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.is_staged = is_staged
        self.asked: list[PrefillAsk | PrepareAsk | DecodeAsk] = []
        self.preparing = 0
        self.hung_up = 0

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        self.asked.append(ask)
        self.is_staged.clear()
        for _ in range(5):  # whoever else is at it comes to its next wait
            await asyncio.sleep(0)
        self.is_staged.set()
        found = self.prefills.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, PrefillDone)
        return found

    async def prepare(self, where: str, ask: PrepareAsk) -> None:
        self.asked.append(ask)
        self.preparing += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.preparing -= 1

    async def decode(self, where: str, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        self.asked.append(ask)
        try:
            for found in self.decodes.pop(0):
                await asyncio.sleep(0)
                if isinstance(found, Exception):
                    raise found
                assert isinstance(found, Line)
                yield found
        except GeneratorExit:
            self.hung_up += 1
            raise


STAGED = PrefillDone(TOKENS[0], 4, 0.1, 0.2)


def route(number: int) -> int:
    return generation_of(Epoch(1), number)


def lines(claim: int, *indices: int) -> list[object]:
    return [Line(claim), *(Line(claim, i, TOKENS[i]) for i in indices)]


class Case:
    def __init__(self, prefills: list[object], *decodes: list[object]) -> None:
        self.master, self.clock = FakeMaster(), ManualClock(0.0)
        self.workers = FakeWorkers(prefills, list(decodes), self.master.is_staged)
        patience = Patience(1.0, 60.0)
        self.fleet = Fleet(self.master, self.workers, opened(), END, patience, self.clock)
        self.passage = Passage(self.fleet, "r/1", WISH, 3)

    def run(self, act: Act | None = None) -> Any:  # noqa: ANN401 -- what `act` gives
        async def whole() -> Any:  # noqa: ANN401 -- what `act` gives
            try:
                return await (act or self.all)()
            finally:
                await self.fleet.close()

        return asyncio.run(whole())

    def asked_alone(self, *generated: int) -> DecodeAsk:
        tokens = (*PROMPT, *generated)
        how, left = Sampling(0.0, 1.0, 3), 5 - len(generated)
        return DecodeAsk(TICKET, 0, "r/1", len(PROMPT), tokens, 5, how, 60.0, left)

    async def all(self) -> list[int]:
        await self.passage.open()
        return [token async for token in self.passage.tokens()]


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
