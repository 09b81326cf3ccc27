"""A vLLM server's work on tickets, as its agent tells the fleet of it.

Prompts and answers are vLLM's; claims, hand-overs and ends are the master's. The server's connector
puts the pages and loads them: no KV comes here. The tokens behind the last full page are computed
again by who goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore.block_hashes import Hashing, chain_of
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
from kvstore.connectors.vllm.handover import HERE, Handover, parsed
from kvstore.errors import BadValue, KVStoreError, OutOfSpace, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.tickets import Running
from workers.serve_messages import Line, PrefillDone
from workers.tracing import stage
from workers.vllm_server import Piece, completion

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from typing import Protocol

    from kvstore.client.steps import Steps
    from kvstore.client.tickets import Member
    from kvstore.namespace import Namespace
    from kvstore.page import PageChain
    from workers.serve_messages import DecodeAsk, PrefillAsk, PrepareAsk
    from workers.vllm_server import VllmServer

    class Master(Protocol):
        """What is needed of a store; `KVStore` is one."""

        def carry_out(self, plan: Steps[T]) -> T:
            """Run a plan that only asks the master."""
            ...


T = TypeVar("T")
LOG: Final = logging.getLogger(__name__)


class VllmPages(NamedTuple):
    """What a vLLM server's KV is called."""

    namespaces: tuple[Namespace, ...]
    """One for each cache group."""
    number: int
    """Of the group whose pages are the fleet's, each the parent of the next."""
    hashing: Hashing

    @property
    def namespace(self) -> Namespace:
        """The fleet's."""
        return self.namespaces[self.number]

    def chain(self, tokens: Sequence[int]) -> PageChain:
        """The full pages of these."""
        return chain_of(self.namespace, tokens, self.hashing)

    def handed_over(self, pages: int) -> Handover:
        """What the server that goes on is told of so many pages."""
        ids = tuple([bytes(each.id) for each in self.namespaces])
        return Handover(ids, pages * self.namespace.layout.page_tokens)


class Told:
    """The master, and this agent's life in the fleet."""

    def __init__(self, master: Master, member: Callable[[], Member]) -> None:
        """`member` tells the present life."""
        self._master = master
        self.member = member

    async def carry_out(self, plan: Steps[T]) -> T:
        """Ask, in a thread."""
        return await asyncio.to_thread(self._master.carry_out, plan)


class VllmPrefill:
    """Has prompts computed. `queued_tokens` and `tokens_per_s` are for the master's choice."""

    def __init__(self, server: VllmServer, pages: VllmPages, told: Told, end_token: int) -> None:
        """Compute nothing yet."""
        self._server = server
        self._pages = pages
        self._told = told
        self._end_token = end_token
        self.queued_tokens = 0
        self.tokens_per_s = 0.0

    async def compute(self, ask: PrefillAsk, asked_s: float) -> PrefillDone:
        """Have it computed, and staged. Cancelled, vLLM ends it as well."""
        told, pages = self._told, self._pages
        await told.carry_out(begin_prefill(ask.ticket, told.member()))
        asked = completion(ask.tokens, 1, ask.sampling, self._end_token, {HERE: True})
        try:
            async with asyncio.timeout(ask.deadline_s):
                done = await self._server.prefill(asked)
        except TimeoutError as error:
            raise _late(ask.deadline_s) from error
        took_s = time.perf_counter() - asked_s
        self.tokens_per_s = max(1, len(ask.tokens) - done.cached_tokens) / took_s
        stage("compute", took_s, tokens=len(ask.tokens), reused=done.cached_tokens)
        chain = pages.chain(ask.tokens)
        _check_said(done.params, pages.handed_over(len(chain)))
        hand_over = HandOver(chain, (done.first,))
        await told.carry_out(stage_ticket(ask.ticket, told.member(), hand_over))
        return PrefillDone(done.first, done.cached_tokens, 0.0, took_s)


def _check_said(params: dict[str, object], want: Handover) -> None:
    """Unavailable where the server has other KV than its agent was told: others are asked."""
    try:
        said = parsed(params)
    except BadValue as error:
        raise Unavailable(f"the vLLM server has not kvharbor's connector: {error}") from error
    if said != want:
        raise Unavailable("the vLLM server was started anew, with other KV than its description")


def _late(deadline_s: float) -> Unavailable:
    return Unavailable(f"no answer within {deadline_s:g} s")


@dataclass(frozen=True)
class _Claim:
    """A ticket that runs here."""

    ask: DecodeAsk
    token: int
    """0: it has no route."""
    tokens: list[int]
    """Prompt and answer so far."""
    pages: int
    """That are said to be in the pool."""
    events: asyncio.Queue[Piece | KVStoreError | None] = field(default_factory=asyncio.Queue)
    """None: it is somebody else's by now."""

    @property
    def answer(self) -> tuple[int, ...]:
        """By whoever has generated it."""
        return tuple(self.tokens[self.ask.prompt_tokens :])


