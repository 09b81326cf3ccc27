"""A prefill worker's desk: what it tells the master of a prompt, and what answers stop it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import DynamicCache

from kvstore.client.steps import Ask
from kvstore.client.tickets import HandOver, Member
from kvstore.errors import Fenced, KVStoreError, UnknownTicket
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from tests.tiny_model import config, text, tiny
from tests.unit.client_scripts import opened
from workers import tracing
from workers.engine import CHUNK_TOKENS
from workers.serve_kv import Pulled
from workers.serve_messages import PrefillAsk, Sampling
from workers.serve_prefill import PrefillDesk
from workers.tracing import NoSpans, request_of

if TYPE_CHECKING:
    from kvstore.client.steps import Steps
    from kvstore.wire.messages.base import Message

PROMPT = tuple(text(2 * CHUNK_TOKENS + 5))
SPACE = opened()
WAIT_S = 30.0
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ASK = PrefillAsk(9, "r", PROMPT, Sampling(0.0, 1.0, 0), 60.0)


class Pool:
    """Master and KV: has nothing of a prompt, and refuses the second report of how far it is."""

    opened = SPACE

    def __init__(self, refusal: KVStoreError | None) -> None:
        self.asked: list[Message] = []
        self.heard: list[dict[str, str]] = []
        """In whose name each was asked."""
        self.is_computing, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self._refusal = refusal

    def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        step = next(plan)
        assert isinstance(step, Ask)
        self.asked.append(step.message)
        self.heard.append(tracing.headers())
        self.is_computing.set()
        assert self.may_go_on.wait(WAIT_S)
        if len(self.asked) == 3 and self._refusal is not None:
            raise self._refusal
        try:
            plan.send(Done())
        except StopIteration as stop:
            return stop.value
        raise AssertionError("one question each")

    def reuse(self, _: object) -> Pulled:
        return Pulled(DynamicCache(config=config()), 0, 0.0)

    def keep_part(self, *_: object) -> None:
        """Nothing is kept."""

    def hand_over(self, *_: object) -> HandOver:
        return HandOver(SPACE.chain(()), (1,))


def desk_of(pool: Pool) -> PrefillDesk:
    fake: Any = pool
    language: Any = SimpleNamespace(model=tiny())
    member = Member(SPACE.namespace.id, "p1", 3, 0.5, 3.0)
    return PrefillDesk(language, fake, fake, lambda: member)


def computed(pool: Pool) -> None:
    with closing(desk_of(pool)) as desk:
        asyncio.run(desk.compute(ASK, 0.0))


@pytest.mark.parametrize("refusal", [None, UnknownTicket("another master leads")])
def test_a_master_that_does_not_know_it_yet_hears_of_it_when_it_is_staged(
    refusal: KVStoreError | None,
) -> None:
    pool = Pool(refusal)
    computed(pool)
    left = [each.tokens_left for each in pool.asked if isinstance(each, wire.BeginPrefill)]
    assert left == [0, len(PROMPT), len(PROMPT) - CHUNK_TOKENS, len(PROMPT) - 2 * CHUNK_TOKENS]
    assert isinstance(pool.asked[-1], wire.StageTicket)


def test_what_somebody_else_computes_is_not_staged() -> None:
    pool = Pool(Fenced("computed by somebody else"))
    with pytest.raises(Fenced):
        computed(pool)
    assert not any(isinstance(each, wire.StageTicket) for each in pool.asked)


def test_a_prompt_is_computed_in_the_name_of_its_request() -> None:
    pool = Pool(None)
    with request_of(NoSpans(), "prefill", "r", TRACEPARENT):
        computed(pool)
    # The first and the last are asked by who computes, those between beside it.
    assert pool.heard[0] == pool.heard[-1] == {tracing.TRACEPARENT: TRACEPARENT}


def test_what_nobody_waits_for_any_more_is_not_staged() -> None:
    pool = Pool(None)
    pool.may_go_on.clear()

    async def whole() -> None:
        with closing(desk_of(pool)) as desk:
            computing = asyncio.ensure_future(desk.compute(ASK, 0.0))
            assert await asyncio.to_thread(pool.is_computing.wait, WAIT_S)
            computing.cancel()
            await asyncio.wait((computing,))
            pool.may_go_on.set()

    asyncio.run(whole())
    assert not any(isinstance(each, wire.StageTicket) for each in pool.asked)
