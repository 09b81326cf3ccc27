"""One request's way through a fleet whose parts fail at every point."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.steps import Ask
from kvstore.errors import CorruptPage, DeadlineExceeded, Fenced, Throttled, Unavailable
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from tests.fakes import ManualClock
from tests.unit.client_scripts import opened
from workers.gateway_relay import PREFILLS_MAX, Fleet, Passage, Patience
from workers.gateway_requests import Wish
from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrefillDone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

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
TICKET = 7


class FakeMaster:
    """Answers every question of a plan, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.route = 0
        self.refusals: list[Exception] = []

    async def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        await asyncio.sleep(0)
        try:
            step = next(plan)
            while True:
                assert isinstance(step, Ask)
                step = plan.send(self._answer(step.message))
        except StopIteration as stop:
            return stop.value

    def ends(self) -> list[Message]:
        ends = wire.FinishTicket | wire.CancelTicket
        return [message for message in self.asked if isinstance(message, ends)]

    def _answer(self, message: Message) -> Message:
        self.asked.append(message)
        match message:
            case wire.OpenTicket() | wire.FailPrefill():
                if self.refusals:
                    raise self.refusals.pop(0)
                fails = sum(isinstance(each, wire.FailPrefill) for each in self.asked)
                return wire.TicketOpened(TICKET, 0, f"p{fails}", f"p{fails}:1")
            case wire.AwaitRoute():
                self.route += 1
                return wire.TicketRouted(self.route, f"d{self.route}", f"d{self.route}:1")
        return Done()


class FakeWorkers:
    """Each call is answered by the next of a script: a result, or an error."""

    def __init__(self, prefills: list[object], decodes: list[list[object]]) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.asked: list[PrefillAsk | DecodeAsk] = []
        self.hung_up = 0

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        self.asked.append(ask)
        await asyncio.sleep(0)
        found = self.prefills.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, PrefillDone)
        return found

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


def lines(claim: int, *indices: int) -> list[object]:
    return [Line(claim, install_s=0.1), *(Line(claim, i, TOKENS[i]) for i in indices)]


class Case:
    def __init__(self, prefills: list[object], *decodes: list[object]) -> None:
        self.master, self.clock = FakeMaster(), ManualClock(0.0)
        self.workers = FakeWorkers(prefills, list(decodes))
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
        assert (again.route, again.tokens) == (2, (*PROMPT, *TOKENS[: at + 1]))


def test_prefill_is_tried_on_others() -> None:
    failed = [Unavailable("x")] * (PREFILLS_MAX - 1)
    case = Case([*failed, STAGED], lines(5, 1, 2, 3, 4))
    assert case.run() == TOKENS
    names = [each.worker for each in case.master.asked if isinstance(each, wire.FailPrefill)]
    assert names == ["p0", "p1", "p2"]


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
    case.master.refusals.append(Throttled(2.0, "staging", "full"))
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
