"""The transformers connector on a tiny random model: restored caches give the same bits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache, MistralConfig, StaticCache

from kvstore.connectors.transformers import (
    PooledPrefix,
    UnsupportedCache,
    content_of,
    weights_digest,
)
from kvstore.errors import BadValue, Unavailable
from kvstore.hints import Hints
from tests.fake_store import FakeStore
from tests.tiny_model import PAGE, compute, computed, config, greedy, same, text, tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import LlamaForCausalLM

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: str(dtype))
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return tiny(request.param)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    for buffer in made.buffers:
        buffer.close()


def pooled(store: FakeStore, model: LlamaForCausalLM, model_id: str = "tiny") -> PooledPrefix:
    return PooledPrefix(store, model, model_id, page_tokens=PAGE)


@pytest.mark.parametrize("length", range(3 * PAGE + 1))
def test_a_restored_cache_gives_the_same_logits(
    store: FakeStore, model: LlamaForCausalLM, length: int
) -> None:
    prefix, tokens = pooled(store, model), text(length)
    original = computed(model, tokens)
    kept = prefix.store(tokens, original)
    assert (kept.stored, kept.present, kept.trouble) == (length // PAGE, 0, "")
    question = [*tokens, 5, 6]
    restored, fetched = prefix.fetch(question)
    assert fetched.tokens == length // PAGE * PAGE == restored.get_seq_length()
    # The same split: the page-aligned prefix of one forward pass, then the rest in another.
    original = computed(model, tokens)
    if fetched.tokens < length:
        original.crop(fetched.tokens - length)
    rest = question[fetched.tokens :]
    if fetched.tokens:
        assert same(restored, original)
    assert torch.equal(compute(model, rest, restored), compute(model, rest, original))


def test_greedy_decoding_goes_on_bit_for_bit(store: FakeStore, model: LlamaForCausalLM) -> None:
    prefix, tokens = pooled(store, model), text(5 * PAGE)
    original = computed(model, tokens)
    prefix.store(tokens, original)
    restored, fetched = prefix.fetch([*tokens, 5, 6])
    assert fetched.tokens == len(tokens)
    want = greedy(model, [5, 6], original, 24)
    got = greedy(model, [5, 6], restored, 24)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


def test_what_a_chat_knows_of_itself_reaches_the_store(
    store: FakeStore, model: LlamaForCausalLM
) -> None:
    prefix, tokens, hints = pooled(store, model), text(PAGE + 1), Hints(turn=1)
    cache, _ = prefix.fetch(tokens, hints=hints)
    compute(model, tokens, cache)
    prefix.store(tokens, cache, hints=hints)
    prefix.hint(tokens, Hints(session_closed=True))
    assert [each[2] for each in store.heard] == [hints, hints, Hints(session_closed=True)]


def test_at_least_one_token_is_left_to_compute(store: FakeStore, model: LlamaForCausalLM) -> None:
    prefix, tokens = pooled(store, model), text(2 * PAGE)
    prefix.store(tokens, computed(model, tokens))
    assert prefix.fetch(tokens)[1].tokens == PAGE
    assert prefix.fetch([*tokens, 5])[1].tokens == 2 * PAGE
    assert prefix.fetch([])[1].tokens == 0


def test_the_next_turn_of_a_chat_finds_generated_pages(
    store: FakeStore, model: LlamaForCausalLM
) -> None:
    prefix, prompt = pooled(store, model), text(PAGE + 5)
    cache, fetched = prefix.fetch(prompt)
    assert fetched.tokens == 0
    answer, _ = greedy(model, prompt, cache, 2 * PAGE)
    kept = prefix.store([*prompt, *answer], cache)
    # The last generated token was never computed, so its page is not full: 52 of 53 tokens.
    assert kept.stored == (len(prompt) + len(answer) - 1) // PAGE == 3
    next_turn = [*prompt, *answer, 8, 9]
    restored, fetched = prefix.fetch(next_turn)
    assert fetched.tokens == 3 * PAGE > len(prompt)
    cache.crop(fetched.tokens - cache.get_seq_length())
    rest = next_turn[fetched.tokens :]
    assert torch.equal(compute(model, rest, restored), compute(model, rest, cache))


def test_a_restored_cache_does_not_live_in_staging_memory(
    store: FakeStore, model: LlamaForCausalLM
) -> None:
    prefix, tokens = pooled(store, model), text(PAGE)
    prefix.store(tokens, computed(model, tokens))
    restored, _ = prefix.fetch([*tokens, 5])
    for buffer in store.buffers:
        buffer.view[:] = bytes(buffer.size_bytes)
    assert same(restored, computed(model, tokens))


def test_prefixes_longer_than_the_staging_memory_come_whole(store: FakeStore) -> None:
    model = tiny()
    prefix, tokens = pooled(store, model), text(7 * PAGE)
    original = computed(model, tokens)
    small = PooledPrefix(store, model, "tiny", page_tokens=PAGE, staging_bytes=1)
    assert small.store(tokens, original).stored == 7
    for each in (small, prefix):
        restored, fetched = each.fetch([*tokens, 5])
        assert fetched.tokens == len(tokens)
        assert same(restored, original)


def test_pages_that_vanish_midway_leave_a_shorter_cache(store: FakeStore) -> None:
    model = tiny()
    tokens = text(4 * PAGE)
    original = computed(model, tokens)
    small = PooledPrefix(store, model, "tiny", page_tokens=PAGE, staging_bytes=1)
    small.store(tokens, original)
    whole, asked = store.match_prefix, []

    def match_prefix(*args: object, hints: Hints | None = None) -> object:
        asked.append(args)
        if len(asked) == 3:
            store.held.clear()
        return whole(*args, hints=hints)  # type: ignore[arg-type]  # handed through unchanged

    store.match_prefix = match_prefix  # type: ignore[method-assign,assignment]  # evicts midway
    restored, fetched = small.fetch([*tokens, 5])
    assert (fetched.tokens, fetched.trouble) == (2 * PAGE, "evicted meanwhile")
    original.crop(-2 * PAGE)
    assert same(restored, original)
    compute(model, [5, 6], restored)
    assert restored.get_seq_length() == 2 * PAGE + 2


def test_identical_prompts_at_once_are_stored_once(store: FakeStore) -> None:
    model = tiny()
    prefix, tokens = pooled(store, model), text(3 * PAGE)
    start, stored = threading.Barrier(2), []

    def run() -> None:
        cache, _ = prefix.fetch(tokens)
        compute(model, tokens, cache)
        start.wait()
        stored.append(prefix.store(tokens, cache).stored)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(stored) == 3
    assert set(store.puts.values()) == {1}
    assert same(prefix.fetch([*tokens, 5])[0], computed(model, tokens))


def test_a_pool_in_trouble_leaves_the_model_to_itself(store: FakeStore) -> None:
    model = tiny()
    prefix, tokens = pooled(store, model), text(2 * PAGE)
    store.fail["match_prefix"] = store.fail["probe"] = Unavailable("gone")
    cache, fetched = prefix.fetch(tokens)
    assert (fetched.tokens, fetched.trouble) == (0, "unavailable: gone")
    compute(model, tokens, cache)
    assert prefix.store(tokens, cache).trouble == "unavailable: gone"


def test_more_cache_than_tokens_stores_the_tokens(store: FakeStore) -> None:
    model = tiny()
    prefix = pooled(store, model)
    assert prefix.store(text(2 * PAGE), computed(model, text(3 * PAGE))).stored == 2
    assert prefix.store(text(PAGE), DynamicCache(config=model.config)).stored == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda: pooled(FakeStore(), tiny(torch.bfloat16)),
        lambda: pooled(FakeStore(), tiny(seed=8)),
        lambda: pooled(
            FakeStore(), tiny(rope_parameters={"rope_type": "default", "rope_theta": 9.0})
        ),
        lambda: pooled(FakeStore(), tiny(num_key_value_heads=3)),
        lambda: pooled(FakeStore(), tiny(), "another"),
        lambda: PooledPrefix(FakeStore(), tiny(), "tiny", page_tokens=PAGE * 2),
        lambda: PooledPrefix(FakeStore(), tiny(), "tiny", page_tokens=PAGE, salt="s"),
        lambda: PooledPrefix(FakeStore(), tiny(), "tiny", page_tokens=PAGE, adapter="a"),
        lambda: PooledPrefix(FakeStore(), tiny(), "tiny", page_tokens=PAGE, revision="r"),
    ],
    ids=["dtype", "weights", "rope", "heads", "model", "page", "salt", "adapter", "revision"],
)
def test_whatever_changes_the_kv_is_another_namespace(
    store: FakeStore, other: Callable[[], PooledPrefix]
) -> None:
    prefix = pooled(store, tiny())
    assert other().namespace.id != prefix.namespace.id


def test_the_same_model_is_the_same_namespace(store: FakeStore) -> None:
    one, other = pooled(store, tiny()), pooled(FakeStore(), tiny())
    assert one.namespace.id == other.namespace.id
    store.tenant = "somebody"
    assert pooled(store, tiny()).namespace.id != one.namespace.id


def test_another_dtype_never_hits(store: FakeStore) -> None:
    tokens = text(2 * PAGE)
    pooled(store, tiny()).store(tokens, computed(tiny(), tokens))
    assert pooled(store, tiny(torch.bfloat16)).fetch([*tokens, 5])[1].tokens == 0


def test_weights_have_one_digest() -> None:
    assert weights_digest(tiny()) == weights_digest(tiny())
    changed = tiny()
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.weight[0, 0] += 1.0
    assert weights_digest(changed) != weights_digest(tiny())


@pytest.mark.parametrize(
    "cache",
    [
        lambda: StaticCache(config=config(), max_cache_len=64),
        lambda: DynamicCache(config=MistralConfig(sliding_window=8, num_hidden_layers=3)),
        lambda: DynamicCache(config=config(), offloading=True),
        lambda: computed(tiny(num_hidden_layers=2), text(PAGE)),
        lambda: computed(tiny(num_key_value_heads=3), text(PAGE)),
        lambda: computed(tiny(torch.bfloat16), text(PAGE)),
        lambda: tuple((layer.keys, layer.values) for layer in computed(tiny(), text(4)).layers),
    ],
    ids=["static", "sliding", "offloaded", "layers", "heads", "dtype", "tuple"],
)
def test_other_caches_are_refused(store: FakeStore, cache: Callable[[], DynamicCache]) -> None:
    prefix = pooled(store, tiny())
    with pytest.raises(UnsupportedCache, match="want"):
        prefix.store(text(PAGE), cache())
    assert not store.held


def test_a_batch_of_several_prompts_is_refused(store: FakeStore) -> None:
    model = tiny()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([text(PAGE)] * 2), cache=cache)
    with pytest.raises(UnsupportedCache, match=r"got \[2, "):
        pooled(store, model).store(text(PAGE), cache)


def test_models_without_full_attention_are_refused() -> None:
    sliding = MistralConfig(sliding_window=8)
    with pytest.raises(UnsupportedCache, match="want the model itself"):
        content_of(sliding, dtype=torch.float32, tenant="t", model_id="m", revision="r")


def test_a_dtype_that_pages_cannot_have_is_refused(store: FakeStore) -> None:
    with pytest.raises(BadValue, match="float64"):
        pooled(store, tiny(torch.float64))


def test_long_position_settings_fit_the_name() -> None:
    factors = [1.0 + i / 7 for i in range(200)]
    long = config(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
        }
    )
    content = content_of(long, dtype=torch.float32, tenant="t", model_id="m", revision="r")
    assert content.position.startswith("sha256:")
