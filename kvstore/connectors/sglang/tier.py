"""What SGLang's hierarchical cache asks of its third tier, on one rank; knows no class of SGLang's.

A page of each kind is a row of its own on each rank that has a share of its own of it. What is
claimed to be there was leased when it was looked for; what does not come makes a prefix shorter.
Prefixes agree among ranks because SGLang takes the shortest: each rank answers for its own rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.connectors.sglang.hits import (
    ALL_PAGES,
    TRAILING_PAGES,
    Kind,
    Restorable,
    leading,
    restorable,
)
from kvstore.connectors.sglang.pages import KV, HostPages, page_bytes_of, pieces_of, share_of
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.connectors.sglang.foreign import HostPool, Sglang, Transfer
    from kvstore.connectors.sglang.rows import Pieces, Rows


class Tier:
    """All kinds of pages of one rank. Thread-safe once it is open."""

    def __init__(self, config: Sglang, *, is_flat: bool) -> None:
        """`config` is a HiCacheStorageConfig. Flat: KV travels in pages of SGLang's own making."""
        self.is_flat = is_flat
        self._config = config
        self._kinds: dict[str, HostPages] = {}
        self._rows: Rows | None = None

    def add_kv(self, pool: HostPool) -> None:
        """Take the KV's pages; BadValue where they have no memory that can be named."""
        if getattr(pool, "kv_buffer", None) is None:
            want = "a pool that has the KV's pages itself"
            raise BadValue("mem_pool_host", type(pool).__name__, want)
        self._add(pool, KV, page_bytes_of(pool, KV, flat=self.is_flat))

    def add(self, pool: HostPool, name: str) -> None:
        """Take pages of another kind; BadValue as above."""
        self._add(pool, name, page_bytes_of(pool, name, flat=False))

    def _add(self, pool: HostPool, name: str, page_bytes: int) -> None:
        where = share_of(pool, name, self._config)
        self._kinds[name] = HostPages(pool, name, where, page_bytes)

    def open(self, rows: Rows) -> None:
        """From now on these are where pages are."""
        self._rows = rows

    @property
    def is_open(self) -> bool:
        """Whether it has come so far."""
        return self._rows is not None

    @property
    def rows(self) -> Rows:
        """Where pages are."""
        assert self._rows is not None, "asked before the KV's pages were told"
        return self._rows

    @property
    def page_bytes(self) -> int:
        """Of a page of KV, this rank's share."""
        return self._kinds[KV].page_bytes

    # Finding.

    def leading(self, keys: Sequence[str]) -> int:
        """How many pages of KV are there, and leased, from the first on."""
        return leading(self.rows.there(self._kinds[KV].names(keys)) or ())

    def restorable(self, keys: Sequence[str], transfers: Sequence[Transfer]) -> Restorable | None:
        """Which prefixes are there, and leased, with all that they need; None: nobody knows."""
        gating = [each for each in transfers if _policy(each) in (ALL_PAGES, TRAILING_PAGES)]
        names = self._kinds[KV].names(keys)
        for transfer in gating:
            names += self._kinds[str(transfer.name)].names(keys)
        there = self.rows.there(names)
        if there is None:
            return None
        count = len(keys)
        kinds = [
            Kind(str(each.name), there[place : place + count], _window(each))
            for place, each in zip(range(count, len(there), count), gating, strict=True)
        ]
        return restorable(KV, there[:count], kinds)

    # Moving.

    def load(
        self, name: str, keys: Sequence[str] | None, indices: torch.Tensor | None
    ) -> list[bool]:
        """Bring pages of a kind into the host's pool; whether each came."""
        if not keys or indices is None:
            return [False] * len(keys or ())
        pages = self._kinds[name]
        places = pages.places(indices, len(keys))
        return self.rows.read(pages.names(keys), pages.page_bytes, places)

    def save(
        self, name: str, keys: Sequence[str] | None, indices: torch.Tensor | None
    ) -> list[bool]:
        """Store pages of the host's pool; whether each is there now."""
        if not keys or indices is None:
            return [False] * len(keys or ())
        pages = self._kinds[name]
        places = pages.places(indices, len(keys))
        return self.rows.write(pages.names(keys), pages.page_bytes, places)

    def load_flat(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Bring flat pages of KV; whether each came."""
        return self.rows.read(self._kinds[KV].names(keys), self.page_bytes, self._flat(pages))

    def save_flat(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Store flat pages of KV; whether each is there now."""
        kept = [page.contiguous() for page in pages]
        return self.rows.write(self._kinds[KV].names(keys), self.page_bytes, self._flat(kept))

    def _flat(self, pages: Sequence[torch.Tensor]) -> list[Pieces]:
        return [pieces_of(page, self.page_bytes) for page in pages]


def _window(transfer: Transfer) -> int:
    return max(1, len(transfer.keys or ())) if _policy(transfer) == TRAILING_PAGES else 0


def _policy(transfer: Transfer) -> str:
    """Others than the two say what a kind has, and gate nothing; SGLang asks for them by itself."""
    return str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
