"""A decode worker's work on one ticket: claim, check, install, stream, and keep.

Of a ticket without a route all is computed here: nothing is claimed, and who has asked for it says
when it ends. A coroutine for each ticket; the pool's calls run in threads, the model in the
batch's. However a ticket ends, its row leaves the batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore.client.descriptor import check_descriptor
from kvstore.client.tickets import (
    HandOver,
    begin_prefill,
    claim_ticket,
    finish_ticket,
    install_ticket,
    shed_ticket,
    stage_ticket,
)
from kvstore.errors import KVStoreError, OutOfSpace, Unavailable
from kvstore.wire.messages.tickets import Running
from workers.engine import EngineRequest, Taken
from workers.serve_ahead import AheadDesk
from workers.serve_messages import Line
from workers.serve_pages import AnswerPages
from workers.tracing import stage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence

    from kvstore.client.steps import Steps
    from kvstore.client.store import KVStore
    from kvstore.client.tickets import Member
    from kvstore.wire.messages.tickets import TicketClaimed
    from workers.engine import Generated
    from workers.serve_batch import Batch, Listener
    from workers.serve_kv import Pulled, TicketKV
    from workers.serve_messages import DecodeAsk, PrepareAsk

T = TypeVar("T")

LOG: Final = logging.getLogger(__name__)
PUT_THREADS: Final = 4
PUTS_AT_ONCE: Final = 64
"""Of answers' pages. Each holds its row's memory: behind a slow pool others are not begun."""


class _Taken(NamedTuple):
    """A ticket that is to run here."""

    token: int
    generated: tuple[int, ...]
    """By all who had it before."""
    pull: Callable[[Sequence[int]], Awaitable[Pulled]]


@dataclass(frozen=True)
class _Claim:
    """A ticket that runs here."""

    ask: DecodeAsk
    token: int
    """0: it has no route."""
    events: asyncio.Queue[Generated | Taken | None]
    """None: it is somebody else's by now."""
    context: Context
    """Of who has asked, for lines of the log."""

    @property
    def id(self) -> str:
        """In the batch: of one ticket's two claims each has its own."""
        return _id(self.ask.ticket, self.token)


