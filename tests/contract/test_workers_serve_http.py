"""What an inference worker answers to its gateway, over loopback, and in whose name."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from kvstore.errors import OutOfSpace, Unavailable
from kvstore.namespace import Attention, CacheGroup, Content, Layout
from workers import tracing
from workers.gateway_workers import InferenceWorkers
from workers.serve_http import Desk
from workers.serve_messages import (
    About,
    DecodeAsk,
    Line,
    PrefillAsk,
    PrefillDone,
    PrepareAsk,
    Sampling,
)
from workers.serve_proof import Doorkeeper
from workers.tracing import NoSpans, request_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

WAIT_S = 30.0
GREEDY = Sampling(0.0, 1.0, 0)
CONTENT = Content(
    "default", "m", "r", "", "float32", (CacheGroup(Attention.FULL, 1, 1, 1, 1),), "rope:1"
)
ABOUT_IT = About("m", CONTENT, Layout(page_tokens=64), 100, "")
LINES = [Line(5), Line(5, 1, 7), Line(5, 2, 8)]
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class FakeDesk:
    """Says these lines, and ends as it is told; computes prompts at once."""

    def __init__(self, lines: list[Line], end: Exception | None) -> None:
        self._lines, self._end = lines, end
        self.queued_tokens = 0
        self.heard: dict[str, str] = {}

    async def decode(self, _: DecodeAsk) -> AsyncGenerator[Line, None]:
        for line in self._lines:
            yield line
        if self._end is not None:
            raise self._end

    async def prepare(self, ask: PrepareAsk) -> None:
        self.heard = tracing.headers()

    async def compute(self, ask: PrefillAsk, asked_s: float) -> PrefillDone:
        self.heard = tracing.headers()
        return PrefillDone(7, 0, 0.0, 0.0)


@asynccontextmanager
async def served(desk: Any) -> AsyncIterator[str]:  # noqa: ANN401 -- a prefill and a decode desk
    made = Desk(ABOUT_IT, Doorkeeper(None), desk, desk, 10, NoSpans())
    runner = web.AppRunner(made.application(), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def decoded(desk: FakeDesk) -> tuple[list[Line], BaseException | None]:
    """What a gateway hears, and the error that ends it."""
    heard: list[Line] = []

    async def hear(lines: AsyncGenerator[Line, None]) -> None:
        async for line in lines:
            heard.append(line)  # noqa: PERF401 -- what came before an error counts

    async def run() -> None:
        workers = InferenceWorkers(None)
        try:
            async with served(desk) as where, asyncio.timeout(WAIT_S):
                ask = DecodeAsk(1, 1, "r", 1, (1,), 5, GREEDY, WAIT_S, 1)
                async with aclosing(workers.decode(where, ask)) as lines:
                    await hear(lines)
        finally:
            await workers.close()

    try:
        asyncio.run(run())
    except (OutOfSpace, Unavailable) as error:
        return heard, error
    return heard, None


def test_a_stream_that_somebody_else_goes_on_with_ends_well() -> None:
    assert decoded(FakeDesk(LINES, None)) == (LINES, None)


def test_a_stream_that_ends_by_an_error_is_broken_off() -> None:
    """A gateway took it for handed on, and waited for a route of what nobody had staged."""
    heard, error = decoded(FakeDesk(LINES, Unavailable("no pool")))
    assert heard == LINES[: len(heard)], "what is lost on the way is generated again"
    assert isinstance(error, Unavailable)


@pytest.mark.parametrize("end", [OutOfSpace("no room"), Unavailable("no pool")])
def test_what_cannot_begin_is_refused_with_the_reason(end: Exception) -> None:
    heard, error = decoded(FakeDesk([], end))
    assert heard == []
    assert (type(error), str(error)) == (type(end), str(end))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_prompt_is_computed_and_pulled_in_the_name_of_its_request(*, is_ahead: bool) -> None:
    desk = FakeDesk([], None)

    async def run() -> None:
        workers = InferenceWorkers(None)
        try:
            async with served(desk) as where, asyncio.timeout(WAIT_S):
                with request_of(NoSpans(), "gateway", "r", TRACEPARENT):
                    if is_ahead:
                        await workers.prepare(where, PrepareAsk(1, 1, "r", (1,)))
                    else:
                        await workers.prefill(where, PrefillAsk(1, "r", (1,), GREEDY, WAIT_S))
        finally:
            await workers.close()

    asyncio.run(run())
    assert desk.heard == {tracing.TRACEPARENT: TRACEPARENT}
    assert desk.queued_tokens == 0
