"""One request's way through a fleet: ticket, prefill, route, decode, and again where one dies.

Where the master says so, one worker does both. A coroutine for each request; whoever iterates its
tokens may stop at any moment, and the ticket is cancelled then. Owns the order of the questions,
and what is tried again: a token that was yielded is never yielded again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.block_hashes import OWN_HASHING, chain_of
from kvstore.client.ticket_holder import KEEP_EVERY_S, TicketHolder
from kvstore.client.tickets import (
    HandOver,
    TicketRequest,
    cancel_ticket,
    fail_prefill,
    finish_ticket,
    open_ticket,
    run_alone,
)
from kvstore.errors import (
    CallerError,
    DeadlineExceeded,
    Fenced,
    KVStoreError,
    Unavailable,
    UnknownTicket,
)
from workers.gateway_ahead import AWAIT_S, Ahead
from workers.gateway_hints import tell
from workers.gateway_lengths import AnswerLengths, left
from workers.gateway_merge import Answer
from workers.serve_messages import DecodeAsk, PrefillAsk, Sampling
from workers.tracing import stage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine
    from typing import Any

    from kvstore.block_hashes import Hashing
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.clock import Clock
    from kvstore.wire.messages.tickets import TicketOpened, TicketRouted
    from workers.gateway_ahead import Master, Workers
    from workers.gateway_requests import Wish

LOG: Final = logging.getLogger(__name__)
PREFILLS_MAX: Final = 4
"""Prefill workers that a request is tried on."""


class Stages(msgspec.Struct):
    """Seconds that a request spent where, and what happened on the way."""

    queue_s: float = 0.0
    """For admission, and at the prefill worker before its turn."""
    prefill_s: float = 0.0
    route_s: float = 0.0
    install_s: float = 0.0
    decode_s: float = 0.0
    prefills: int = 0
    routes: int = 0
    reused_tokens: int = 0


class Patience(msgspec.Struct, frozen=True):
    """Seconds from a request's arrival."""

    first_token_s: float
    """Wished for the first token: admission goes by it."""
    deadline_s: float
    """Nobody waits longer for the last one."""


class Fleet:
    """What the requests of one fleet share. Belongs to one loop."""

    def __init__(
        self,
        master: Master,
        workers: Workers,
        opened: OpenedNamespace,
        end_token: int,
        patience: Patience,
        clock: Clock,
        hashing: Hashing = OWN_HASHING,
    ) -> None:
        """Ask nothing yet. `hashing` is where the fleet's pages have their names from."""
        self.hashing: Final = hashing
        self.master: Final = master
        self.workers: Final = workers
        self.opened: Final = opened
        self.end_token: Final = end_token
        self.patience: Final = patience
        self.clock: Final = clock
        self.holder: Final = TicketHolder(clock)
        self.lengths: Final = AnswerLengths()
        self._presenting = asyncio.Lock()
        self._ends: set[asyncio.Future[None]] = set()

    async def keep_on(self) -> None:
        """Present what is held to each new master, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            await self.present()

    async def present(self) -> None:
        """Once; a master that cannot be reached now is told the next time."""
        async with self._presenting:
            try:
                refused = await self.master.carry_out(self.holder.keep())
            except KVStoreError as error:
                LOG.warning("presenting tickets: %s", error)
                return
        for ticket in refused:
            LOG.warning("ticket %d is refused by the new master", ticket)

    def end(self, ticket: int, claim: int, *, is_finished: bool) -> None:
        """Tell the master, beside whatever the caller does next: it may be cancelled."""
        self.holder.drop(ticket)
        self.beside(self._tell(ticket, claim if is_finished else None))

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done though the caller is cancelled; `close` waits for it."""
        ending = asyncio.ensure_future(work)
        self._ends.add(ending)
        ending.add_done_callback(self._ends.discard)

    async def close(self) -> None:
        """Wait until the master was told of every end."""
        await asyncio.gather(*self._ends)

    async def _tell(self, ticket: int, finished: int | None) -> None:
        """Which claim has finished it; None: nobody wants it."""
        try:
            if finished is not None:
                with suppress(Fenced):  # the master has given it to somebody else meanwhile
                    await self.master.carry_out(finish_ticket(ticket, finished))
                    return
            await self.master.carry_out(cancel_ticket(ticket))
        except KVStoreError as error:  # the ticket then ends by its deadline
            LOG.warning("ending a ticket: %s", error)


