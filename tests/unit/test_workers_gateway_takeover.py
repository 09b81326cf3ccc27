"""A gateway's request while masters change: real masters' cores, at every point on its way."""

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
from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrefillDone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvstore.client.steps import Steps
    from kvstore.wire.messages.base import Message

PROMPT = tuple(range(2 * ticket_rig.PAGE_TOKENS + 10))
TOKENS = [30, 31, 32, 33]
WISH = Wish(
    is_chat=False, tokens=PROMPT, max_tokens=len(TOKENS), temperature=0.0, top_p=1.0, seed=None,
    stop=(), stream=False, usage_at_end=False, timings=False,
)  # fmt: skip


class Pool:
    """Masters one after the other, a prefill and a decode worker, and a gateway's way to both."""

    def __init__(self, at: str, *, is_told: bool) -> None:
        """Another master leads from the moment `at` on; the gateway presents at once, or later."""
        self.fleet = ticket_rig.Fleet()
        self.fleet.pair()
        self._at, self._is_told = at, is_told
        space = OpenedNamespace(self.fleet.space.namespace, self.fleet.space.ordinal)
        patience = Patience(1.0, 60.0)
        self.gateway = Fleet(self, self, space, 99, patience, ManualClock(0.0))

    # The master, as a store asks it.

    async def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        await asyncio.sleep(0)
        try:
            step = next(plan)
            while True:
                assert isinstance(step, Ask)
                try:
                    answer = self._ask(step.message)
                except KVStoreError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(answer)
        except StopIteration as stop:
            return stop.value

    def _ask(self, message: Message) -> Message:
        rig = self.fleet.rig
        reply = rig.settled(rig.engine, rig.ask(rig.engine, message))
        assert reply is not None
        if isinstance(reply, Failure):
            raise error_from_wire(reply.code, reply.text)
        return reply

    async def _moment(self, name: str) -> None:
        if name != self._at:
            return
        self._at = ""
        rig = self.fleet.rig
        rig.takeover(rig.master.core.epoch + 1)
        rig.workers["w1"].join()
        self.fleet.pair()
        if self._is_told:
            await self.gateway.present()

    # The workers.

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        name = where.partition(":")[0]
        self._ask(wire.BeginPrefill(ask.ticket, name, self.fleet.lives[name]))
        await self._moment("computed")
        life, keys = self.fleet.lives[name], self.gateway.opened.chain(PROMPT).packed
        staged = wire.StageTicket(ask.ticket, name, life, keys, wire.TailRef(), (TOKENS[0],))
        self._ask(staged)
        await self._moment("staged")
        return PrefillDone(TOKENS[0], 0, 0.0, 0.0)

    async def decode(self, where: str, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        name = where.partition(":")[0]
        await self._moment("routed")
        claim = wire.ClaimTicket(ask.ticket, ask.route, name, self.fleet.lives[name])
        claimed = self._ask(claim)
        assert isinstance(claimed, wire.TicketClaimed)
        await self._moment("claimed")
        self._ask(wire.TicketInstalled(ask.ticket, claimed.token))
        yield Line(claimed.token)
        for index in range(1, len(TOKENS)):
            yield Line(claimed.token, index, TOKENS[index])
            await self._moment("installed")


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("at", ["computed", "staged", "routed", "claimed", "installed"])
def test_a_request_goes_on_under_the_next_master_from_where_it_was(
    at: str, *, is_told: bool
) -> None:
    pool = Pool(at, is_told=is_told)
    passage = Passage(pool.gateway, "r/1", WISH, 3)

    async def whole() -> list[int]:
        await pool.gateway.present()
        await passage.open()
        said = [token async for token in passage.tokens()]
        await pool.gateway.close()
        return said

    assert asyncio.run(whole()) == TOKENS
    again = at == "computed" and not is_told
    assert passage.stages.prefills == 1 + again
    assert passage.stages.routes == 1 + (at in {"routed", "claimed"})
    pool.fleet.assert_nothing_held()
