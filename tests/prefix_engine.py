"""An inference engine without a model, for tests of the prefix layer on any store. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvstore.client.prefix import PageStore, PrefixCache
from kvstore.namespace import Attention, CacheGroup, Content, Layout
from tests.fakes import payload

if TYPE_CHECKING:
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.prefix import CopyPages, Fetched, Kept

TOKENS = 4
GROUP = CacheGroup(Attention.FULL, 2, 1, 4, 4)


def text(length: int, salt: int = 0) -> list[int]:
    """So many tokens; another salt makes every one of them another."""
    return [salt * 1000 + i for i in range(length)]


class NamespaceStore(PageStore, Protocol):
    """A store that opens namespaces."""

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        """Make a namespace known."""
        ...


class Engine:
    """An engine whose pages are a function of their key: it can check every byte it gets."""

    def __init__(
        self, store: NamespaceStore, batch_pages: int = 3, pipeline: int = 1, model: str = "m"
    ) -> None:
        """Open the model's namespace, whose pages have `pipeline` parts."""
        layout = Layout(page_tokens=TOKENS, pipeline_parallel=pipeline)
        content = Content("default", model, "r", "", "float32", (GROUP,), "{}")
        self.opened = store.open(content, layout)
        self.page_bytes = self.opened.namespace.page_bytes
        self.prefix = PrefixCache(store, self.opened, batch_pages * self.page_bytes)
        self.got = 0

    def pack(self, tokens: list[int]) -> CopyPages:
        """What fills pages of these tokens."""
        chain = self.opened.chain(tokens)

        def pack(first: int, count: int, memory: memoryview) -> None:
            assert memory.nbytes == count * self.page_bytes
            for i in range(count):
                page = payload(chain.key(first + i), 0, self.page_bytes)
                memory[i * self.page_bytes : (i + 1) * self.page_bytes] = page

        return pack

    def store(self, tokens: list[int]) -> Kept:
        """Store the tokens' pages."""
        return self.prefix.store(tokens, self.pack(tokens))

    def fetch(self, tokens: list[int]) -> Fetched:
        """Fetch a prefix, and check every byte, the order and the counts."""
        chain = self.opened.chain(tokens)
        self.got = 0

        def begin(pages: int) -> CopyPages:
            assert pages > 0

            def unpack(first: int, count: int, memory: memoryview) -> None:
                assert first == self.got
                assert memory.nbytes == count * self.page_bytes
                for i in range(count):
                    page = memory[i * self.page_bytes : (i + 1) * self.page_bytes]
                    assert bytes(page) == payload(chain.key(first + i), 0, self.page_bytes)
                self.got += count

            return unpack

        fetched = self.prefix.fetch(tokens, begin)
        assert self.got == fetched.pages
        assert fetched.tokens == fetched.pages * TOKENS
        assert fetched.bytes_moved == fetched.pages * self.page_bytes
        return fetched
