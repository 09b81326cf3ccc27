"""The KV of a ticket between an inference worker's caches and the pool: pages, and the tail.

Blocking; used by several threads. Owns what is handed over and what is taken up again: whatever
the pool could not keep, or does not have any more, is computed again by whoever goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Hit, Stored
from kvstore.client.tickets import HandOver, tail_key
from kvstore.errors import CallerError, KVStoreError
from kvstore.ids import KEY_BYTES
from kvstore.namespace import TAILS
from kvstore.page import PageChain
from kvstore.wire.messages.tickets import TailRef
from workers.serve_tails import append_tail, pack_tail, tail_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import DynamicCache

    from kvstore.client.store import KVStore
    from kvstore.connectors.transformers import PooledPrefix
    from kvstore.wire.messages.tickets import TicketClaimed


class Pulled(NamedTuple):
    """What came of a ticket's KV."""

    cache: DynamicCache
    tokens: int
    bytes_per_s: float
    """0 where nothing was moved."""


class TicketKV:
    """Hands KV over and takes it up, for one model."""

    def __init__(self, store: KVStore, prefix: PooledPrefix) -> None:
        """Open both namespaces."""
        self._store = store
        self._prefix = prefix
        namespace = prefix.namespace
        self.opened: Final = store.open(namespace.content, namespace.layout)
        self._tails = store.open_opaque(TAILS)

    def reuse(self, tokens: Sequence[int]) -> Pulled:
        """A cache of what the pool has of the full pages of `tokens`, at most all but the last."""
        started = time.perf_counter()
        cache, fetched = self._prefix.fetch(tokens)
        took_s = time.perf_counter() - started
        moved = fetched.bytes_moved
        return Pulled(cache, fetched.tokens, moved / took_s if moved else 0.0)

    def keep(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        """Store the full pages of these tokens; returns how many leading ones the pool has."""
        kept = self._prefix.store(tokens, cache)
        return kept.stored + kept.present

    def keep_prompt(
        self, tokens: Sequence[int], prompt_tokens: int, cache: DynamicCache
    ) -> PageChain:
        """As `keep`; those pages that the prompt fills, as far as the pool has them now."""
        page_tokens = self.opened.namespace.layout.page_tokens
        pages = min(self.keep(tokens, cache), prompt_tokens // page_tokens)
        return self.opened.chain(tokens).slice(0, pages)

    def hand_over(
        self,
        ticket: int,
        counter: int,
        tokens: Sequence[int],
        generated: Sequence[int],
        cache: DynamicCache,
        ttl_s: float,
    ) -> HandOver:
        """Store what the cache has of `tokens`: prompt, and all of `generated` but its last."""
        pages = self.keep(tokens, cache)
        chain = self.opened.chain(tokens).slice(0, pages)
        start = pages * self.opened.namespace.layout.page_tokens
        tail = TailRef()
        behind = len(tokens) - start
        is_tail = 0 < behind < self.opened.namespace.layout.page_tokens
        if is_tail and cache.get_seq_length() >= len(tokens):
            packed = pack_tail(cache, start, len(tokens))
            tail = self._keep_tail(ticket, counter, packed, ttl_s)
        return HandOver(chain, tuple(generated), tail)

    def take_up(self, claimed: TicketClaimed, tail_tokens: int, tokens: Sequence[int]) -> Pulled:
        """A cache of what can be had of `tokens`, at most all but the last."""
        started = time.perf_counter()
        cache, fetched = self._prefix.fetch(tokens)
        held, moved = fetched.tokens, fetched.bytes_moved
        at_tail = held == len(claimed.keys) // KEY_BYTES * claimed.page_tokens
        if tail_tokens and at_tail and held + tail_tokens < len(tokens):
            packed = self._tail(claimed, tail_tokens)
            if packed is not None:
                append_tail(cache, packed, self.opened.namespace, tail_tokens)
                held, moved = held + tail_tokens, moved + len(packed)
        took_s = time.perf_counter() - started
        return Pulled(cache, held, moved / took_s if moved else 0.0)

    def _keep_tail(self, ticket: int, counter: int, packed: bytes, ttl_s: float) -> TailRef:
        """Where the tail is now; nowhere when the pool has no room for it: computing so few tokens
        again is sooner done than waited for."""
        key = tail_key(self._tails.namespace.id, ticket, counter)
        ttl_s = min(max(ttl_s, limits.PAGE_TTL_MIN_S), limits.PAGE_TTL_MAX_S)
        try:
            (outcome,) = self._store.put_objects(
                self._tails, PageChain(key), packed, [0], len(packed), ttl_s=ttl_s, wait=False
            )
        except CallerError:
            raise
        except KVStoreError:
            return TailRef()
        if not isinstance(outcome, Stored | AlreadyThere):
            return TailRef()
        return TailRef(self._tails.namespace.id, key, len(packed))

    def _tail(self, claimed: TicketClaimed, tokens: int) -> bytearray | None:
        """The tail's bytes; None when they are not there any more."""
        packed = bytearray(tail_bytes(self.opened.namespace, tokens))
        try:
            found = self._store.lookup(self._tails, PageChain(claimed.tail.key))
            if found.part_bytes(0) != len(packed):
                return None
            (outcome,) = self._store.read(found, packed, [0])
        except CallerError:
            raise
        except KVStoreError:
            return None
        return packed if isinstance(outcome, Hit) else None
