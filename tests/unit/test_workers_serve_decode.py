"""A decode worker's desk: tickets that are claimed, or have no route; a worker that leaves."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from transformers import DynamicCache

from kvstore.client.tickets import HandOver, Member
from kvstore.errors import Fenced, KVStoreError, OutOfSpace, Unavailable
from kvstore.wire.messages import tickets as wire
from tests.tiny_model import config, text, tiny
from tests.unit.client_scripts import opened
from tests.unit.one_ticket import OneTicket
from workers import serve_decode
from workers.engine import Engine, EngineRequest
from workers.one_by_one import OneByOne
from workers.serve_batch import Batch
from workers.serve_decode import DecodeDesk
from workers.serve_kv import Pulled
from workers.serve_messages import DecodeAsk, Line, Sampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvstore.page import PageChain
    from kvstore.wire.messages.base import Message

PROMPT = tuple(text(7))
SPACE = opened()
TOKENS = 6
CLAIM = 50
WAIT_S = 30.0
MEMBER = Member(SPACE.namespace.id, "d1", 3, 0.5, 3.0)


def generated(count: int = TOKENS) -> tuple[int, ...]:
    """What the model says after PROMPT."""
    engine = Engine(OneByOne(tiny()), capacity_tokens=300)
    engine.add(EngineRequest("alone", PROMPT, count))
    found: list[int] = []
    while engine.running:
        found += [one.token for one in engine.step()]
    return tuple(found)


@dataclass
class FakeKV:
    """Has nothing of a prompt, and keeps what it is given."""

    opened = SPACE
    kept: list[tuple[int, ...]] = field(default_factory=list)
    arrived: list[object] = field(default_factory=list)
    trouble: KVStoreError | None = None
    may_keep: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_keep.set()

    def reuse(self, tokens: Sequence[int]) -> Pulled:
        return Pulled(DynamicCache(config=config()), 0, 5.0)

    def take_up(
        self, claimed: object, tail_tokens: int, tokens: Sequence[int], arrived: object = None
    ) -> Pulled:
        self.arrived.append(arrived)
        return self.reuse(tokens)

    def keep(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        if self.trouble is not None:
            raise self.trouble
        assert self.may_keep.wait(2 * WAIT_S)
        self.kept.append(tuple(tokens))
        return len(tokens) // 4

    def keep_prompt(
        self, tokens: Sequence[int], prompt_tokens: int, cache: DynamicCache
    ) -> PageChain:
        self.keep(tokens, cache)
        return SPACE.chain(tokens[:prompt_tokens])

    def hand_over(
        self, ticket: int, counter: int, tokens: Sequence[int], said: tuple[int, ...],
        cache: DynamicCache, ttl_s: float,
    ) -> HandOver:  # fmt: skip
        self.keep(tokens, cache)
        return HandOver(SPACE.chain(tokens), said)


class Case:
    """A desk, and what is asked of it."""

    def __init__(self) -> None:
        claimed = wire.TicketClaimed(
            CLAIM, SPACE.namespace.id, 4, len(PROMPT), b"", wire.TailRef(), generated(1)
        )
        self.store, self.kv = OneTicket(claimed), FakeKV()
        self.failures: list[BaseException] = []

    def run(self, act: Callable[[DecodeDesk], Awaitable[Any]]) -> Any:  # noqa: ANN401 -- as given
        async def whole() -> Any:  # noqa: ANN401 -- what `act` gives
            batch = Batch(Engine(OneByOne(tiny()), capacity_tokens=300), self.failures.append)
            store: Any = self.store
            kv: Any = self.kv
            desk = DecodeDesk(store, kv, batch, lambda: MEMBER, frozenset())
            try:
                return await act(desk)
            finally:
                desk.close()
                batch.close()

        result = asyncio.run(whole())
        assert not self.failures
        return result

    def asked(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.store.asked if isinstance(message, kind)]


def ask(
    route: int, *said: int, tokens: int = TOKENS, ticket: int = 9, expected: int = 1000
) -> DecodeAsk:
    how, known = Sampling(0.0, 1.0, 0), (*PROMPT, *said)
    return DecodeAsk(ticket, route, "r", len(PROMPT), known, tokens, how, 60.0, expected)


async def said(desk: DecodeDesk, question: DecodeAsk) -> list[Line]:
    return [line async for line in desk.decode(question)]


def lines(claim: int, first: int = 0) -> list[Line]:
    answer = generated()
    return [Line(claim), *(Line(claim, i, answer[i]) for i in range(first, TOKENS))]


def test_a_claimed_ticket_goes_on_and_is_finished() -> None:
    case = Case()
    assert case.run(lambda desk: said(desk, ask(4, *generated(1)))) == lines(CLAIM, 1)
    assert case.store.asked == [
        wire.ClaimTicket(9, 4, "d1", 3),
        wire.TicketInstalled(9, CLAIM),
        wire.FinishTicket(9, CLAIM),
    ]


def test_tokens_that_the_master_alone_knows_of_are_told_first() -> None:
    assert Case().run(lambda desk: said(desk, ask(4))) == lines(CLAIM)


@pytest.mark.parametrize("known", [0, 2])
def test_without_a_route_all_is_computed_and_nothing_is_claimed(known: int) -> None:
    case = Case()

    assert case.run(lambda desk: all_kept(desk, ask(0, *generated()[:known]))) == lines(0, known)
    assert case.kv.kept[-1] == (*PROMPT, *generated()[:-1])
    assert case.store.asked == [wire.BeginPrefill(9, "d1", 3)]


def test_what_runs_is_told_in_beats_with_a_route_or_without() -> None:
    async def first(desk: DecodeDesk) -> list[list[int]]:
        running = []
        for route in (0, 4):
            async with aclosing(desk.decode(ask(route, tokens=200))) as answer:
                await anext(answer)
                running.append([each.token for each in desk.running()])
        return running

    assert Case().run(first) == [[0], [CLAIM]]


def test_a_claim_is_told_in_beats_while_what_came_ahead_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = []

    async def answered(desk: DecodeDesk) -> list[Line]:
        async def take(ticket: int) -> None:
            running.append([(each.ticket, each.token) for each in desk.running()])

        monkeypatch.setattr(desk.ahead, "take", take)
        return await said(desk, ask(4, *generated(1)))

    assert Case().run(answered) == lines(CLAIM, 1)
    assert running == [[(9, CLAIM)]]


async def shed_after_two(desk: DecodeDesk, question: DecodeAsk) -> list[Line]:
    """What is said up to its end, of one that is shed after two lines."""
    found = []
    async with aclosing(desk.decode(question)) as answer:
        async for line in answer:
            found.append(line)
            if len(found) == 2:
                desk.is_draining = True
                await desk.shed()
    return found


def test_a_claimed_ticket_is_shed_with_all_that_was_generated() -> None:
    case = Case()
    found = case.run(lambda desk: shed_after_two(desk, ask(4, *generated(1), tokens=200)))
    (shed,) = case.asked(wire.ShedTicket)
    assert isinstance(shed, wire.ShedTicket)
    assert (shed.token, shed.tokens) == (CLAIM, generated(200)[: len(shed.tokens)])
    assert [line.token for line in found[1:]] == list(shed.tokens[1:])


def test_one_without_a_route_is_staged_when_its_worker_leaves() -> None:
    case = Case()
    found = case.run(lambda desk: shed_after_two(desk, ask(0, tokens=200)))
    (staged,) = case.asked(wire.StageTicket)
    assert isinstance(staged, wire.StageTicket)
    assert (staged.worker, staged.life, staged.tail) == ("d1", 3, wire.TailRef())
    assert staged.keys == SPACE.chain(PROMPT).packed
    assert staged.tokens == generated(200)[: len(staged.tokens)]
    assert [line.token for line in found[1:]] == list(staged.tokens)
    assert (*PROMPT, *staged.tokens[:-1]) in case.kv.kept  # beside what was put as it grew


@pytest.mark.parametrize("route", [0, 4])
def test_a_ticket_that_cannot_be_handed_on_keeps_no_other_from_it(route: int) -> None:
    """As when its gateway cancels it just then: its stream is broken off as the worker ends."""
    case = Case()
    for kind in (wire.ShedTicket, wire.StageTicket):
        case.store.refusals[kind] = Fenced("cancelled")

    async def shed(desk: DecodeDesk) -> None:
        async with aclosing(desk.decode(ask(route, tokens=200))) as answer:
            await anext(answer)
            await anext(answer)
            desk.is_draining = True
            await desk.shed()
            with pytest.raises(OutOfSpace):
                await anext(desk.decode(ask(4)))

    case.run(shed)
    assert case.asked(wire.ShedTicket if route else wire.StageTicket)


async def run_beside(desk: DecodeDesk, route: int) -> tuple[list[Line], list[Line]]:
    """An older request, and what is said of this one, both longer than was expected."""
    begun = asyncio.Event()

    async def first() -> list[Line]:
        found = []
        async for line in desk.decode(ask(0, tokens=250, ticket=8, expected=20)):
            found.append(line)
            begun.set()
        return found

    older = asyncio.ensure_future(first())
    await begun.wait()
    younger = await said(desk, ask(route, *generated(1), tokens=250, expected=20))
    return await older, younger


@pytest.mark.parametrize("route", [0, 4])
def test_the_youngest_is_handed_on_where_answers_are_longer_than_was_expected(route: int) -> None:
    case, answer = Case(), generated(250)
    older, younger = case.run(lambda desk: run_beside(desk, route))
    assert [line.token for line in older[1:]] == list(answer)
    (left,) = case.asked(wire.ShedTicket if route else wire.StageTicket)
    assert isinstance(left, wire.ShedTicket | wire.StageTicket)
    assert 20 < len(left.tokens) < 250
    assert left.tokens == answer[: len(left.tokens)]
    assert [line.token for line in younger[1:]] == list(left.tokens[1:])


def test_one_that_can_neither_stay_nor_be_handed_on_ends_with_the_reason() -> None:
    case = Case()
    case.store.refusals[wire.ShedTicket] = Unavailable("no master")
    with pytest.raises(Unavailable, match="no master"):
        case.run(lambda desk: run_beside(desk, 4))


async def all_kept(desk: DecodeDesk, question: DecodeAsk) -> list[Line]:
    found = await said(desk, question)
    while desk._keeping:  # noqa: SLF001 -- nobody else waits for that
        await asyncio.gather(*desk._keeping)  # noqa: SLF001 -- as above
    return found


@pytest.mark.parametrize("route", [0, 4])
def test_pages_that_an_answer_fills_are_kept_while_it_grows(route: int) -> None:
    case = Case()
    case.run(lambda desk: all_kept(desk, ask(route, *generated(1), tokens=60)))
    whole = (*PROMPT, *generated(60)[:-1])
    assert case.kv.kept[-1] == whole
    assert len(case.kv.kept) > 1, case.kv.kept
    counts = [len(tokens) for tokens in case.kv.kept]
    assert counts == sorted(counts)
    assert all(tokens == whole[: len(tokens)] for tokens in case.kv.kept)
    pages = [count // 4 for count in counts[:-1]]
    assert pages == sorted(set(pages)), "each put takes along a page more than the one before"
    assert min(pages) >= len(PROMPT) // 4, "and the first one the prompt, which was computed here"


def test_an_answer_that_the_pool_does_not_keep_is_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case()
    case.kv.trouble = Unavailable("no pool")
    case.run(lambda desk: all_kept(desk, ask(0, tokens=60)))
    said_twice = caplog.text.count("pages of an answer are not kept: no pool")
    assert said_twice == 2, "once while it grew, which was not tried again, and once at its end"


def test_behind_a_slow_pool_no_more_puts_wait_than_are_meant_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case()
    monkeypatch.setattr(serve_decode, "PUTS_AT_ONCE", 1)
    case.kv.may_keep.clear()

    async def answers(desk: DecodeDesk) -> None:
        for tokens in (1, 6, 7):
            await said(desk, ask(0, tokens=tokens))
        case.kv.may_keep.set()
        await asyncio.gather(*desk._keeping)  # noqa: SLF001 -- as above

    case.run(answers)
    assert caplog.text.count("pages of an answer are not kept: 1 others are") == 2
    assert case.kv.kept == [PROMPT]


def test_no_claim_and_no_answer_waits_for_a_put() -> None:
    case = Case()
    case.kv.may_keep.clear()

    async def answers(desk: DecodeDesk) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        try:
            for route in (0, 4):
                async with asyncio.timeout(WAIT_S):
                    await said(desk, ask(route, *generated(1)))
        finally:
            case.kv.may_keep.set()

    case.run(answers)
    assert case.asked(wire.FinishTicket)
