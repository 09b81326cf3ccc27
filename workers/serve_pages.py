"""The pages that an answer fills while it grows, and those of a prompt that was computed here, put
into the pool beside the decode steps.

Owns when they are put: one put of an answer at a time, which takes along whatever was filled
meanwhile, so that nothing piles up. Nobody waits for it, and what it reads is the row's own memory.
After a failure nothing is tried before the end of the answer.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

    from workers.engine import Taken
    from workers.serve_batch import Batch
    from workers.serve_kv import TicketKV

    Beside = Callable[[Coroutine[None, None, None]], asyncio.Future[None] | None]

LOG: Final = logging.getLogger(__name__)


class AnswerPages:
    """The pages of one answer. Belongs to one loop."""

    def __init__(
        self, kv: TicketKV, batch: Batch, request_id: str, pooled: int, beside: Beside,
        threads: Executor,
    ) -> None:  # fmt: skip
        """The pool has the pages of the first `pooled` tokens: a prompt that was computed here is
        put at once, too. `beside` runs what nobody waits for; None: there is too much of it.
        `threads` put.
        """
        self._kv = kv
        self._batch = batch
        self._id = request_id
        self._beside = beside
        self._threads = threads
        self._page_tokens = kv.opened.namespace.layout.page_tokens
        self._pages = pooled // self._page_tokens
        self._putting: asyncio.Future[None] | None = None
        self._is_given_up = False

    def grown(self, tokens: int) -> None:
        """So many tokens are known, and the KV of all but the last."""
        is_at_it = self._putting is not None and not self._putting.done()
        if (tokens - 1) // self._page_tokens > self._pages and not (is_at_it or self._is_given_up):
            self._putting = self._beside(self._put_filled())

    async def end(self, taken: Taken) -> None:
        """The answer is complete: put what is not there yet, for the chat's next turn."""
        if self._putting is not None:
            await self._putting
        await self._put(taken)

    async def _put_filled(self) -> None:
        taken = await asyncio.wrap_future(self._batch.look(self._id))
        if taken is not None:
            await self._put(taken)

    async def _put(self, taken: Taken) -> None:
        tokens, loop = taken.tokens[:-1], asyncio.get_running_loop()
        put = partial(self._kv.keep, tokens, taken.cache)
        try:
            self._pages = await loop.run_in_executor(self._threads, put)
        except KVStoreError as error:
            LOG.warning("pages of an answer are not kept: %s", error)
            self._is_given_up = True
        self._is_given_up |= self._pages < len(tokens) // self._page_tokens
