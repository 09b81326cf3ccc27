"""A gateway's questions to inference workers, over loopback."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from kvstore.errors import Unavailable
from kvstore.namespace import Attention, CacheGroup, Content, Layout
from workers.gateway_workers import InferenceWorkers
from workers.serve_messages import (
    ABOUT,
    DECODE,
    PREFILL,
    About,
    DecodeAsk,
    Line,
    PrefillAsk,
    PrefillDone,
    Sampling,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANSWERS = 150
"""More than aiohttp's client has connections by itself."""
WAIT_S = 30.0
SILENCE_S = 2.0
"""In which a machine that is busy with other things, too, says that it is there."""
GREEDY = Sampling(0.0, 1.0, 0)
CONTENT = Content(
    "default", "m", "r", "", "float32", (CacheGroup(Attention.FULL, 1, 1, 1, 1),), "rope:1"
)
ABOUT_IT = encode(About("m", CONTENT, Layout(page_tokens=64), 100, ""))
PROMPT = PrefillAsk(1, "r", (1,), GREEDY, WAIT_S)


@asynccontextmanager
async def worker(answers: dict[str, Answer]) -> AsyncIterator[str]:
    """A worker's address."""
    application = web.Application()
    for path, answer in answers.items():
        application.router.add_post(path, answer)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def here(_: web.Request) -> web.StreamResponse:
    return web.Response(body=ABOUT_IT)


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def test_as_many_answers_are_under_way_as_workers_take() -> None:
    """The master has set a place aside for each: one that waited for a connection would hold it."""

    async def run() -> None:
        begun, all_begun = 0, asyncio.Event()

        async def answer(_: web.Request) -> web.StreamResponse:
            nonlocal begun
            begun += 1
            if begun == ANSWERS:
                all_begun.set()
            await all_begun.wait()
            return web.Response(body=encode(Line(1, 0, 7)) + b"\n")

        async def one(workers: InferenceWorkers, where: str) -> list[int]:
            ask = DecodeAsk(1, 1, "r", 1, (1,), 1, GREEDY, WAIT_S, 1)
            async with aclosing(workers.decode(where, ask)) as lines:
                return [line.token async for line in lines]

        workers = InferenceWorkers(None)
        try:
            async with worker({DECODE: answer, ABOUT: here}) as where, asyncio.timeout(WAIT_S):
                found = await asyncio.gather(*(one(workers, where) for _ in range(ANSWERS)))
        finally:
            await workers.close()
        assert found == [[7]] * ANSWERS

    asyncio.run(run())


def test_a_worker_that_is_busy_for_long_is_waited_for() -> None:
    """Given up, its prompt would be computed again elsewhere, to be given up there as well."""
    asked: list[str] = []

    async def run() -> PrefillDone:
        is_done = asyncio.Event()

        async def slow(_: web.Request) -> web.StreamResponse:
            await is_done.wait()
            return web.Response(body=encode(PrefillDone(7, 0, 0.0, 1.0)))

        async def says_so(request: web.Request) -> web.StreamResponse:
            asked.append(request.path)
            if len(asked) == 3:
                is_done.set()
            return await here(request)

        workers = InferenceWorkers(None, SILENCE_S)
        try:
            async with worker({PREFILL: slow, ABOUT: says_so}) as where, asyncio.timeout(WAIT_S):
                return await workers.prefill(where, PROMPT)
        finally:
            await workers.close()

    assert asyncio.run(run()).first == 7
    assert len(asked) >= 3


def test_a_worker_that_says_nothing_at_all_is_given_up() -> None:
    async def run() -> None:
        workers = InferenceWorkers(None, SILENCE_S)
        try:
            async with worker({PREFILL: hangs, ABOUT: hangs}) as where, asyncio.timeout(WAIT_S):
                await workers.prefill(where, PROMPT)
        finally:
            await workers.close()

    with pytest.raises(Unavailable, match=r"worker at 127\.0\.0\.1"):
        asyncio.run(run())
