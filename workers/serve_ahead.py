"""A decode worker's work on a ticket ahead of its prompt: pull what is computed of it already.

Nothing depends on it. The gateway asks for it while the prompt is being computed, and then, as for
any other ticket, for the answer, which begins with what has come by then. A claim of its own, by
which parts of pages may be read that are not complete yet, is fenced by the claim that follows.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.client.descriptor import check_descriptor
from kvstore.client.tickets import claim_ticket
from kvstore.errors import KVStoreError
from kvstore.wire.messages.tickets import Running

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kvstore.client.store import KVStore
    from kvstore.client.tickets import Member
    from kvstore.connectors.transformers import Arriving
    from workers.serve_kv import TicketKV
    from workers.serve_messages import PrepareAsk

LOG: Final = logging.getLogger(__name__)
PULLS_AT_ONCE: Final = 8
"""Prompts that are pulled at once; others are waited for, and pulled when they are staged."""


@dataclass(frozen=True)
class _Pull:
    """A ticket whose pages are coming."""

    token: int
    arriving: Arriving
    unwanted: threading.Event
    pulling: Future[None]
    is_taken: asyncio.Event = field(default_factory=asyncio.Event)


class AheadDesk:
    """Pulls prompts that are being computed."""

    def __init__(self, store: KVStore, kv: TicketKV, member: Callable[[], Member]) -> None:
        """`member` tells this worker's present life."""
        self._store = store
        self._kv = kv
        self._member = member
        self._pulls: dict[int, _Pull] = {}
        self._threads = ThreadPoolExecutor(PULLS_AT_ONCE, "ahead")

    def running(self) -> tuple[Running, ...]:
        """What is claimed ahead, for the master."""
        return tuple(Running(ticket, each.token, 0) for ticket, each in self._pulls.items())

    async def prepare(self, ask: PrepareAsk) -> None:
        """Pull until the answer is asked for, which takes it; or until cancelled.

        Raises why it cannot be pulled here.
        """
        claim = claim_ticket(ask.ticket, ask.route, self._member(), is_ahead=True)
        claimed = await asyncio.to_thread(self._store.carry_out, claim)
        check_descriptor(claimed, self._kv.opened.namespace, ask.tokens, is_ahead=True)
        arriving, unwanted = self._kv.expect(ask.tokens), threading.Event()
        pulling = self._threads.submit(self._kv.pull_ahead, ask.ticket, claimed, arriving, unwanted)
        pull = self._pulls[ask.ticket] = _Pull(claimed.token, arriving, unwanted, pulling)
        try:
            await pull.is_taken.wait()
        finally:
            unwanted.set()
            pull.pulling.cancel()
            if self._pulls.get(ask.ticket) is pull:
                del self._pulls[ask.ticket]

    async def take(self, ticket: int) -> Arriving | None:
        """What has come of a ticket, which comes no further; None where none was asked for."""
        pull = self._pulls.pop(ticket, None)
        if pull is None:
            return None
        pull.unwanted.set()
        try:
            if not pull.pulling.cancel():
                await asyncio.wrap_future(pull.pulling)
        except KVStoreError as error:  # fenced by the claim that follows, at the latest
            LOG.info("ticket %d: pulled ahead up to: %s", ticket, error)
        finally:
            pull.is_taken.set()
        return pull.arriving

    def drop(self, ticket: int, token: int) -> None:
        """That claim is somebody else's: nobody will ask for what has come of it."""
        pull = self._pulls.get(ticket)
        if pull is not None and pull.token == token:
            del self._pulls[ticket]
            pull.unwanted.set()
            pull.is_taken.set()

    def close(self) -> None:
        """End every pull."""
        for pull in self._pulls.values():
            pull.unwanted.set()
        self._threads.shutdown(cancel_futures=True)
