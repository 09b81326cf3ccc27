"""Ahead of a prompt's end a gateway has the decode worker pull, and nothing depends on that."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from kvstore.errors import Unavailable, UnknownTicket
from tests.unit.relay_rig import (
    PROMPT,
    STAGED,
    TICKET,
    TOKENS,
    Case,
    lines,
    route,
)
from workers.serve_messages import PrepareAsk


def ahead_case(prefills: list[object], *decodes: list[object]) -> Case:
    """Decode workers are chosen before the prompt is computed."""
    case = Case(prefills, *decodes)
    case.master.routes_ahead = True
    return case


def test_the_worker_that_is_chosen_ahead_pulls_until_the_answer_begins() -> None:
    case = ahead_case([STAGED], lines(5, 1, 2, 3, 4))
    seen: list[tuple[int, int]] = []

    async def act() -> None:
        await case.passage.open()
        async for token in case.passage.tokens():
            await asyncio.sleep(0)
            seen.append((token, case.workers.preparing))

    case.run(act)
    assert seen == [(TOKENS[0], 1), *((token, 0) for token in TOKENS[1:])]
    assert PrepareAsk(TICKET, route(1), "r/1", PROMPT) in case.workers.asked
    assert case.workers.preparing == 0


@pytest.mark.parametrize("error", [Unavailable("x"), UnknownTicket("x"), TimeoutError()])
def test_a_prefill_that_fails_ends_what_is_pulled_ahead(error: Exception) -> None:
    case = ahead_case([error, STAGED], lines(5, 1, 2, 3, 4))
    assert case.run() == TOKENS
    prepares = [each for each in case.workers.asked if isinstance(each, PrepareAsk)]
    assert [each.route for each in prepares] == [route(1), route(2)]
    assert case.workers.preparing == 0


def test_a_decode_that_fails_ends_what_is_pulled_ahead() -> None:
    case = ahead_case([STAGED], [Unavailable("dead")], lines(5, 1, 2, 3, 4))
    assert case.run() == TOKENS
    assert case.workers.preparing_at == [1, 0]


def test_who_stops_asking_ends_what_is_pulled_ahead() -> None:
    case = ahead_case([STAGED], lines(5, 1, 2, 3, 4))

    async def act() -> None:
        await case.passage.open()
        async with aclosing(case.passage.tokens()) as tokens:
            assert await anext(tokens) == TOKENS[0]
            assert case.workers.preparing == 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert case.workers.preparing == 0

    case.run(act)