class VllmDecode:
    """Has answers generated."""

    def __init__(self, server: VllmServer, pages: VllmPages, told: Told, end_token: int) -> None:
        """Run nothing yet."""
        self._server = server
        self._pages = pages
        self._told = told
        self._end_token = end_token
        self._claims: dict[tuple[int, int], _Claim] = {}
        self.is_draining = False
        """Set by who ends this agent: it takes nothing new."""
        self.step_s = 0.0

    def running(self) -> tuple[Running, ...]:
        """What is claimed here and not finished, for the master."""
        return tuple(
            Running(each.ask.ticket, each.token, len(each.tokens)) for each in self._claims.values()
        )

    def drop(self, claims: tuple[Running, ...]) -> None:
        """These are somebody else's: what runs of them here ends."""
        for each in claims:
            claim = self._claims.get((each.ticket, each.token))
            if claim is not None:
                claim.events.put_nowait(None)

    async def prepare(self, ask: PrepareAsk) -> None:
        """Refuse: vLLM loads a prompt when its answer is asked for."""
        raise OutOfSpace(f"ticket {ask.ticket}: nothing is pulled ahead into vLLM")

    async def decode(self, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        """The lines of one answer. Raises, before the first, why it cannot be given here."""
        if self.is_draining:
            raise OutOfSpace("this worker takes nothing new")
        claim = await (self._claimed(ask) if ask.route else self._begun(ask))
        key = ask.ticket, claim.token
        self._claims[key] = claim
        asking = asyncio.ensure_future(self._ask_server(claim))
        try:
            async with aclosing(self._lines(claim)) as lines:
                async for line in lines:
                    yield line
        finally:
            asking.cancel()
            if self._claims.get(key) is claim:
                del self._claims[key]

    async def shed(self) -> None:
        """Hand everything that runs over to other workers. Nothing new comes: it is draining."""
        await asyncio.gather(*(self._shed(claim) for claim in list(self._claims.values())))

    async def _claimed(self, ask: DecodeAsk) -> _Claim:
        """Others have begun it."""
        told, pages = self._told, self._pages
        claimed = await told.carry_out(claim_ticket(ask.ticket, ask.route, told.member()))
        prompt, streamed = ask.tokens[: ask.prompt_tokens], ask.tokens[ask.prompt_tokens :]
        check_descriptor(claimed, pages.namespace, prompt, streamed, hashing=pages.hashing)
        # A dying worker may have told the master of tokens that its stream has not brought.
        generated = max(streamed, claimed.tokens, key=len)
        there = len(claimed.keys) // KEY_BYTES
        return _Claim(ask, claimed.token, [*prompt, *generated], there)

    async def _begun(self, ask: DecodeAsk) -> _Claim:
        """All of it is this server's."""
        await self._told.carry_out(begin_prefill(ask.ticket, self._told.member()))
        return _Claim(ask, 0, list(ask.tokens), 0)

    async def _ask_server(self, claim: _Claim) -> None:
        """Beside who tells the answer on, which hears of other things as well."""
        ask, hear = claim.ask, claim.events.put_nowait
        if len(claim.answer) >= ask.max_tokens or claim.answer[-1:] == (self._end_token,):
            hear(Piece((), "length"))
            return
        params = self._pages.handed_over(claim.pages).params() if claim.pages else None
        left = ask.max_tokens - len(claim.answer)
        asked = completion(claim.tokens, left, ask.sampling, self._end_token, params)
        try:
            async with asyncio.timeout(ask.deadline_s):
                async with aclosing(self._server.generate(asked)) as pieces:
                    async for piece in pieces:
                        hear(piece)
        except KVStoreError as error:
            hear(error)
        except TimeoutError:
            hear(_late(ask.deadline_s))
        except Exception as error:  # else who listens would wait for ever, and the ticket with it
            LOG.exception("ticket %d", ask.ticket)
            hear(Unavailable(f"{type(error).__name__}: {error}"))

    async def _lines(self, claim: _Claim) -> AsyncGenerator[Line, None]:
        """Up to the last token, or to where the ticket goes to somebody else."""
        told = len(claim.ask.tokens) - claim.ask.prompt_tokens
        piece = await _next(claim)
        if piece is None:
            return
        if claim.token:  # the server has a token: so it has the KV
            await self._told.carry_out(install_ticket(claim.ask.ticket, claim.token))
        yield Line(claim.token)
        while piece is not None:
            claim.tokens.extend(piece.tokens)
            if piece.ended == "stop" and claim.tokens[-1] != self._end_token:
                claim.tokens.append(self._end_token)
            if piece.ended and claim.token:
                await self._told.carry_out(finish_ticket(claim.ask.ticket, claim.token))
            answer = claim.answer
            for index in range(told, len(answer)):
                yield Line(claim.token, index, answer[index])
            if piece.ended:
                return
            told, began_s = len(answer), time.perf_counter()
            piece = await _next(claim)
            self.step_s = time.perf_counter() - began_s

    async def _shed(self, claim: _Claim) -> None:
        try:
            await self._told.carry_out(self._given_up(claim))
        except KVStoreError as error:  # its gateway has it computed again where this agent ends
            LOG.warning("ticket %d is not handed on: %s", claim.ask.ticket, error)
            claim.events.put_nowait(Unavailable("this worker ends"))
        else:
            claim.events.put_nowait(None)

    def _given_up(self, claim: _Claim) -> Steps[None]:
        """As if this server had only computed the prompt, and what there is of the answer."""
        ticket, answer = claim.ask.ticket, claim.answer
        if not answer:
            raise Unavailable("there is no token yet")
        if claim.token:
            chain = self._pages.chain(claim.tokens[:-1])
            return shed_ticket(ticket, claim.token, HandOver(chain, answer))
        chain = self._pages.chain(claim.tokens[: claim.ask.prompt_tokens])
        return stage_ticket(ticket, self._told.member(), HandOver(chain, answer))


async def _next(claim: _Claim) -> Piece | None:
    """What comes; None where the ticket is somebody else's. Raises what ended it."""
    event = await claim.events.get()
    if isinstance(event, KVStoreError):
        raise event
    return event
