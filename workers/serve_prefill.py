"""A prefill worker's work on one prompt: what the pool has, the rest chunk by chunk, the hand-over.

In a thread of its own, one prompt at a time; the pages that a chunk fills go into the pool while
the next one is computed. Stateless: who dies half-way leaves pages that the next one finds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

from kvstore.client.tickets import begin_prefill, stage_ticket
from kvstore.errors import UnknownTicket
from workers.chunked_prefill import prefill
from workers.sampling import pick
from workers.serve_keeping import Keeping
from workers.serve_messages import PrefillDone, Unwanted
from workers.tracing import stage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import DynamicCache

    from kvstore.client.store import KVStore
    from kvstore.client.tickets import Member
    from workers.generation import LanguageModel
    from workers.serve_kv import TicketKV
    from workers.serve_messages import PrefillAsk


class PrefillDesk:
    """Computes prompts. `queued_tokens` and `tokens_per_s` are for the master's choice."""

    def __init__(
        self, language: LanguageModel, store: KVStore, kv: TicketKV, member: Callable[[], Member]
    ) -> None:
        """`member` tells this worker's present life."""
        self._language = language
        self._store = store
        self._kv = kv
        self._member = member
        self.queued_tokens = 0
        self.tokens_per_s = 0.0
        self._one_by_one = ThreadPoolExecutor(1, "prompts")

    async def compute(self, ask: PrefillAsk, asked_s: float) -> PrefillDone:
        """`run` in its turn, beside the loop; Unwanted once nobody waits any more."""
        unwanted = threading.Event()
        loop, context = asyncio.get_running_loop(), copy_context()
        work = partial(context.run, self.run, ask, asked_s, unwanted)
        try:
            return await loop.run_in_executor(self._one_by_one, work)
        finally:
            unwanted.set()

    def close(self) -> None:
        """End the thread, after what it computes."""
        self._one_by_one.shutdown()

    def run(self, ask: PrefillAsk, asked_s: float, unwanted: threading.Event) -> PrefillDone:
        """Compute, hand over, stage. Raises Unwanted, between chunks, once that is set."""
        began_s = time.perf_counter()
        _check(unwanted)
        self._tell(ask, 0)
        cache, reused, _ = self._kv.reuse(ask.tokens)
        with Keeping(self._kv, ask.tokens, cache, partial(self._report, ask)) as keeping:
            logits = self._compute(ask, cache, keeping, unwanted)
            keeping.finish()
        took_s = time.perf_counter() - began_s
        self.tokens_per_s = (len(ask.tokens) - reused) / took_s
        stage("compute", took_s, tokens=len(ask.tokens), reused=reused)
        how = ask.sampling
        first = pick(
            logits, temperature=how.temperature, top_p=how.top_p, seed=how.seed,
            position=len(ask.tokens),
        )  # fmt: skip
        computed_s = time.perf_counter()
        done = self._kv.hand_over(ask.ticket, 0, ask.tokens, (first,), cache, ask.deadline_s)
        stage("hand_over", time.perf_counter() - computed_s)
        _check(unwanted)
        self._store.carry_out(stage_ticket(ask.ticket, self._member(), done))
        return PrefillDone(first, reused, began_s - asked_s, time.perf_counter() - began_s)

    def _tell(self, ask: PrefillAsk, tokens_left: int) -> None:
        self._store.carry_out(begin_prefill(ask.ticket, self._member(), tokens_left))

    def _report(self, ask: PrefillAsk, tokens_left: int) -> None:
        # A new master may hear of the ticket after this and before it is staged.
        with suppress(UnknownTicket):
            self._tell(ask, tokens_left)

    def _compute(
        self, ask: PrefillAsk, cache: DynamicCache, keeping: Keeping, unwanted: threading.Event
    ) -> torch.Tensor:
        """Fill the cache; logits after the last token."""
        logits = None
        model, by_layer = self._language.model, keeping.by_layer
        for chunk in prefill(model, cache, ask.tokens, on_layer=by_layer):
            _check(unwanted)
            keeping.chunk(chunk.tokens)
            logits = chunk.logits
        assert logits is not None
        return logits


def _check(unwanted: threading.Event) -> None:
    if unwanted.is_set():
        raise Unwanted
