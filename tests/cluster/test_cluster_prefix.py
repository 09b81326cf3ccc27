"""Prefix reuse on a real pool, by every transport: from tokens to pages and back into a model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from kvstore import KVStore
from kvstore.client.prefix import Fetched, Kept
from kvstore.connectors.transformers import PooledPrefix
from tests.prefix_engine import TOKENS, Engine
from tests.prefix_engine import text as words
from tests.tiny_model import PAGE, compute, computed, greedy, same, text, tiny
from tests.tiny_models import model_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def store(shared_pool: Up, transport: str) -> Iterator[KVStore]:
    with KVStore.connect(shared_pool.master, transports=(transport,)) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model that no other test knows."""
    return str(request.node.nodeid)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_prefixes_come_back_byte_for_byte(store: KVStore, name: str, pipeline: int) -> None:
    engine = Engine(store, batch_pages=3, pipeline=pipeline, model=name)
    assert engine.fetch(words(9 * TOKENS)) == Fetched()
    assert engine.store(words(8 * TOKENS + 3)) == Kept(8, 0, 8 * engine.page_bytes)
    assert engine.store(words(10 * TOKENS)) == Kept(2, 8, 2 * engine.page_bytes)
    assert engine.fetch(words(10 * TOKENS)).pages == 9
    assert engine.fetch(words(10 * TOKENS + 1)).pages == 10
    branch = words(5 * TOKENS + 2) + words(9, salt=1)
    assert engine.fetch(branch).pages == 5
    assert engine.store(branch).present == 5


def test_a_removed_page_ends_the_prefix_until_it_is_stored_again(store: KVStore, name: str) -> None:
    engine = Engine(store, model=name)
    tokens = words(6 * TOKENS)
    engine.store(tokens)
    chain = engine.opened.chain(tokens)
    store.remove(engine.opened, chain.slice(2, 3))
    assert engine.fetch([*tokens, 1]).pages == 2
    kept = engine.store(tokens)
    assert (kept.stored, kept.present, kept.trouble) == (1, 5, "")
    assert engine.fetch([*tokens, 1]).pages == 6


def test_identical_prompts_of_two_programs_are_stored_once(
    store: KVStore, shared_pool: Up, transport: str, name: str
) -> None:
    kept: list[Kept] = []
    start = threading.Barrier(2)
    with KVStore.connect(shared_pool.master, transports=(transport,)) as other:
        engines = [Engine(each, batch_pages=4, model=name) for each in (store, other)]

        def run(engine: Engine) -> None:
            start.wait()
            kept.append(engine.store(words(40 * TOKENS)))

        threads = [threading.Thread(target=run, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.stored + each.present for each in kept] == [40, 40], kept
        assert sum(each.stored for each in kept) == 40
        assert all(engine.fetch(words(40 * TOKENS + 1)).pages == 40 for engine in engines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_goes_on_from_the_pool_bit_for_bit(
    store: KVStore, name: str, dtype: torch.dtype
) -> None:
    model = tiny(dtype)
    prefix = PooledPrefix(store, model, name, page_tokens=PAGE)
    tokens = text(5 * PAGE)
    original = computed(model, tokens)
    assert prefix.store(tokens, original).stored == 5
    restored, fetched = prefix.fetch([*tokens, 5, 6])
    assert (fetched.tokens, fetched.trouble) == (len(tokens), "")
    assert same(restored, original)
    want, got = (greedy(model, [5, 6], cache, 20) for cache in (original, restored))
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", ["gemma3", "deepseek_v3", "falcon_h1", "mamba2"])
def test_a_cache_of_every_kind_comes_back_bit_for_bit(
    shared_pool: Up, name: str, kind: str
) -> None:
    model, tokens = model_of(kind), text(3 * PAGE + 6)
    end, rest = 3 * PAGE, tokens[3 * PAGE :]
    with KVStore.connect(shared_pool.master) as store:
        filled = PooledPrefix(store, model, name, page_tokens=PAGE).prefill(tokens)
        assert (filled.tokens, filled.kept.stored, filled.kept.trouble) == (end, 3, "")
    with KVStore.connect(shared_pool.master) as other:
        restored, fetched = PooledPrefix(other, model, name, page_tokens=PAGE).fetch(tokens)
    assert (fetched.tokens, fetched.trouble) == (end, "")
    original = computed(model, tokens[:end])
    assert torch.equal(compute(model, rest, restored), compute(model, rest, original))


def test_the_next_turn_finds_generated_pages_in_another_program(
    store: KVStore, shared_pool: Up, transport: str, name: str
) -> None:
    model, prompt = tiny(), text(PAGE + 5)
    prefix = PooledPrefix(store, model, name, page_tokens=PAGE)
    cache, _ = prefix.fetch(prompt)
    answer, _ = greedy(model, prompt, cache, 2 * PAGE)
    assert prefix.store([*prompt, *answer], cache).stored == 3
    next_turn = [*prompt, *answer, 8, 9]
    with KVStore.connect(shared_pool.master, transports=(transport,)) as other:
        elsewhere = PooledPrefix(other, tiny(), name, page_tokens=PAGE)
        restored, fetched = elsewhere.fetch(next_turn)
    assert fetched.tokens == 3 * PAGE > len(prompt)
    cache.crop(fetched.tokens - cache.get_seq_length())
    rest = next_turn[fetched.tokens :]
    assert torch.equal(compute(model, rest, restored), compute(model, rest, cache))


def test_another_model_never_finds_them(store: KVStore, name: str) -> None:
    tokens = text(2 * PAGE)
    model = tiny()
    PooledPrefix(store, model, name, page_tokens=PAGE).store(tokens, computed(model, tokens))
    for other in (tiny(torch.bfloat16), tiny(seed=8)):
        prefix = PooledPrefix(store, other, name, page_tokens=PAGE)
        assert prefix.fetch([*tokens, 5])[1].tokens == 0


def test_a_lost_pool_leaves_the_model_to_itself(own_pool: Up) -> None:
    model, tokens = tiny(), text(3 * PAGE)
    with KVStore.connect(own_pool.master, timeout_s=0.5) as store:
        prefix = PooledPrefix(store, model, "lost", page_tokens=PAGE)
        assert prefix.store(tokens, computed(model, tokens)).stored == 3
        own_pool.end()
        cache, fetched = prefix.fetch([*tokens, 5])
        assert fetched.tokens == 0
        assert fetched.trouble
        compute(model, [*tokens, 5], cache)
        assert prefix.store([*tokens, 5], cache).trouble
