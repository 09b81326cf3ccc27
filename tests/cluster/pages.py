"""Puts and reads pages whose bytes can be recomputed, through a real store. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import AlreadyThere, Attention, CacheGroup, Content, Hit, KVStore, Layout, Stored
from tests.cluster.servers import until
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvstore import OpenedNamespace, PageChain
    from kvstore.client.locations import Locations

PAGE_TOKENS = 4
SIZE = 64 << 10
PAGES = 16
"""Of a chain, where nothing asks for another length."""


def content(model: str, size: int = SIZE, ranks: int = 1) -> Content:
    """A model whose parts have `size` bytes, one part a rank."""
    dims = size // (2 * PAGE_TOKENS * 2)
    group = CacheGroup(Attention.FULL, 1, ranks, dims, dims)
    return Content("default", model, "r1", "", "bfloat16", (group,), "rope")


def more(opened: OpenedNamespace, number: int = 1) -> PageChain:
    """A chain of one page, another one for each number, that no range of tokens begins with."""
    return opened.chain([number, number, number, number])


class Pages:
    """A store, and what the tests do with it."""

    def __init__(self, master: str | Sequence[str], transport: str, model: str) -> None:
        """Connect by one transport. `model` tells this test's namespaces from others'."""
        self.master = master
        self.model = model
        self.store = KVStore.connect(master, transports=(transport,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def open(self, size: int = SIZE, ranks: int = 1) -> OpenedNamespace:
        """A namespace of parts of `size` bytes."""
        model = f"{self.model} {size} {ranks}"
        return self.store.open(content(model, size, ranks), self.layout(ranks))

    @staticmethod
    def layout(ranks: int = 1) -> Layout:
        """How pages of these tests are cut."""
        return Layout(page_tokens=PAGE_TOKENS, tensor_parallel=ranks)

    def put(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        part: int = 0,
        timeout_s: float | None = None,
        tier: str = "",
    ) -> list[object]:
        """Put every page's payload from a buffer; the outcomes."""
        size = opened.namespace.parts[part].size_bytes
        buffer = self.store.buffer(max(1, len(chain)) * size)
        for i, key in enumerate(chain):
            buffer.view[i * size : (i + 1) * size] = payload(key, part, size)
        offsets = range(0, len(chain) * size, size)
        try:
            return [
                *self.store.put(
                    opened, chain, buffer, offsets, part=part, timeout_s=timeout_s, tier=tier
                )
            ]
        finally:
            buffer.close()

    def store_all(self, opened: OpenedNamespace, chain: PageChain) -> None:
        """Put pages that were not there."""
        assert self.put(opened, chain) == [Stored()] * len(chain)

    def store_somehow(self, opened: OpenedNamespace, chain: PageChain) -> None:
        """Put pages while the leader changes: a try whose answer was lost may have stored them."""
        assert set(self.put(opened, chain)) <= {Stored(), AlreadyThere()}

    def read_back(
        self, locations: Locations, pages: int, part: int = 0, misses: Sequence[int] = ()
    ) -> list[object]:
        """Read into fresh memory; every hit's bytes are right, every other place is zero."""
        size = locations.opened.namespace.parts[part].size_bytes
        into = bytearray(b"\xee" * (pages * size))
        offsets = range(0, pages * size, size)
        outcomes = self.store.read(locations, into, offsets, part=part)
        for i, outcome in enumerate(outcomes):
            want = payload(locations.chain.key(i), part, size) if outcome == Hit() else bytes(size)
            found = bytes(into[i * size : (i + 1) * size])
            assert found == want or (i in misses and found == b"\xee" * size), i
        return list(outcomes)

    def assert_readable(self, opened: OpenedNamespace, chain: PageChain) -> None:
        """All pages match and every byte is right."""
        match = self.store.match_prefix(opened, chain)
        assert match.pages == len(chain)
        assert self.read_back(match, len(chain)) == [Hit()] * len(chain)

    def assert_found(self, opened: OpenedNamespace, chain: PageChain) -> None:
        """So they are, once the worker that holds them has come to a new leader."""
        until("pages are found", lambda: self.store.match_prefix(opened, chain).pages == len(chain))
        self.assert_readable(opened, chain)
