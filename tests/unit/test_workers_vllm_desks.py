"""Tickets at the agent of a vLLM server: what it asks the server, and what it tells the master."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.block_hashes import SHA256_CBOR, VLLM_SEED, Hashing, chain_of
from kvstore.client.tickets import Member
from kvstore.connectors.vllm.handover import HERE, NAMESPACES, THERE, TOKENS
from kvstore.errors import BadValue, Fenced, KVStoreError, OutOfSpace, Unavailable
from kvstore.wire.messages import tickets as wire
from tests.unit.client_scripts import PAGE_TOKENS, opened
from tests.unit.one_ticket import OneTicket
from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrepareAsk, Sampling
from workers.vllm_desks import Told, VllmDecode, VllmPages, VllmPrefill
from workers.vllm_server import Piece, Prefilled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from workers.serve_messages import PrefillDone

SPACE = opened().namespace
HASHING = Hashing(SHA256_CBOR, VLLM_SEED)
PAGES = VllmPages((SPACE,), 0, HASHING)
PROMPT = tuple(range(3 * PAGE_TOKENS + 1))
CHAIN = chain_of(SPACE, PROMPT, HASHING)
END = 99
CLAIM = 50
GREEDY = Sampling(0.0, 1.0, 5)
WAIT_S = 30.0
FIRST = 40
ANSWER = (41, 42, 43)
PROMISED = {NAMESPACES: [SPACE.id.hex()], TOKENS: 3 * PAGE_TOKENS, THERE: True, HERE: False}


class FakeMaster(OneTicket):
    """Has one ticket, with these tokens of its answer."""

    def __init__(self, tokens: tuple[int, ...] = (FIRST,)) -> None:
        super().__init__(
            wire.TicketClaimed(
                CLAIM, SPACE.id, PAGE_TOKENS, len(PROMPT), CHAIN.packed, wire.TailRef(), tokens
            )
        )


class FakeServer:
    """Says these pieces, then ends as it is told, or hangs."""

    def __init__(self, *pieces: Piece, end: Exception | None = None) -> None:
        self._pieces, self._end = pieces, end
        self.params: dict[str, Any] = dict(PROMISED)
        self.asked: list[dict[str, Any]] = []
        self.has_hung_up = asyncio.Event()
        self.is_silent = False
        """About prompts."""

    async def prefill(self, asked: Mapping[str, object]) -> Prefilled:
        self.asked.append(dict(asked))
        if self.is_silent:
            await asyncio.Event().wait()
        return Prefilled(FIRST, 4, self.params)

    async def generate(self, asked: Mapping[str, object]) -> AsyncGenerator[Piece, None]:
        self.asked.append(dict(asked))
        try:
            for piece in self._pieces:
                yield piece
            if self._end is not None:
                raise self._end
            if not (self._pieces and self._pieces[-1].ended):
                await asyncio.Event().wait()
        finally:
            self.has_hung_up.set()


def ask(route: int = 7, told: tuple[int, ...] = (FIRST,), most: int = 4) -> DecodeAsk:
    return DecodeAsk(3, route, "r", len(PROMPT), (*PROMPT, *told), most, GREEDY, WAIT_S, 1)


def desk_of(master: FakeMaster, server: FakeServer) -> VllmDecode:
    fake: Any = server
    member = Member(SPACE.id, "d1", 3, 0.5, 3.0)
    return VllmDecode(fake, PAGES, Told(master, lambda: member), END)


def heard(
    master: FakeMaster, server: FakeServer, question: DecodeAsk
) -> tuple[list[Line], KVStoreError | None]:
    """The lines of an answer, and what ended it."""
    lines: list[Line] = []

    async def whole() -> None:
        desk = desk_of(master, server)
        try:
            async with asyncio.timeout(WAIT_S), aclosing(desk.decode(question)) as coming:
                async for line in coming:
                    lines.append(line)  # noqa: PERF401 -- what came before an error counts
        finally:
            assert desk.running() == ()

    try:
        asyncio.run(whole())
    except KVStoreError as error:
        return lines, error
    return lines, None


def prefilled(master: FakeMaster, server: FakeServer, patience_s: float = WAIT_S) -> PrefillDone:
    fake: Any = server
    member = Member(SPACE.id, "p1", 3, 0.5, 3.0)
    desk = VllmPrefill(fake, PAGES, Told(master, lambda: member), END)
    question = PrefillAsk(3, "r", PROMPT, GREEDY, patience_s)
    return asyncio.run(desk.compute(question, 0.0))


def test_a_prompt_is_staged_under_the_names_of_the_server_s_blocks() -> None:
    master, server = FakeMaster(), FakeServer()
    done = prefilled(master, server)
    assert (done.first, done.reused_tokens) == (FIRST, 4)
    (asked,) = server.asked
    assert asked["prompt"] == list(PROMPT)
    assert (asked["max_tokens"], asked["kv_transfer_params"]) == (1, {HERE: True})
    assert master.kinds == ["BeginPrefill", "StageTicket"]
    staged = master.asked[1]
    assert isinstance(staged, wire.StageTicket)
    assert (staged.keys, staged.tokens, staged.tail) == (CHAIN.packed, (FIRST,), wire.TailRef())


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "has not kvharbor's connector"),
        (PROMISED | {NAMESPACES: ["00" * 32]}, "other KV"),
        (PROMISED | {TOKENS: 2 * PAGE_TOKENS}, "other KV"),
    ],
)
def test_a_server_that_is_not_what_it_was_described_as_stages_nothing(
    params: dict[str, Any], text: str
) -> None:
    master, server = FakeMaster(), FakeServer()
    server.params = params
    with pytest.raises(Unavailable, match=text):
        prefilled(master, server)
    assert master.kinds == ["BeginPrefill"]


def test_a_server_that_is_silent_about_a_prompt_is_given_up_by_name() -> None:
    master, server = FakeMaster(), FakeServer()
    server.is_silent = True
    with pytest.raises(Unavailable, match=r"no answer within 0\.001 s"):
        prefilled(master, server, 0.001)
    assert master.kinds == ["BeginPrefill"]


def test_an_answer_begins_behind_what_others_have_generated() -> None:
    master = FakeMaster()
    server = FakeServer(Piece((41, 42), ""), Piece((43,), "length"))
    lines, error = heard(master, server, ask())
    assert error is None
    assert lines == [Line(CLAIM), *(Line(CLAIM, i, each) for i, each in enumerate(ANSWER, 1))]
    (asked,) = server.asked
    assert asked["prompt"] == [*PROMPT, FIRST]
    assert (asked["max_tokens"], asked["kv_transfer_params"]) == (3, PROMISED)
    assert asked["stop_token_ids"] == [END]
    assert master.kinds == ["ClaimTicket", "TicketInstalled", "FinishTicket"]


def test_nothing_is_told_before_the_server_has_the_kv_and_the_last_token_after_the_end() -> None:
    master, server = FakeMaster(), FakeServer(Piece((41,), "length"))
    told: list[tuple[int, str]] = []

    async def whole() -> None:
        async with aclosing(desk_of(master, server).decode(ask(most=2))) as lines:
            async for line in lines:
                told.append((line.index, master.kinds[-1]))  # noqa: PERF401 -- at that moment

    asyncio.run(whole())
    assert told == [(-1, "TicketInstalled"), (1, "FinishTicket")]


def test_tokens_that_a_dead_worker_did_not_bring_are_told_first() -> None:
    master = FakeMaster((FIRST, 41, 42))
    lines, error = heard(master, FakeServer(Piece((43,), "length")), ask())
    assert error is None
    assert [line.token for line in lines[1:]] == list(ANSWER)


def test_an_answer_that_is_complete_asks_the_server_for_nothing() -> None:
    for tokens, most in (((FIRST, 41, 42, 43), 4), ((FIRST, END), 4)):
        master, server = FakeMaster(tokens), FakeServer()
        lines, error = heard(master, server, ask(most=most))
        assert error is None
        assert [line.token for line in lines[1:]] == list(tokens[1:])
        assert (server.asked, master.kinds[-1]) == ([], "FinishTicket")


def test_the_end_token_is_told_where_the_server_keeps_it_to_itself() -> None:
    for last in (Piece((END,), "stop"), Piece((), "stop")):
        lines, _ = heard(FakeMaster(), FakeServer(Piece((41,), ""), last), ask())
        assert [line.token for line in lines[1:]] == [41, END]


def test_without_a_route_all_of_it_is_the_server_s() -> None:
    master, server = FakeMaster(), FakeServer(Piece((FIRST, 41), "length"))
    lines, error = heard(master, server, ask(route=0, told=(), most=2))
    assert error is None
    assert lines == [Line(0), Line(0, 0, FIRST), Line(0, 1, 41)]
    assert "kv_transfer_params" not in server.asked[0]
    assert master.kinds == ["BeginPrefill"]  # who has asked says when it ends


def test_a_server_that_dies_in_mid_answer_is_an_error_and_not_a_hand_over() -> None:
    lines, error = heard(FakeMaster(), FakeServer(Piece((41,), ""), end=Unavailable("x")), ask())
    assert [line.token for line in lines] == [-1, 41]
    assert isinstance(error, Unavailable)


def test_a_fault_of_ours_ends_the_answer_too() -> None:
    lines, error = heard(FakeMaster(), FakeServer(Piece((41,), ""), end=ZeroDivisionError()), ask())
    assert [line.token for line in lines] == [-1, 41]
    assert isinstance(error, Unavailable)


def test_what_the_claim_says_is_checked_before_the_server_is_asked() -> None:
    master, server = FakeMaster((77,)), FakeServer()
    lines, error = heard(master, server, ask())
    assert (lines, type(error), server.asked) == ([], BadValue, [])


def under_way(
    act: Callable[[VllmDecode], Awaitable[object]], master: FakeMaster, question: DecodeAsk
) -> tuple[list[Line], KVStoreError | None]:
    """What comes after one token was told of a server that then hangs, and `act` was done."""
    lines: list[Line] = []

    async def whole() -> KVStoreError | None:
        server = FakeServer(Piece((41,), ""))
        desk = desk_of(master, server)
        async with asyncio.timeout(WAIT_S), aclosing(desk.decode(question)) as coming:
            assert await anext(coming) == Line(CLAIM if question.route else 0)
            lines.append(await anext(coming))
            (running,) = desk.running()
            assert running.tokens == len(question.tokens) + 1
            await act(desk)
            try:
                lines.extend([line async for line in coming])
            except KVStoreError as error:
                return error
            finally:
                await server.has_hung_up.wait()
        return None

    return lines, asyncio.run(whole())


async def draining(desk: VllmDecode) -> None:
    desk.is_draining = True
    with pytest.raises(OutOfSpace):
        await anext(desk.decode(ask()))
    await desk.shed()


def test_who_leaves_hands_on_what_runs() -> None:
    master = FakeMaster()
    lines, error = under_way(draining, master, ask())
    assert (len(lines), error) == (1, None)
    shed = master.asked[-1]
    assert isinstance(shed, wire.ShedTicket)
    assert (shed.token, shed.tokens) == (CLAIM, (FIRST, 41))
    assert shed.keys == PAGES.chain((*PROMPT, FIRST)).packed


def test_who_leaves_stages_what_it_has_computed_alone() -> None:
    master = FakeMaster()
    lines, error = under_way(draining, master, ask(route=0, told=()))
    assert (len(lines), error) == (1, None)
    staged = master.asked[-1]
    assert isinstance(staged, wire.StageTicket)
    assert (staged.keys, staged.tokens) == (CHAIN.packed, (41,))


def test_what_cannot_be_handed_on_is_broken_off() -> None:
    master = FakeMaster()
    master.refusals[wire.ShedTicket] = Fenced("another has it")
    _, error = under_way(draining, master, ask())
    assert isinstance(error, Unavailable)


def test_what_the_master_has_given_to_another_ends_here() -> None:
    async def dropped(desk: VllmDecode) -> None:
        desk.drop(desk.running())

    master = FakeMaster()
    lines, error = under_way(dropped, master, ask())
    assert (len(lines), error) == (1, None)
    assert "ShedTicket" not in master.kinds


def test_nothing_is_pulled_ahead() -> None:
    desk = desk_of(FakeMaster(), FakeServer())
    with pytest.raises(OutOfSpace):
        asyncio.run(desk.prepare(PrepareAsk(3, 7, "r", PROMPT)))
