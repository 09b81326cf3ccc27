"""A request's passage through a gateway, by hand: a master and workers that follow a script."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvstore.client.steps import Ask
from kvstore.errors import (
    Fenced,
    KVStoreError,
)
from kvstore.ids import Epoch, generation_of
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from tests.fakes import ManualClock
from tests.unit.client_scripts import opened
from workers.gateway_relay import Fleet, Passage, Patience
from workers.gateway_requests import Wish
from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrefillDone, PrepareAsk, Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from types import UnionType

    from kvstore.client.steps import Steps
    from kvstore.wire.messages.base import Message

    Act = Callable[[], Awaitable[Any]]

PROMPT = tuple(range(10))
TOKENS = [30, 31, 32, 33, 34]
END = 99
WISH = Wish(
    is_chat=False, tokens=PROMPT, max_tokens=5, temperature=0.0, top_p=1.0, seed=None,
    stop=(), stream=False, usage_at_end=False, timings=False,
)  # fmt: skip
TICKET = generation_of(Epoch(1), 7)


class FakeMaster:
    """Answers every question of a plan, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.route = 0
        self.epoch = 1
        self.refusals: dict[type[Message], Exception] = {}
        """Raised once, of the next message of that type."""
        self.run_alone = ""
        """Why one worker is to go on alone, where a route has failed."""
        self.alone: list[str] = []
        """Why the first, second, ... worker that is named is to do all of it."""
        self.is_staged = asyncio.Event()
        """Cleared while a prompt is being computed: nobody is routed, unless `routes_ahead`."""
        self.is_staged.set()
        self.routes_ahead = False

    async def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        await asyncio.sleep(0)
        try:
            step = next(plan)
            while True:
                assert isinstance(step, Ask)
                if isinstance(step.message, wire.AwaitRoute) and not self.routes_ahead:
                    await self.is_staged.wait()
                try:
                    answer = self._answer(step.message)
                except KVStoreError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(answer)
        except StopIteration as stop:
            return stop.value

    def ends(self) -> list[Message]:
        return self.heard(wire.FinishTicket | wire.CancelTicket)

    def heard(self, kind: UnionType | type[Message]) -> list[Message]:
        return [message for message in self.asked if isinstance(message, kind)]

    def _answer(self, message: Message) -> Message:
        self.asked.append(message)
        if type(message) in self.refusals:
            raise self.refusals.pop(type(message))
        match message:
            case wire.OpenTicket() | wire.FailPrefill():
                fails = len(self.heard(wire.FailPrefill))
                alone = self.alone.pop(0) if self.alone else ""
                return wire.TicketOpened(TICKET, 0, f"p{fails}", f"p{fails}:1", alone)
            case wire.RunAlone():
                if not self.run_alone:
                    raise Fenced("another one decodes")
                return wire.TicketOpened(TICKET, 0, "b", "b:1", self.run_alone)
            case wire.GetTerm():
                return wire.Term(self.epoch)
            case wire.AwaitRoute():
                self.route += 1
                number = generation_of(Epoch(self.epoch), self.route)
                where, is_ahead = f"d{self.route}:1", not self.is_staged.is_set()
                return wire.TicketRouted(number, f"d{self.route}", where, is_ahead)
        return Done()


class FakeWorkers:
    """Each call is answered by the next of a script: a result, or an error."""

    def __init__(
        self, prefills: list[object], decodes: list[list[object]], is_staged: asyncio.Event
    ) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.is_staged = is_staged
        self.asked: list[PrefillAsk | PrepareAsk | DecodeAsk] = []
        self.preparing = 0
        self.preparing_at: list[int] = []
        """As each answer was asked for."""
        self.hung_up = 0

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        self.asked.append(ask)
        self.is_staged.clear()
        for _ in range(5):  # whoever else is at it comes to its next wait
            await asyncio.sleep(0)
        self.is_staged.set()
        found = self.prefills.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, PrefillDone)
        return found

    async def prepare(self, where: str, ask: PrepareAsk) -> None:
        self.asked.append(ask)
        self.preparing += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.preparing -= 1

    async def decode(self, where: str, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        self.asked.append(ask)
        self.preparing_at.append(self.preparing)
        try:
            for found in self.decodes.pop(0):
                await asyncio.sleep(0)
                if isinstance(found, Exception):
                    raise found
                assert isinstance(found, Line)
                yield found
        except GeneratorExit:
            self.hung_up += 1
            raise


STAGED = PrefillDone(TOKENS[0], 4, 0.1, 0.2)


def route(number: int) -> int:
    return generation_of(Epoch(1), number)


def lines(claim: int, *indices: int) -> list[object]:
    return [Line(claim), *(Line(claim, i, TOKENS[i]) for i in indices)]


class Case:
    def __init__(self, prefills: list[object], *decodes: list[object]) -> None:
        self.master, self.clock = FakeMaster(), ManualClock(0.0)
        self.workers = FakeWorkers(prefills, list(decodes), self.master.is_staged)
        patience = Patience(1.0, 60.0)
        self.fleet = Fleet(self.master, self.workers, opened(), END, patience, self.clock)
        self.passage = Passage(self.fleet, "r/1", WISH, 3)

    def run(self, act: Act | None = None) -> Any:  # noqa: ANN401 -- what `act` gives
        async def whole() -> Any:  # noqa: ANN401 -- what `act` gives
            try:
                return await (act or self.all)()
            finally:
                await self.fleet.close()

        return asyncio.run(whole())

    def asked_alone(self, *generated: int) -> DecodeAsk:
        tokens = (*PROMPT, *generated)
        how, left = Sampling(0.0, 1.0, 3), 5 - len(generated)
        return DecodeAsk(TICKET, 0, "r/1", len(PROMPT), tokens, 5, how, 60.0, left)

    async def all(self) -> list[int]:
        await self.passage.open()
        return [token async for token in self.passage.tokens()]
