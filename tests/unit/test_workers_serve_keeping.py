"""Pages that go into the pool while the prompt is computed, and come out part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.locations import Found
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import MissReason
from kvstore.connectors.transformers import PooledPrefix
from kvstore.errors import BadValue, Fenced, OutOfSpace
from tests.fake_store import FakeStore
from tests.tiny_model import PAGE, computed, same, text, tiny
from workers.chunked_prefill import prefill
from workers.serve_keeping import Keeping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import DynamicCache

    from kvstore.connectors.transformers import LayerCache

CHUNK = 2 * PAGE
MODEL = tiny()
PROMPT = text(5 * PAGE + 3)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    for buffer in made.buffers:
        buffer.close()


class KV:
    """As TicketKV, and remembers what is put."""

    def __init__(self, store: FakeStore, groups: int) -> None:
        self.prefix = PooledPrefix(store, MODEL, "tiny", page_tokens=PAGE, layer_groups=groups)
        self.opened = OpenedNamespace(self.prefix.namespace, 1)
        self.put: list[tuple[int, int, int]] = []
        self.told: list[int] = []
        self.fenced: Fenced | None = None

    def keep_part(
        self, tokens: Sequence[int], part: int, first: int, layers: list[LayerCache]
    ) -> None:
        self.put.append((part, first, len(tokens)))
        pages = len(tokens) // PAGE - first
        for states in (states for layer in layers for states in layer):
            assert states.shape[2] == pages * PAGE
            assert states.untyped_storage().nbytes() == states.nbytes, "it holds nothing else"
        self.prefix.store_part(tokens, part, first, layers)

    def tell(self, left: int) -> None:
        if self.fenced is not None:
            raise self.fenced
        self.told.append(left)

    def compute(self, cache: DynamicCache) -> None:
        kv: Any = self
        keeping = Keeping(kv, PROMPT, cache, self.tell)
        with keeping:
            by_layer = keeping.by_layer
            for chunk in prefill(MODEL, cache, PROMPT, chunk_tokens=CHUNK, on_layer=by_layer):
                keeping.chunk(chunk.tokens)
            keeping.finish()


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_each_chunk_goes_by_groups_of_layers_and_comes_back_the_same(
    store: FakeStore, groups: int
) -> None:
    kv = KV(store, groups)
    cache, _ = kv.prefix.fetch(PROMPT)
    kv.compute(cache)
    chunks = ((0, CHUNK), (2, 2 * CHUNK), (4, len(PROMPT)))
    assert kv.put == [(part, *chunk) for chunk in chunks for part in range(groups)]
    assert kv.told == [83, 83 - CHUNK, 83 - 2 * CHUNK]
    restored, fetched = kv.prefix.fetch(PROMPT)
    assert (fetched.pages, fetched.trouble) == (5, "")
    cache.crop(5 * PAGE - len(PROMPT))
    assert same(restored, cache)


def test_what_the_pool_had_is_not_put_again(store: FakeStore) -> None:
    kv = KV(store, 2)
    kv.prefix.store(PROMPT[: 3 * PAGE], computed(MODEL, PROMPT[: 3 * PAGE]))
    cache, fetched = kv.prefix.fetch(PROMPT)
    assert fetched.pages == 3
    kv.compute(cache)
    assert kv.put == [(0, 3, 64), (1, 3, 64), (0, 4, 83), (1, 4, 83)]
    assert kv.told == [35, 19]


def test_what_is_left_out_is_stored_in_the_end(store: FakeStore) -> None:
    kv = KV(store, 2)
    cache, _ = kv.prefix.fetch(PROMPT)
    store.fail["put_parts"] = OutOfSpace("full")
    kv.compute(cache)
    assert not store.held
    del store.fail["put_parts"]
    assert kv.prefix.store(PROMPT, cache).stored == 5


@pytest.mark.parametrize("where", ["put", "told"])
def test_what_is_raised_beside_the_computation_is_heard(store: FakeStore, where: str) -> None:
    kv = KV(store, 1)
    cache, _ = kv.prefix.fetch(PROMPT)
    if where == "put":
        store.fail["put_parts"] = BadValue("part", 1, "0")
    else:
        kv.fenced = Fenced("computed by somebody else")
    with pytest.raises((BadValue, Fenced)):
        kv.compute(cache)


def located(kv: KV, part: int, first: int, stop: int) -> Found:
    """As the master tells the ticket's claimant."""
    chain = kv.opened.chain(PROMPT).slice(first, stop)
    return Found(kv.opened, chain, (part,), (), b"\1" * (stop - first))


@pytest.mark.parametrize("groups", [1, 3])
def test_parts_that_have_arrived_are_not_asked_for_again(store: FakeStore, groups: int) -> None:
    kv = KV(store, groups)
    cache, _ = kv.prefix.fetch(PROMPT)
    kv.compute(cache)
    arriving = kv.prefix.expect(PROMPT)
    for part in range(groups):
        assert kv.prefix.bring_part(arriving, part, located(kv, part, 0, 2)) == 2
    assert kv.prefix.bring_part(arriving, 0, located(kv, 0, 2, 4)) == 2
    assert arriving.whole_pages == (4 if groups == 1 else 2)
    store.heard.clear()
    # The tokens that were generated since end in a page for which there is no room.
    longer = [*PROMPT, *text(2 * PAGE)]
    kv.prefix.store(longer, computed(MODEL, longer))
    store.heard.clear()
    whole = arriving.whole_pages
    restored, fetched = kv.prefix.fetch(longer, arrived=arriving)
    assert fetched.pages == 5
    assert fetched.bytes_moved == (5 - whole) * kv.opened.namespace.page_bytes
    assert [len(chain) for chain, _, _ in store.heard] == [5 - whole]
    cache.crop(5 * PAGE - len(PROMPT))
    assert same(restored, cache)


def test_a_part_that_does_not_come_is_where_it_ends(store: FakeStore) -> None:
    kv = KV(store, 2)
    cache, _ = kv.prefix.fetch(PROMPT)
    kv.compute(cache)
    arriving = kv.prefix.expect(PROMPT)
    store.spoil[kv.opened.chain(PROMPT).key(1)] = MissReason.CHECKSUM
    assert kv.prefix.bring_part(arriving, 1, located(kv, 1, 0, 3)) == 1
    assert arriving.pages == [0, 1]
    assert kv.prefix.bring_part(arriving, 0, located(kv, 0, 0, 1)) == 1
    restored, fetched = kv.prefix.fetch(PROMPT, arrived=arriving)
    assert (fetched.pages, fetched.trouble) == (1, "checksum")
    cache.crop(PAGE - len(PROMPT))
    assert same(restored, cache)