class Passage:
    """One request in a fleet."""

    def __init__(self, fleet: Fleet, request: str, wish: Wish, seed: int) -> None:
        """Ask nothing yet."""
        self._fleet = fleet
        self._request = request
        self.wish: Final = wish
        self._chain = chain_of(fleet.opened.namespace, wish.tokens, fleet.hashing)
        self._sampling = Sampling(wish.temperature, wish.top_p, seed)
        self._began_s = fleet.clock.now_s()
        self._expected = fleet.lengths.expected(wish.max_tokens)
        self._opened: TicketOpened | None = None
        self._route = 0
        self._ahead: Ahead | None = None
        self._has_failed = False
        """Whether the worker of that route has."""
        self.is_satisfied = False
        """For who iterates `tokens` to set, if it stops early because it has all that it wants."""
        self.answer: Final = Answer(wish.max_tokens, fleet.end_token)
        self.stages: Final = Stages()

    async def open(self) -> None:
        """Ask for admission. Throttled where it cannot begin now."""
        fleet, wish = self._fleet, self.wish
        request = TicketRequest(
            fleet.opened, self._request, self._chain, len(wish.tokens),
            self._expected, fleet.patience.first_token_s, fleet.patience.deadline_s,
        )  # fmt: skip
        opening = asyncio.ensure_future(fleet.master.carry_out(open_ticket(request)))
        try:
            self._opened = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The master may have opened it already: its number is waited for, to cancel it.
            opening.add_done_callback(self._unwanted)
            raise
        fleet.holder.hold(request, self._opened)
        self.stages.queue_s = self.passed_s()
        stage("admission", self.stages.queue_s, ticket=str(self._opened.ticket))

    async def tokens(self) -> AsyncGenerator[int, None]:
        """Every token of the answer, once. Raises what ends it early.

        DeadlineExceeded, Throttled where no other prefill worker may have it now, Unavailable.
        """
        is_finished = False
        try:
            async with aclosing(self._begun()) as fresh:
                async for token in fresh:
                    yield token
            while not self.answer.finish:
                is_alone = self._has_failed and await self._alone()
                steps = self._begun() if is_alone else self._decode(await self._routed())
                async with aclosing(steps) as fresh:
                    async for token in fresh:
                        yield token
            is_finished = True
            self._fleet.lengths.ended(len(self.answer.tokens))
        except GeneratorExit:
            is_finished = self.is_satisfied
            raise
        finally:
            self._end_ahead()
            opened, claim = self._ticket(), self.answer.claim
            is_finished = is_finished and bool(claim or opened.alone)
            self._fleet.end(opened.ticket, claim, is_finished=is_finished)
            self._tell_hints()

    def passed_s(self) -> float:
        """Since its arrival."""
        return self._fleet.clock.now_s() - self._began_s

    def _tell_hints(self) -> None:
        fleet, wish = self._fleet, self.wish
        if wish.hints is not None:
            tokens = (*wish.tokens, *self.answer.tokens)
            chain = chain_of(fleet.opened.namespace, tokens, fleet.hashing)
            fleet.beside(tell(fleet.master, fleet.opened, chain, wish.hints, fleet.clock))

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _ticket(self) -> TicketOpened:
        """As the master said last."""
        assert self._opened is not None, "open comes first"
        return self._opened

    async def _begun(self) -> AsyncGenerator[int, None]:
        """Up to where a decode worker goes on, from whichever prefill worker does it."""
        for _ in range(PREFILLS_MAX):
            opened = self._ticket()
            self.stages.prefills += 1
            try:
                async with aclosing(self._whole() if opened.alone else self._first()) as fresh:
                    async for token in fresh:
                        yield token
            except UnknownTicket:
                self._end_ahead()
                await self._fleet.present()
            except CallerError:
                raise
            except (KVStoreError, TimeoutError) as error:
                self._end_ahead()
                LOG.warning("prefill at %s: %s", opened.prefill, error)
                self._left_s()
                if not await self._another():
                    return
            else:
                return
        raise Unavailable(f"{PREFILLS_MAX} prefill workers have failed")

    async def _first(self) -> AsyncGenerator[int, None]:
        """The first token, once the prompt is computed and staged."""
        opened, wish, began_s = self._ticket(), self.wish, self.passed_s()
        ask = PrefillAsk(opened.ticket, self._request, wish.tokens, self._sampling, self._left_s())
        fleet = self._fleet
        self._ahead = Ahead(
            fleet.master, fleet.workers, fleet.holder, opened.ticket, self._request, wish.tokens
        )
        async with asyncio.timeout(ask.deadline_s):
            done = await fleet.workers.prefill(opened.where, ask)
        self._ahead.staged()
        stage("prefill", self.passed_s() - began_s, worker=opened.prefill)
        self.stages.queue_s += done.queue_s
        self.stages.prefill_s += done.compute_s
        self.stages.reused_tokens = done.reused_tokens
        is_new = self.answer.begin(done.first)
        self._note_staged()
        if is_new:
            yield done.first

    async def _whole(self) -> AsyncGenerator[int, None]:
        """All tokens, by the prefill worker itself; where it leaves, up to what it has staged."""
        opened = self._ticket()
        async with aclosing(self._heard(opened.where, self._ask(0))) as fresh:
            async for token in fresh:
                yield token
        self._note_staged()

    def _note_staged(self) -> None:
        """A new master is told so; what the pool lacks of those pages is computed again."""
        done = HandOver(self._chain, tuple(self.answer.tokens))
        self._fleet.holder.note(self._ticket().ticket, done=done)

    async def _another(self) -> bool:
        """Have another prefill worker named; False: the prompt is staged all the same."""
        opened = self._ticket()
        try:
            failed = fail_prefill(opened.ticket, opened.prefill)
            self._opened = await self._fleet.master.carry_out(failed)
        except UnknownTicket:  # of a new master: the same worker is asked once more
            await self._fleet.present()
        except Fenced:  # whoever claims it has the first token, too
            return False
        else:
            self._fleet.holder.note(opened.ticket, worker=self._opened.prefill)
        return True

    async def _alone(self) -> bool:
        """Whether one worker is to go on by itself, now that another route has failed."""
        self._has_failed, ticket = False, self._ticket().ticket
        try:
            self._opened = await self._fleet.master.carry_out(run_alone(ticket, self._route))
        except (Fenced, UnknownTicket):  # a new master may have routed it, or does not know it
            return False
        LOG.info("%s goes on alone: %s", self._opened.prefill, self._opened.alone)
        self._fleet.holder.runs_alone(ticket, self._opened.prefill)
        self.answer.fence()
        return True

    async def _routed(self) -> TicketRouted:
        """The next decode worker."""
        began_s, ticket = self.passed_s(), self._ticket().ticket
        routed = None
        while routed is None:
            plan = self._fleet.holder.await_route(
                ticket, self._route, timeout_s=min(AWAIT_S, self._left_s())
            )
            routed = await self._fleet.master.carry_out(plan)
        self._route, self._has_failed = routed.route, False
        self._fleet.holder.note(ticket, worker=routed.decode)
        took_s = self.passed_s() - began_s
        stage("route", took_s, decode=routed.decode)
        self.stages.route_s += took_s
        self.stages.routes += 1
        return routed

    async def _decode(self, routed: TicketRouted) -> AsyncGenerator[int, None]:
        """What one decode worker brings, up to where it ends, for whatever reason."""
        try:
            async with aclosing(self._heard(routed.where, self._ask(routed.route))) as fresh:
                async for token in fresh:
                    yield token
        except UnknownTicket:
            await self._fleet.present()
        except (CallerError, DeadlineExceeded):
            raise
        except KVStoreError as error:
            LOG.warning("decode at %s: %s", routed.decode, error)
            self._has_failed = True

    def _ask(self, route: int) -> DecodeAsk:
        wish = self.wish
        return DecodeAsk(
            self._ticket().ticket, route, self._request, len(wish.tokens),
            (*wish.tokens, *self.answer.tokens), wish.max_tokens, self._sampling, self._left_s(),
            left(self._expected, len(self.answer.tokens), wish.max_tokens),
        )  # fmt: skip

    async def _heard(self, where: str, ask: DecodeAsk) -> AsyncGenerator[int, None]:
        """The tokens that one worker brings, up to where it ends."""
        answer, began_s = self.answer, self.passed_s()
        try:
            async with aclosing(self._fleet.workers.decode(where, ask)) as lines:
                async for line in lines:
                    if line.index < 0:
                        self._end_ahead()
                        took_s = self.passed_s() - began_s
                        stage("install", took_s, where=where)
                        self.stages.install_s += took_s
                        self.stages.reused_tokens = line.reused_tokens or self.stages.reused_tokens
                        began_s = self.passed_s()
                    if answer.hear(line):
                        yield line.token
                    self._fleet.holder.note(ask.ticket, token=answer.claim)
                    if answer.finish:
                        return
                    self._left_s()
            LOG.info("%s has handed it on", where)
        finally:
            self._end_ahead()
            took_s = self.passed_s() - began_s
            stage("decode", took_s, where=where, tokens=len(answer.tokens))
            self.stages.decode_s += took_s

    def _unwanted(self, opening: asyncio.Future[TicketOpened]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._fleet.end(opening.result().ticket, 0, is_finished=False)

    def _left_s(self) -> float:
        """Until the deadline. DeadlineExceeded when it has passed."""
        left_s = self._fleet.patience.deadline_s - self.passed_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"not complete within {self._fleet.patience.deadline_s:g} s")
        return left_s
