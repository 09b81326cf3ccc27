"""Prefix reuse: the KV of a token sequence into the pool, and of its longest known prefix back.

Owns which pages are asked for, brought and stored, and the staging memory between pool and
engine. Knows no framework: an engine hands in functions that fill and empty stretches of whole
pages. Only full pages are ever stored, and a fetch always leaves the last token to be computed,
because what comes after it is computed from it and is kept in no page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvstore.client.outcomes import AlreadyThere, Hit, Miss, Refused, RefusedReason, Stored
from kvstore.client.staging import STAGING_BYTES, SpareBuffers
from kvstore.errors import CallerError, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.locations import Locations, Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.hints import Hints
    from kvstore.page import PageChain
    from kvstore.transfer.buffer import Buffer

CopyPages = Callable[[int, int, memoryview], None]
"""copy(first, count, memory): move pages [first, first + count) to or from `memory`, which holds
exactly these whole pages, one after another. Must not keep `memory` after it returns."""


class PageStore(Protocol):
    """What prefixes need of a store; `KVStore` is one."""

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory that the pool's workers can reach."""
        ...

    def probe(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Tell which pages are there."""
        ...

    def match_prefix(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        lease: bool = True,
        hints: Hints | None = None,
    ) -> Match:
        """Find the longest run of leading pages, and lease it."""
        ...

    def hint(self, opened: OpenedNamespace, chain: PageChain, hints: Hints) -> None:
        """Tell the pool what is known of these pages' future."""
        ...

    def read(
        self, locations: Locations, into: object, offsets: Sequence[int], *, part: int = 0
    ) -> list[ReadOutcome]:
        """Copy the first len(offsets) located pages out, verified."""
        ...

    def put_parts(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store these parts of every page."""
        ...


class Fetched(msgspec.Struct, frozen=True):
    """What a fetch brought: the KV of the first `tokens` tokens need not be computed."""

    pages: int = 0
    tokens: int = 0
    bytes_moved: int = 0
    trouble: str = ""
    """Why fewer pages came than the pool was found to hold; empty when all came."""


class Kept(msgspec.Struct, frozen=True):
    """What a store did: the first `stored + present` pages are in the pool now."""

    stored: int = 0
    """Pages that this call brought in."""
    present: int = 0
    """Pages that were there, or that somebody else stored meanwhile."""
    bytes_moved: int = 0
    trouble: str = ""
    """Why the pages after those were left out; empty when none was."""


class _Batch(msgspec.Struct, frozen=True):
    """Leading pages of a batch that came, and why the next did not."""

    pages: int
    trouble: str


class PrefixCache:
    """Prefixes of one namespace in one store. Thread-safe, and survives fork as its store does.

    Trouble with the pool is no exception here: what cannot be brought is a miss, what cannot be
    stored is left out, and the result says why. Only CallerErrors are raised.
    """

    def __init__(
        self, store: PageStore, opened: OpenedNamespace, staging_bytes: int = STAGING_BYTES
    ) -> None:
        """Ask nothing and take no memory yet."""
        self._store = store
        self._opened = opened
        self._page_bytes = opened.namespace.page_bytes
        self._page_tokens = opened.namespace.layout.page_tokens
        self._batch_pages = max(1, staging_bytes // self._page_bytes)
        self._staging = SpareBuffers(store.buffer)
        self._staging_bytes = self._batch_pages * self._page_bytes

    def fetch(
        self,
        tokens: Sequence[int],
        begin: Callable[[int], CopyPages],
        *,
        first: int = 0,
        hints: Hints | None = None,
    ) -> Fetched:
        """Bring the longest known prefix of `tokens`, at most len(tokens) - 1 of them.

        `begin(pages)` is called once it is known how many pages are there, if any; the function
        that it returns then takes stretches of verified pages, in order, from page `first` on:
        whoever asks has those before it. The result may count fewer pages than were begun.
        """
        chain = self._opened.chain(tokens[: max(0, len(tokens) - 1)])
        pages, trouble = first, ""
        try:
            for batch in self._fetch_batches(chain, first, begin, hints):
                pages += batch.pages
                trouble = batch.trouble
        except CallerError:
            raise
        except KVStoreError as error:
            trouble = _text(error)
        moved = (pages - first) * self._page_bytes
        return Fetched(pages, pages * self._page_tokens, moved, trouble)

    def read_part(
        self, located: Locations, part: int, unpack: Callable[[int, memoryview], None]
    ) -> int:
        """Bring one part of located pages: how many of the first ones came whole.

        They have to fit `part_pages`. `unpack(count, memory)` is called with those that came.
        """
        size = self._opened.namespace.parts[part].size_bytes
        with self._staging.take(self._staging_bytes) as buffer:
            places = range(0, located.pages * size, size)
            outcomes = self._store.read(located, buffer, places, part=part)
            came = [isinstance(each, Hit) for each in outcomes]
            pages = came.index(False) if False in came else len(came)
            if pages:
                unpack(pages, buffer.view[: pages * size])
        return pages

    def store_part(self, tokens: Sequence[int], part: int, first: int, pack: CopyPages) -> None:
        """Store one part of the full pages of `tokens` from page `first` on, as far as it goes.

        A page is found once all its parts are there. What was left out `store` can store later.
        """
        chain = self._opened.chain(tokens)
        size, step = self._opened.namespace.parts[part].size_bytes, self.part_pages(part)
        try:
            with self._staging.take(self._staging_bytes) as buffer:
                for start in range(first, len(chain), step):
                    batch = chain.slice(start, min(start + step, len(chain)))
                    pack(start, len(batch), buffer.view[: len(batch) * size])
                    offsets = {part: range(0, len(batch) * size, size)}
                    outcomes = self._store.put_parts(self._opened, batch, buffer, offsets)
                    if any(isinstance(each, Refused) for each in outcomes):
                        return
        except CallerError:
            raise
        except KVStoreError:
            return

    def part_pages(self, part: int) -> int:
        """Pages of which the staging memory holds that part."""
        return self._staging_bytes // self._opened.namespace.parts[part].size_bytes

    def store(self, tokens: Sequence[int], pack: CopyPages, *, hints: Hints | None = None) -> Kept:
        """Store the full pages of `tokens` that the pool does not hold yet.

        `pack` is asked for stretches of pages, in order. Pages that somebody else is storing are
        waited for and not stored twice.
        """
        chain = self._opened.chain(tokens)
        first = 0
        try:
            known = self._store.probe(self._opened, chain)
            first = known.index(False) if False in known else len(known)
            kept = self._store_from(chain, first, pack, hints)
            if first and kept.trouble == RefusedReason.PARENT_MISSING:
                # The pages before this call's were evicted after they had been seen.
                kept = self._store_from(chain, 0, pack, hints)
        except CallerError:
            raise
        except KVStoreError as error:
            return Kept(present=first, trouble=_text(error))
        return kept

    def hint(self, tokens: Sequence[int], hints: Hints) -> None:
        """Say what is known of the future of these tokens: see KVStore.hint.

        When the session is closed, `tokens` are all that was stored of it. A hint, and so no
        trouble when the pool does not hear it.
        """
        chain = self._opened.chain(tokens)
        try:
            self._store.hint(self._opened, chain, hints)
        except CallerError:
            raise
        except KVStoreError:
            return

    def close(self) -> None:
        """Give the staging memory back; the store stays open."""
        self._staging.close()

    def _fetch_batches(
        self,
        chain: PageChain,
        start: int,
        begin: Callable[[int], CopyPages],
        hints: Hints | None,
    ) -> Iterator[_Batch]:
        """Bring batch after batch, up to the first that does not come whole."""
        if len(chain) <= start:
            return
        match = self._store.match_prefix(self._opened, chain.slice(start, len(chain)), hints=hints)
        pages = start + match.pages
        if pages == start:
            return
        unpack = begin(pages)
        with self._staging.take(self._staging_bytes) as buffer:
            for first in range(start, pages, self._batch_pages):
                batch = chain.slice(first, min(first + self._batch_pages, pages))
                if first > start:  # Each batch is read under a lease of its own.
                    match = self._store.match_prefix(self._opened, batch, hints=hints)
                hits, trouble = self._read(match, min(match.pages, len(batch)), buffer)
                if hits:
                    unpack(first, hits, buffer.view[: hits * self._page_bytes])
                short = "" if hits == len(batch) else "evicted meanwhile"
                yield _Batch(hits, trouble or short)
                if hits < len(batch):
                    return

    def _read(self, match: Match, pages: int, buffer: Buffer) -> tuple[int, str]:
        """Leading pages of the match that came whole, and why the next did not."""
        trouble = ""
        for part, offsets in self._offsets(pages).items():
            outcomes = self._store.read(match, buffer, offsets[:pages], part=part)
            for i, outcome in enumerate(outcomes):
                if isinstance(outcome, Miss):
                    pages, trouble = i, outcome.reason.value
                    break
        return pages, trouble

    def _offsets(self, pages: int) -> dict[int, range]:
        """Where each part of whole pages that lie one after another begins."""
        starts: dict[int, range] = {}
        start = 0
        for spec in self._opened.namespace.parts:
            starts[spec.index] = range(start, start + pages * self._page_bytes, self._page_bytes)
            start += spec.size_bytes
        return starts

    def _store_from(
        self, chain: PageChain, first: int, pack: CopyPages, hints: Hints | None
    ) -> Kept:
        """Store pages [first, ...); a refused page ends it, as nothing can follow that."""
        kept = Kept(present=first)
        if first == len(chain):
            return kept
        with self._staging.take(self._staging_bytes) as buffer:
            for start in range(first, len(chain), self._batch_pages):
                batch = chain.slice(start, min(start + self._batch_pages, len(chain)))
                pack(start, len(batch), buffer.view[: len(batch) * self._page_bytes])
                offsets = self._offsets(len(batch))
                outcomes = self._store.put_parts(self._opened, batch, buffer, offsets, hints=hints)
                kept = self._counted(kept, outcomes)
                if kept.trouble:
                    break
        return kept

    def _counted(self, kept: Kept, outcomes: list[PutOutcome]) -> Kept:
        """Add a batch's outcomes up to the first page that was refused."""
        stored, present, trouble = 0, 0, ""
        for outcome in outcomes:
            match outcome:
                case Stored():
                    stored += 1
                case AlreadyThere():
                    present += 1
                case Refused(reason):
                    trouble = reason.value
                    break
        return Kept(
            kept.stored + stored,
            kept.present + present,
            kept.bytes_moved + stored * self._page_bytes,
            trouble,
        )


def _text(error: KVStoreError) -> str:
    return f"{error.code}: {error}"