def _id(ticket: int, token: int) -> str:
    return f"{ticket}/{token}"


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
        self.ahead: Final = AheadDesk(store, kv, member)
        self._claims: dict[str, _Claim] = {}
        # Of their own: claims and ends of answers wait for no put.
        self._puts = ThreadPoolExecutor(PUT_THREADS, "puts")
        self._keeping: set[asyncio.Future[None]] = set()
        self.is_draining = False
        """Set by who ends this worker: it takes nothing new."""
        self.link_bytes_per_s = 0.0

    def running(self) -> tuple[Running, ...]:
        """What is claimed here and not finished, for the master."""
        held = self._batch.held
        claims = tuple(
            Running(each.ask.ticket, each.token, held.get(each.id, 0))
            for each in self._claims.values()
        )
        return claims + self.ahead.running()

    def drop(self, claims: tuple[Running, ...]) -> None:
        """These are somebody else's: what runs of them here ends."""
        for each in claims:
            claim = self._claims.get(_id(each.ticket, each.token))
            if claim is not None:
                claim.events.put_nowait(None)
            self.ahead.drop(each.ticket, each.token)

    async def prepare(self, ask: PrepareAsk) -> None:
        """Pull a prompt while it is being computed. Raises why it cannot be pulled here."""
        if self.is_draining:
            raise OutOfSpace("this worker takes nothing new")
        await self.ahead.prepare(ask)

    async def decode(self, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        """The lines of one answer. Raises, before the first, why it cannot be given here."""
        if self.is_draining:
            raise OutOfSpace("this worker takes nothing new")
        taken = await (self._claimed(ask) if ask.route else self._begun(ask))
        told, generated = len(ask.tokens) - ask.prompt_tokens, taken.generated
        request, claim = self._request(ask, generated, taken.token)
        self._claims[claim.id] = claim
        try:
            began_s = time.perf_counter()
            pulled = await taken.pull(request.tokens)
            stage("transfer", time.perf_counter() - began_s, tokens=pulled.tokens)
            self.link_bytes_per_s = pulled.bytes_per_s or self.link_bytes_per_s
            LOG.info("ticket %d: claim %d: KV of %d of %d tokens from the pool",
                ask.ticket, claim.token, pulled.tokens, len(request.tokens),
            )  # fmt: skip
            listener = self._listener(claim.events)
            await asyncio.wrap_future(self._batch.add(request, pulled.cache, listener))
            if claim.token:
                await self._ask(install_ticket(ask.ticket, claim.token))
            reused = 0 if claim.token else min(pulled.tokens, ask.prompt_tokens)
            yield Line(claim.token, reused_tokens=reused)
            for index in range(told, len(generated)):
                yield Line(claim.token, index, generated[index])
            async for line in self._stream(claim, pulled.tokens):
                yield line
        finally:
            self._batch.cancel(claim.id)
            self._claims.pop(claim.id, None)

    async def shed(self) -> None:
        """Hand everything that runs over to other workers. Nothing new comes: it is draining."""
        await asyncio.gather(*(self._shed(claim) for claim in list(self._claims.values())))

    def close(self) -> None:
        """End every pull and put."""
        self.ahead.close()
        self._puts.shutdown(cancel_futures=True)

    async def _claimed(self, ask: DecodeAsk) -> _Taken:
        """Others have begun it."""
        claimed = await self._ask(claim_ticket(ask.ticket, ask.route, self._member()))
        prompt, streamed = ask.tokens[: ask.prompt_tokens], ask.tokens[ask.prompt_tokens :]
        namespace = self._kv.opened.namespace
        tail_tokens = check_descriptor(claimed, namespace, prompt, streamed)
        # A dying worker may have told the master of tokens that its stream has not brought.
        generated = max(streamed, claimed.tokens, key=len)
        pull = partial(self._take_up, ask.ticket, claimed, tail_tokens)
        return _Taken(claimed.token, generated, pull)

    async def _begun(self, ask: DecodeAsk) -> _Taken:
        """All of it is this worker's."""
        await self._ask(begin_prefill(ask.ticket, self._member()))
        return _Taken(0, ask.tokens[ask.prompt_tokens :], self._reuse)

    async def _reuse(self, tokens: Sequence[int]) -> Pulled:
        return await asyncio.to_thread(self._kv.reuse, tokens)

    async def _take_up(
        self, ticket: int, claimed: TicketClaimed, tail_tokens: int, tokens: Sequence[int]
    ) -> Pulled:
        """What has come ahead, whose end may be waited for, and the rest. Beats name the claim."""
        arrived = await self.ahead.take(ticket)
        return await asyncio.to_thread(self._kv.take_up, claimed, tail_tokens, tokens, arrived)

    def _request(
        self, ask: DecodeAsk, generated: tuple[int, ...], token: int
    ) -> tuple[EngineRequest, _Claim]:
        claim = _Claim(ask, token, asyncio.Queue(), copy_context())
        how, tokens = ask.sampling, (*ask.tokens[: ask.prompt_tokens], *generated)
        request = EngineRequest(
            claim.id, tokens, ask.max_tokens - len(generated),
            how.temperature, how.top_p, how.seed, self._stop, ask.expected_tokens,
        )  # fmt: skip
        return request, claim

    def _listener(self, events: asyncio.Queue[Generated | Taken | None]) -> Listener:
        loop = asyncio.get_running_loop()

        def listen(one: Generated | Taken) -> None:
            loop.call_soon_threadsafe(events.put_nowait, one)

        return listen

    async def _stream(self, claim: _Claim, pooled: int) -> AsyncGenerator[Line, None]:
        """Up to the last token, or to where the ticket goes to somebody else.

        The pool had so many tokens of it at first.
        """
        pages = AnswerPages(self._kv, self._batch, claim.id, pooled, self._beside, self._puts)
        while (one := await claim.events.get()) is not None:
            if isinstance(one, Taken):
                await self._pass_on(claim, one)
                return
            index = one.position - claim.ask.prompt_tokens
            if one.taken is None:
                pages.grown(one.position + 1)
            else:
                if claim.token:
                    await self._ask(finish_ticket(claim.ask.ticket, claim.token))
                if self._beside(pages.end(one.taken)) is None:
                    LOG.warning("pages of an answer are not kept: %d others are", PUTS_AT_ONCE)
            yield Line(claim.token, index, one.token)
            if one.taken is not None:
                return

    def _beside(self, work: Coroutine[None, None, None]) -> asyncio.Future[None] | None:
        if len(self._keeping) == PUTS_AT_ONCE:
            work.close()
            return None
        keeping = asyncio.ensure_future(work)
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        return keeping

    async def _shed(self, claim: _Claim) -> None:
        taken = await asyncio.wrap_future(self._batch.export(claim.id))
        if taken is None:
            return
        try:
            await self._pass_on(claim, taken)
        except KVStoreError as error:  # its gateway has it computed again where this worker ends
            claim.context.run(
                LOG.warning, "ticket %d is not handed on: %s", claim.ask.ticket, error
            )
        else:
            claim.events.put_nowait(None)

    async def _pass_on(self, claim: _Claim, taken: Taken) -> None:
        """Somebody else goes on, from what is there."""
        await (self._hand_on(claim, taken) if claim.token else self._stage(claim.ask, taken))

    async def _hand_on(self, claim: _Claim, taken: Taken) -> None:
        ask = claim.ask
        done = await asyncio.to_thread(
            self._kv.hand_over, ask.ticket, ask.route, taken.tokens[:-1],
            taken.tokens[ask.prompt_tokens :], taken.cache, ask.deadline_s,
        )  # fmt: skip
        await self._ask(shed_ticket(ask.ticket, claim.token, done))

    async def _stage(self, ask: DecodeAsk, taken: Taken) -> None:
        """As if this worker had only computed the prompt, and a little more."""
        generated = taken.tokens[ask.prompt_tokens :]
        if not generated:
            raise Unavailable("there is no token yet")
        chain = await asyncio.to_thread(
            self._kv.keep_prompt, taken.tokens[:-1], ask.prompt_tokens, taken.cache
        )
        await self._ask(stage_ticket(ask.ticket, self._member(), HandOver(chain, generated)))

    async def _ask(self, plan: Steps[T]) -> T:
        return await asyncio.to_thread(self._store.carry_out, plan)
