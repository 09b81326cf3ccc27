"""The KV of a ticket between an inference worker's caches and the pool: pages, and the tail.

Blocking; used by several threads. Owns what is handed over and what is taken up again: whatever
the pool could not keep, or does not have any more, is computed again by whoever goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Hit, Stored
from kvstore.client.tickets import HandOver, await_parts, locate_parts, tail_key
from kvstore.clock import SystemClock
from kvstore.connectors.transformers import UnsupportedCache
from kvstore.errors import CallerError, KVStoreError
from kvstore.ids import KEY_BYTES
from kvstore.namespace import TAILS
from kvstore.page import PageChain
from kvstore.wire.messages.tickets import LocateParts, TailRef
from workers.serve_tails import append_tail, pack_tail, tail_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from transformers import DynamicCache

    from kvstore.client.store import KVStore
    from kvstore.connectors.transformers import Arriving, LayerCache, PooledPrefix
    from kvstore.wire.messages.tickets import TicketClaimed


AWAIT_PARTS_S: Final = 2.0
"""One question for parts; it is asked again."""


class Pulled(NamedTuple):
    """What came of a ticket's KV."""

    cache: DynamicCache
    tokens: int
    bytes_per_s: float
    """0 where nothing was moved."""


class TicketKV:
    """Hands KV over and takes it up, for one model."""

    def __init__(self, store: KVStore, prefix: PooledPrefix) -> None:
        """Open both namespaces. Raises UnsupportedCache where a ticket's tail could not be cut."""
        if not prefix.has_tails:
            raise UnsupportedCache(
                "tickets are of models with full attention alone, want one of those"
            )
        self._store = store
        self._prefix = prefix
        namespace = prefix.namespace
        self.opened: Final = store.open(namespace.content, namespace.layout)
        self._tails = store.open_opaque(TAILS)
        self._clock: Final = SystemClock()

    def reuse(self, tokens: Sequence[int]) -> Pulled:
        """A cache of what the pool has of the full pages of `tokens`, at most all but the last."""
        started = time.perf_counter()
        cache, fetched = self._prefix.fetch(tokens)
        took_s = time.perf_counter() - started
        moved = fetched.bytes_moved
        return Pulled(cache, fetched.tokens, moved / took_s if moved else 0.0)

    def keep_part(
        self, tokens: Sequence[int], part: int, first: int, layers: list[LayerCache]
    ) -> None:
        """Store one part of the full pages of these tokens from page `first` on."""
        self._prefix.store_part(tokens, part, first, layers)

    def expect(self, tokens: Sequence[int]) -> Arriving:
        """Memory for a prompt that is being computed elsewhere."""
        return self._prefix.expect(tokens)

    def pull_ahead(
        self, ticket: int, claimed: TicketClaimed, arriving: Arriving, unwanted: threading.Event
    ) -> None:
        """Pull a prompt's pages, part by part, as they come; until it is staged, or unwanted.

        Ends early where something does not come: `take_up` brings the rest, or it is computed.
        """
        has_ended = False
        while not (has_ended or unwanted.is_set()):
            asked = await_parts(ticket, claimed.token, arriving.pages, timeout_s=AWAIT_PARTS_S)
            sealed = self._store.carry_out(asked)
            has_ended = sealed.is_staged
            for part, pages in enumerate(sealed.pages):
                while arriving.pages[part] < pages:
                    came = self._pull_part(ticket, claimed, arriving, part, pages)
                    if not came or unwanted.is_set():
                        return

    def _pull_part(
        self, ticket: int, claimed: TicketClaimed, arriving: Arriving, part: int, pages: int
    ) -> int:
        """The next pages of one part, of so many that are sealed: how many came."""
        first = arriving.pages[part]
        count = min(pages - first, self._prefix.part_pages(part))
        chain = PageChain(claimed.keys).slice(first, first + count)
        question = LocateParts(ticket, claimed.token, part, first, count)
        located = self._store.carry_out(locate_parts(self.opened, chain, question, self._clock))
        return self._prefix.bring_part(arriving, part, located)

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

    def take_up(
        self,
        claimed: TicketClaimed,
        tail_tokens: int,
        tokens: Sequence[int],
        arrived: Arriving | None = None,
    ) -> Pulled:
        """A cache of what can be had of `tokens`, at most all but the last.

        What has `arrived` of them is not asked for again.
        """
        started = time.perf_counter()
        cache, fetched = self._prefix.fetch(tokens, arrived=arrived)
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
