"""A gateway's request at every point of its way: another master leads, or the client hangs up.

Real masters' cores, so that what a request holds of them is seen.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.steps import Ask
from kvstore.errors import KVStoreError, error_from_wire
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Failure
from tests.fakes import ManualClock
from tests.unit import ticket_rig
from workers.gateway_relay import Fleet, Passage, Patience
from workers.gateway_requests import Wish
from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrefillDone, PrepareAsk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from kvstore.client.steps import Steps
    from kvstore.wire.messages.base import Message

PROMPT = tuple(range(2 * ticket_rig.PAGE_TOKENS + 10))
TOKENS = [30, 31, 32, 33]
WISH = Wish(
    is_chat=False, tokens=PROMPT, max_tokens=len(TOKENS), temperature=0.0, top_p=1.0, seed=None,
    stop=(), stream=False, usage_at_end=False, timings=False,
)  # fmt: skip
MOMENTS = ["opened", "begun", "computed", "staged", "routed", "asked", "claimed", "installed"]


class Pool:
    """Masters one after the other, a prefill and a decode worker, and a gateway's way to both."""

    def __init__(self, at: str) -> None:
        """`act` is done when the request has come so far."""
        self.fleet = ticket_rig.Fleet()
        self.fleet.pair()
        self._at = at
        self._is_computing = False
        self.act: Callable[[], Awaitable[None]] = self.take_over
        space = OpenedNamespace(self.fleet.space.namespace, self.fleet.space.ordinal)
        self.gateway = Fleet(self, self, space, 99, Patience(1.0, 60.0), ManualClock(0.0))
        self.passage = Passage(self.gateway, "r/1", WISH, 3)

    async def answer(self) -> list[int]:
        await self.gateway.present()
        await self.passage.open()
        return [token async for token in self.passage.tokens()]

    async def take_over(self) -> None:
        rig = self.fleet.rig
        rig.takeover(rig.master.core.epoch + 1)
        rig.workers["w1"].join()
        self.fleet.pair()

    async def take_over_and_present(self) -> None:
        await self.take_over()
        await self.gateway.present()

    async def _moment(self, name: str) -> None:
        if name == self._at:
            self._at = ""
            await self.act()

    # The master, as a store asks it.

    async def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        try:
            step = next(plan)
            while True:
                assert isinstance(step, Ask)
                try:
                    answer = await self._asked(step.message)
                except KVStoreError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(answer)
        except StopIteration as stop:
            return stop.value

    async def _asked(self, message: Message) -> Message:
        await asyncio.sleep(0)
        rig = self.fleet.rig
        reply, request = rig.ask(rig.engine, message), rig.last_request
        while reply is None:  # ahead of the prompt's end it may be held back for long
            if not self._is_computing:
                await self._moment("held back")
            await asyncio.sleep(0)
            rig.tick()
            reply = rig.reply(rig.engine, request)
        answer = self._checked(reply)
        if isinstance(answer, wire.TicketOpened):
            await self._moment("opened")
        if isinstance(answer, wire.TicketRouted):
            await self._moment("routed")
        return answer

    def _checked(self, reply: Message | None) -> Message:
        assert reply is not None
        if isinstance(reply, Failure):
            raise error_from_wire(reply.code, reply.text)
        return reply

    # The workers.

    def _ask(self, message: Message) -> Message:
        return self._checked(self.fleet.rig.ask(self.fleet.rig.engine, message))

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        self._is_computing = True
        try:
            return await self._computed(where, ask)
        finally:
            self._is_computing = False

    async def _computed(self, where: str, ask: PrefillAsk) -> PrefillDone:
        name = where.partition(":")[0]
        await self._moment("begun")
        self._ask(wire.BeginPrefill(ask.ticket, name, self.fleet.lives[name]))
        await self._moment("computed")
        life, keys = self.fleet.lives[name], self.gateway.opened.chain(PROMPT).packed
        self._ask(wire.StageTicket(ask.ticket, name, life, keys, wire.TailRef(), (TOKENS[0],)))
        await self._moment("staged")
        return PrefillDone(TOKENS[0], 0, 0.0, 0.0)

    async def prepare(self, where: str, ask: PrepareAsk) -> None:
        raise AssertionError("no worker is chosen ahead here")

    async def decode(self, where: str, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        name = where.partition(":")[0]
        await self._moment("asked")
        life = self.fleet.lives[name]
        claimed = self._ask(wire.ClaimTicket(ask.ticket, ask.route, name, life))
        assert isinstance(claimed, wire.TicketClaimed)
        await self._moment("claimed")
        self._ask(wire.TicketInstalled(ask.ticket, claimed.token))
        yield Line(claimed.token)
        for index in range(1, len(TOKENS)):
            yield Line(claimed.token, index, TOKENS[index])
            await self._moment("installed")


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("at", MOMENTS)
def test_a_request_goes_on_under_the_next_master_from_where_it_was(
    at: str, *, is_told: bool
) -> None:
    """Whether its gateway hears of that at once, or only by the next thing that it asks."""
    pool = Pool(at)
    if is_told:
        pool.act = pool.take_over_and_present

    async def whole() -> list[int]:
        said = await pool.answer()
        await pool.gateway.close()
        return said

    assert asyncio.run(whole()) == TOKENS
    not_known = {"begun", "computed"} if not is_told else set()
    assert pool.passage.stages.prefills == 1 + (at in {"opened"} | not_known)
    assert pool.passage.stages.routes == 1 + (at in {"routed", "asked", "claimed"})
    pool.fleet.assert_nothing_held()


@pytest.mark.parametrize("at", [*MOMENTS, "held back"])
def test_a_client_that_hangs_up_leaves_nothing_behind(at: str) -> None:
    pool = Pool(at)
    hung_up = False

    async def whole() -> None:
        answering = asyncio.ensure_future(pool.answer())

        async def hang_up() -> None:
            nonlocal hung_up
            hung_up = True
            answering.cancel()
            await asyncio.sleep(0)

        pool.act = hang_up
        with pytest.raises(asyncio.CancelledError):
            await answering
        for _ in range(20):  # what was asked before comes to its end
            await asyncio.sleep(0)
        await pool.gateway.close()

    asyncio.run(whole())
    assert hung_up
    assert len(pool.gateway.holder) == 0
    pool.fleet.assert_nothing_held()
