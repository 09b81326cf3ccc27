"""An agent's questions to its vLLM server, over loopback, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from aiohttp import web

from kvstore.errors import BadValue, KVStoreError, Unavailable
from workers.serve_messages import Sampling
from workers.vllm_server import COMPLETIONS, Piece, Prefilled, Served, VllmServer, completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")
WAIT_S = 30.0
HOW = Sampling(0.5, 0.9, 7)
STREAM = (
    'data: {"choices": [{"token_ids": [4, 5], "text": "", "prompt_token_ids": [1]}]}\n\n'
    ": a comment\n\n"
    'data: {"choices": [{"token_ids": [6], "finish_reason": "length"}]}\n\n'
    'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n'
    "data: [DONE]\n\n"
)


class FakeVllm:
    """Answers as it is told."""

    def __init__(self, body: str, status: int = 200) -> None:
        self._body, self._status = body, status
        self.asked: list[Any] = []

    @asynccontextmanager
    async def served(self) -> AsyncIterator[VllmServer]:
        made = web.Application()
        made.router.add_post(COMPLETIONS, self._answer)
        made.router.add_get("/v1/models", self._answer)
        made.router.add_get("/health", self._answer)
        runner = web.AppRunner(made)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = VllmServer("http://{}:{}/".format(*runner.addresses[0][:2]))
        try:
            yield server
        finally:
            await server.close()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json() if request.can_read_body else None)
        return web.Response(text=self._body, status=self._status)


def said(fake: FakeVllm, act: Callable[[VllmServer], Awaitable[T]]) -> T:
    """What the server's answer comes to."""

    async def whole() -> T:
        async with asyncio.timeout(WAIT_S), fake.served() as server:
            return await act(server)

    return asyncio.run(whole())


async def prefill(server: VllmServer) -> Prefilled:
    return await server.prefill(completion((1, 2), 1, HOW, 9, {"do_remote_decode": True}))


async def generate(server: VllmServer) -> list[Piece | KVStoreError]:
    found: list[Piece | KVStoreError] = []
    try:
        async with aclosing(server.generate(completion((1, 2), 3, HOW, 9))) as pieces:
            async for piece in pieces:
                found.append(piece)  # noqa: PERF401 -- what came before an error counts
    except KVStoreError as error:
        found.append(error)
    return found


def test_tokens_are_asked_for_by_tokens() -> None:
    fake = FakeVllm(STREAM)
    assert said(fake, generate) == [Piece((4, 5), ""), Piece((6,), "length")]
    assert fake.asked == [
        {
            "prompt": [1, 2], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 9,
            "ignore_eos": True, "stop_token_ids": [9], "return_token_ids": True, "stream": True,
        }
    ]  # fmt: skip


def test_who_goes_on_draws_other_numbers_than_those_of_the_tokens_before() -> None:
    last = Sampling(1.0, 1.0, (1 << 63) - 1)
    assert [completion(range(n), 1, last, 9)["seed"] for n in (0, 1)] == [(1 << 63) - 1, 0]


def test_a_prompt_comes_back_with_what_is_to_be_told_on() -> None:
    fake = FakeVllm(
        '{"choices": [{"token_ids": [4], "finish_reason": "length"}], '
        '"usage": {"prompt_tokens_details": {"cached_tokens": 32}}, "kv_transfer_params": {"a": 1}}'
    )
    assert said(fake, prefill) == Prefilled(4, 32, {"a": 1})
    assert fake.asked[0]["kv_transfer_params"] == {"do_remote_decode": True}
    bare = FakeVllm('{"choices": [{"token_ids": [4], "finish_reason": "stop"}], "usage": {}}')
    assert said(bare, prefill) == Prefilled(4, 0, {})


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ('{"choices": [{"token_ids": [], "finish_reason": "length"}]}', 200, Unavailable),
        ('{"choices": [{"token_ids": [4], "finish_reason": "abort"}]}', 200, Unavailable),
        ('{"choices": [{"token_ids": "x"}]}', 200, Unavailable),
        ('{"choices": [{"token_ids": null, "finish_reason": "stop"}]}', 200, Unavailable),
        ('{"choices": [], "usage": {"prompt_tokens": 2}}', 200, Unavailable),
        ('{"error": {"message": "x", "code": 500}}', 200, Unavailable),
        ("[]", 200, Unavailable),
        ("\xff", 200, Unavailable),
        ("", 200, Unavailable),
        ("no JSON", 200, Unavailable),
        ("too long", 400, BadValue),
        ("broken", 500, Unavailable),
    ],
)
def test_a_prompt_that_is_not_answered_has_a_reason(
    body: str, status: int, kind: type[KVStoreError]
) -> None:
    with pytest.raises(kind):
        said(FakeVllm(body, status), prefill)


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "data: [DONE]\n\n",
        'data: {"choices": [{"token_ids": [5], "finish_reason": "abort"}]}\n',
        'data: {"choices": [{"token_ids": null}]}\n\n',
        'data: {"error": {"message": "x", "code": 500}}\n\n',
        "data: no JSON\n\n",
        "data: \xff\n\n",
        'data: {"choices": []',
    ],
)
def test_an_answer_that_ends_early_is_an_error(rest: str) -> None:
    body = 'data: {"choices": [{"token_ids": [4]}]}\n\n' + rest
    first, error = said(FakeVllm(body), generate)
    assert first == Piece((4,), "")
    assert isinstance(error, Unavailable)


def test_a_text_with_the_word_for_the_end_is_not_the_end() -> None:
    body = 'data: {"choices": [{"token_ids": [4], "text": "data: [DONE]"}]}\n\n' + STREAM
    assert said(FakeVllm(body), generate)[:2] == [Piece((4,), ""), Piece((4, 5), "")]


def test_a_refused_answer_has_the_server_s_reason() -> None:
    (error,) = said(FakeVllm("too long", 400), generate)
    assert isinstance(error, BadValue)
    assert "too long" in str(error)


def test_a_server_says_whether_it_is_well_and_what_it_has() -> None:
    models = FakeVllm(
        '{"data": [{"id": "m", "max_model_len": 100}, {"id": "a", "max_model_len": 5}]}'
    )
    assert said(models, lambda server: server.served()) == Served("m", 100)
    assert said(models, lambda server: server.check()) is None
    for trouble in (FakeVllm('{"data": []}'), FakeVllm("", 503)):
        with pytest.raises(Unavailable):
            said(trouble, lambda server: server.served())
    with pytest.raises(Unavailable):
        said(FakeVllm("", 503), lambda server: server.check())


def test_a_server_that_is_not_there_is_unavailable() -> None:
    async def asked() -> None:
        server = VllmServer("http://127.0.0.1:9")
        try:
            for ask in (server.check, server.served, lambda: prefill(server)):
                with pytest.raises(Unavailable):
                    await ask()
            (error,) = await generate(server)
            assert isinstance(error, Unavailable)
        finally:
            await server.close()

    asyncio.run(asked())
