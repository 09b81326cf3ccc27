"""Ahead of a prompt's end: the decode worker that is chosen by then pulls what is computed of it.

Nothing depends on it: where it fails, that worker, or another one, pulls all of it when the prompt
is staged. Belongs to one request, from when a prefill worker has it until its answer begins.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvstore.errors import KVStoreError
from workers.serve_messages import PrepareAsk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvstore.client.steps import Steps
    from kvstore.client.ticket_holder import TicketHolder
    from kvstore.wire.messages.tickets import TicketRouted
    from workers.serve_messages import DecodeAsk, Line, PrefillAsk, PrefillDone

LOG: Final = logging.getLogger(__name__)
AWAIT_S: Final = 10.0
"""One question for a route; it is asked again."""

T = TypeVar("T")


class Master(Protocol):
    """What is needed of a store; `AsyncKVStore` is one."""

    async def carry_out(self, plan: Steps[T]) -> T:
        """Run a plan that only asks the master."""
        ...


class Preparers(Protocol):
    """What is needed of the inference workers; `InferenceWorkers` is one."""

    async def prepare(self, where: str, ask: PrepareAsk) -> None:
        """Have a prompt pulled while it is being computed."""
        ...


class Workers(Preparers, Protocol):
    """What is needed of them beside; likewise."""

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        """Have a prompt computed and staged."""
        ...

    def decode(self, where: str, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        """The lines of an answer, up to where the worker ends them."""
        ...


class Ahead:
    """One request's decode worker, before its prompt is computed."""

    def __init__(
        self,
        master: Master,
        workers: Preparers,
        holder: TicketHolder,
        ticket: int,
        request: str,
        prompt: tuple[int, ...],
    ) -> None:
        """Begin to wait for a route. Made inside a running loop."""
        self._master = master
        self._workers = workers
        self._holder = holder
        self._ticket = ticket
        self._request = request
        self._prompt = prompt
        self._is_pulling = False
        self._task = asyncio.ensure_future(self._run())

    def staged(self) -> None:
        """The prompt is computed: who was chosen goes on pulling, nobody else is waited for."""
        if not self._is_pulling:
            self._task.cancel()

    def close(self) -> None:
        """The answer has begun, or will not. Safe to repeat."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            routed = await self._routed()
            if routed.is_ahead:
                self._is_pulling = True
                ask = PrepareAsk(self._ticket, routed.route, self._request, self._prompt)
                await self._workers.prepare(routed.where, ask)
        except KVStoreError as error:
            LOG.info("%s: ahead: %s", self._request, error)

    async def _routed(self) -> TicketRouted:
        routed = None
        while routed is None:
            plan = self._holder.await_route(self._ticket, 0, timeout_s=AWAIT_S)
            routed = await self._master.carry_out(plan)
        return routed
