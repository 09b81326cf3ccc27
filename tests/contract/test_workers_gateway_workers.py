"""A gateway's questions to inference workers, over loopback."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from aiohttp import web

from workers.gateway_workers import InferenceWorkers
from workers.serve_messages import DECODE, DecodeAsk, Line, Sampling, encode

ANSWERS = 150
"""More than aiohttp's client has connections by itself."""
WAIT_S = 30.0


def test_as_many_answers_are_under_way_as_workers_take() -> None:
    """The master has set a place aside for each: one that waited for a connection would hold it."""

    async def run() -> None:
        begun, all_begun = 0, asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            nonlocal begun
            begun += 1
            if begun == ANSWERS:
                all_begun.set()
            await all_begun.wait()
            return web.Response(body=encode(Line(1, 0, 7)) + b"\n")

        application = web.Application()
        application.router.add_post(DECODE, answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        where = "{}:{}".format(*runner.addresses[0][:2])
        workers = InferenceWorkers(None)
        ask = DecodeAsk(1, 1, "r", 1, (1,), 1, Sampling(0.0, 1.0, 0), WAIT_S)

        async def one() -> list[int]:
            async with aclosing(workers.decode(where, ask)) as lines:
                return [line.token async for line in lines]

        try:
            async with asyncio.timeout(WAIT_S):
                found = await asyncio.gather(*(one() for _ in range(ANSWERS)))
        finally:
            await workers.close()
            await runner.cleanup()
        assert found == [[7]] * ANSWERS

    asyncio.run(run())
