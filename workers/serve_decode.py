"""A decode worker's work on one ticket: claim, check, install, stream, and at the end keep.

A coroutine for each ticket; the pool's calls run in threads, the model in the batch's. However a
ticket ends, its row leaves the batch, and the master hears of it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvstore.client.descriptor import check_descriptor
from kvstore.client.tickets import claim_ticket, finish_ticket, install_ticket, shed_ticket
from kvstore.errors import OutOfSpace
from kvstore.wire.messages.tickets import Running
from workers.engine import EngineRequest
from workers.serve_messages import Line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kvstore.client.steps import Steps
    from kvstore.client.store import KVStore
    from kvstore.client.tickets import Member
    from workers.engine import Generated, Taken
    from workers.serve_batch import Batch
    from workers.serve_kv import TicketKV
    from workers.serve_messages import DecodeAsk

T = TypeVar("T")


@dataclass(frozen=True)
class _Claim:
    """A ticket that runs here."""

    ask: DecodeAsk
    token: int
    events: asyncio.Queue[Generated | None]
    """None: it is somebody else's by now."""

    @property
    def id(self) -> str:
        """In the batch: of one ticket's two claims each has its own."""
        return f"{self.ask.ticket}/{self.token}"


class DecodeDesk:
    """Runs tickets in a batch."""

    def __init__(
        self,
        store: KVStore,
        kv: TicketKV,
        batch: Batch,
        member: Callable[[], Member],
        stop: frozenset[int],
    ) -> None:
        """`member` tells this worker's present life; `stop` are tokens that end an answer."""
        self._store = store
        self._kv = kv
        self._batch = batch
        self._member = member
        self._stop = stop
        self._claims: dict[str, _Claim] = {}
        self._keeping: set[asyncio.Future[int]] = set()
        self.is_draining = False
        self.link_bytes_per_s = 0.0

    def running(self) -> tuple[Running, ...]:
        """What is claimed here and not finished, for the master."""
        held = self._batch.held
        return tuple(
            Running(each.ask.ticket, each.token, held.get(each.id, 0))
            for each in self._claims.values()
        )

    def drop(self, tickets: tuple[int, ...]) -> None:
        """These are somebody else's: what runs of them here ends."""
        for claim in self._claims.values():
            if claim.ask.ticket in tickets:
                claim.events.put_nowait(None)

    async def decode(self, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        """The lines of one answer. Raises, before the first, why it cannot be given here."""
        if self.is_draining:
            raise OutOfSpace("this worker takes nothing new")
        started = time.perf_counter()
        claimed = await self._ask(claim_ticket(ask.ticket, ask.route, self._member()))
        prompt, streamed = ask.tokens[: ask.prompt_tokens], ask.tokens[ask.prompt_tokens :]
        namespace = self._kv.opened.namespace
        tail_tokens = check_descriptor(claimed, namespace, prompt, streamed)
        # A dying worker may have told the master of tokens that its stream has not brought.
        generated = max(streamed, claimed.tokens, key=len)
        request, claim = self._request(ask, (*prompt, *generated), claimed.token)
        self._claims[claim.id] = claim
        try:
            pulled = await asyncio.to_thread(self._kv.take_up, claimed, tail_tokens, request.tokens)
            self.link_bytes_per_s = pulled.bytes_per_s or self.link_bytes_per_s
            listener = self._listener(claim.events)
            await asyncio.wrap_future(self._batch.add(request, pulled.cache, listener))
            await self._ask(install_ticket(ask.ticket, claim.token))
            yield Line(claim.token, install_s=time.perf_counter() - started)
            for index in range(len(streamed), len(generated)):
                yield Line(claim.token, index, generated[index])
            async for line in self._stream(claim):
                yield line
        finally:
            self._batch.cancel(claim.id)
            self._claims.pop(claim.id, None)

    async def shed(self) -> None:
        """Hand everything that runs over to other workers, and take nothing new."""
        self.is_draining = True
        await asyncio.gather(*(self._shed(claim) for claim in list(self._claims.values())))

    def _request(
        self, ask: DecodeAsk, tokens: tuple[int, ...], token: int
    ) -> tuple[EngineRequest, _Claim]:
        claim = _Claim(ask, token, asyncio.Queue())
        how = ask.sampling
        left = ask.prompt_tokens + ask.max_tokens - len(tokens)
        request = EngineRequest(
            claim.id, tokens, left, how.temperature, how.top_p, how.seed, self._stop
        )
        return request, claim

    def _listener(self, events: asyncio.Queue[Generated | None]) -> Callable[[Generated], None]:
        loop = asyncio.get_running_loop()

        def listen(one: Generated) -> None:
            loop.call_soon_threadsafe(events.put_nowait, one)

        return listen

    async def _stream(self, claim: _Claim) -> AsyncGenerator[Line, None]:
        """Up to the last token, or to where the ticket goes to somebody else."""
        while (one := await claim.events.get()) is not None:
            index = one.position - claim.ask.prompt_tokens
            if one.finish is None:
                yield Line(claim.token, index, one.token)
                continue
            await self._ask(finish_ticket(claim.ask.ticket, claim.token))
            if one.taken is not None:
                self._keep(one.taken)
            yield Line(claim.token, index, one.token, finish=one.finish)
            return

    def _keep(self, taken: Taken) -> None:
        """Store full pages of the answer, for the chat's next turn; nobody waits for that."""
        keeping = asyncio.ensure_future(
            asyncio.to_thread(self._kv.keep, taken.tokens[:-1], taken.cache)
        )
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)

    async def _shed(self, claim: _Claim) -> None:
        taken = await asyncio.wrap_future(self._batch.export(claim.id))
        if taken is None:
            return
        ask = claim.ask
        done = await asyncio.to_thread(
            self._kv.hand_over, ask.ticket, ask.route, taken.tokens[:-1],
            taken.tokens[ask.prompt_tokens :], taken.cache, ask.deadline_s,
        )  # fmt: skip
        await self._ask(shed_ticket(ask.ticket, claim.token, done))
        claim.events.put_nowait(None)

    async def _ask(self, plan: Steps[T]) -> T:
        return await asyncio.to_thread(self._store.carry_out, plan)
