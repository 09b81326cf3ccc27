"""Rows that decode together generate what each would alone, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvstore.connectors.transformers import PooledPrefix
from kvstore.errors import BadValue
from tests.fake_store import FakeStore
from tests.tiny_model import computed, config, same, text, tiny
from tests.unit.engine_runs import CAPACITY, CHUNK, alone, one_by_one, request, run
from workers import smollm
from workers.batching import (
    BLOCK_BYTES,
    FORMS,
    Batched,
    Multiply,
    at_once,
    engine_of,
    exact_form,
    in_blocks,
)
from workers.engine import ROWS_MAX, AnyEngine, Engine, EngineRequest, Generated
from workers.generation import logits_after
from workers.one_by_one import OneByOne
from workers.row_kv import STEP_TOKENS, RowKV

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.float32, torch.bfloat16)
MODELS = {dtype: tiny(dtype) for dtype in DTYPES}


def form_of(model: LlamaForCausalLM) -> Multiply:
    """The form that is used for this model on this machine, which has one."""
    form = exact_form(model, ROWS_MAX)
    assert form is not None
    return form


def batched(model: LlamaForCausalLM) -> AnyEngine:
    return Engine(Batched(model, form_of(model)), capacity_tokens=CAPACITY, chunk_tokens=CHUNK)


def ended(generated: list[Generated]) -> dict[str, tuple[int, ...]]:
    """All tokens of the requests that ended."""
    return {one.request_id: one.taken.tokens for one in generated if one.taken is not None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_requests_that_come_and_go_generate_what_each_does_alone(
    seed: int, temperature: float, dtype: torch.dtype
) -> None:
    print(f"seed {seed}")
    model, chance = MODELS[dtype], random.Random(seed)
    engine, other = batched(model), one_by_one(model)
    asked = {
        str(i): request(
            str(i),
            chance.randint(1, 3 * CHUNK),
            chance.randint(1, 12),
            temperature=temperature,
            seed=chance.randrange(100),
        )
        for i in range(12)
    }
    waiting, dropped, moved = list(asked.values()), set[str](), set[str]()

    def meanwhile(_: int) -> None:
        while waiting and engine.free_rows and engine.free_tokens >= waiting[-1].room:
            engine.add(waiting.pop())
            if chance.random() < 0.5:
                break
        if engine.running and chance.random() < 0.2:
            dropped.add(name := chance.choice(engine.running))
            assert engine.cancel(name)
        if engine.running and other.free_rows and chance.random() < 0.2:
            moved.add(name := chance.choice(engine.running))
            taken = engine.export(name)
            rest = replace(asked[name], tokens=taken.tokens, max_tokens=taken.max_tokens)
            other.add(rest, taken.cache)

    results = ended(run(engine, meanwhile) + run(other))
    assert not waiting
    assert engine.free_tokens == CAPACITY
    assert dropped
    assert moved
    assert set(results) == set(asked) - dropped
    for name, tokens in results.items():
        assert tokens == alone(model, asked[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_long_rows_have_the_logits_and_the_kv_that_they_have_alone(dtype: torch.dtype) -> None:
    model = tiny(dtype, max_position_embeddings=2048)
    forward = Batched(model, form_of(model))
    lengths = (1, 2, STEP_TOKENS - 2, STEP_TOKENS, 700, 1200)
    caches = [computed(model, text(length)) for length in lengths]
    rows = [forward.hold(cache) for cache in caches]
    for step in range(4):
        tokens = [(step + 5 * i) % 90 for i in range(len(rows))]
        together = forward.decode(rows, tokens)
        for i, (cache, token) in enumerate(zip(caches, tokens, strict=True)):
            assert torch.equal(together[i], logits_after(model, cache, [token])), (step, i)
    for row, cache in zip(rows, caches, strict=True):
        assert row.tokens == cache.get_seq_length()
        assert same(row.cache(), cache)


@pytest.mark.parametrize("steps", range(8))
def test_a_row_that_is_taken_out_goes_on_in_a_batch_elsewhere(steps: int) -> None:
    model = MODELS[torch.float32]
    asked = request("a", 3 * CHUNK + 1)
    one, other = batched(model), batched(model)
    one.add(asked)
    one.add(request("beside", 4, 20))
    other.add(request("there", 9, 20))
    for _ in range(steps):
        one.step()
        other.step()
    taken = one.export("a")
    other.add(replace(asked, tokens=taken.tokens, max_tokens=taken.max_tokens), taken.cache)
    assert ended(run(other))["a"] == alone(model, asked)
    assert ended(run(one)) == {"beside": alone(model, request("beside", 4, 20))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_goes_on_from_its_pages_in_the_pool(dtype: torch.dtype) -> None:
    model, store = MODELS[dtype], FakeStore()
    prefix = PooledPrefix(store, model, "tiny", page_tokens=CHUNK)
    asked = request("a", 3 * CHUNK, 3 * CHUNK)
    one, other = batched(model), batched(model)
    one.add(asked)
    for _ in range(3 + CHUNK):
        one.step()
    taken = one.export("a")
    prefix.store(taken.tokens, taken.cache)
    cache, fetched = prefix.fetch(taken.tokens)
    assert fetched.tokens == 4 * CHUNK
    assert len(taken.tokens) == 4 * CHUNK + 1
    other.add(replace(asked, tokens=taken.tokens, max_tokens=taken.max_tokens), cache)
    assert ended(run(other))["a"] == alone(model, asked)
    for buffer in store.buffers:
        buffer.close()


def test_an_installed_cache_is_copied_and_what_is_exported_is_not_written_again() -> None:
    model = MODELS[torch.float32]
    cache = computed(model, text(20))
    forward = Batched(model, form_of(model))
    rows = [forward.hold(cache), forward.hold(cache)]
    forward.decode(rows, [3, 4])
    exported = forward.cache(rows[0])
    assert cache.get_seq_length() == 20
    assert same(exported, computed_after(model, 20, 3))
    assert same(rows[1].cache(), computed_after(model, 20, 4))


@pytest.mark.parametrize("make", [one_by_one, batched])
def test_what_is_looked_at_stays_as_it_was_while_the_request_goes_on(
    make: Callable[[LlamaForCausalLM], AnyEngine],
) -> None:
    asked = request("a", 2 * CHUNK, 300)
    engine = make(tiny())
    engine.add(asked)
    for _ in range(20):
        engine.step()
    seen = engine.look("a")
    copies = [(layer.keys.clone(), layer.values.clone()) for layer in seen.cache.layers]
    ended = run(engine)[-1].taken  # memory has grown meanwhile
    assert ended is not None
    assert seen.tokens == ended.tokens[: len(seen.tokens)]
    assert seen.cache.get_seq_length() == len(seen.tokens) - 1
    for layer, (keys, values), whole in zip(
        seen.cache.layers, copies, ended.cache.layers, strict=True
    ):
        held = keys.shape[2]
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
        assert torch.equal(whole.keys[:, :, :held], keys)


def computed_after(model: LlamaForCausalLM, length: int, token: int) -> DynamicCache:
    cache = computed(model, text(length))
    logits_after(model, cache, [token])
    return cache


def test_a_cache_of_another_model_is_refused() -> None:
    row = RowKV(config(), torch.float32, torch.device("cpu"))
    for other in (tiny(num_key_value_heads=3), tiny(num_hidden_layers=2), tiny(torch.bfloat16)):
        with pytest.raises(BadValue, match=r"^cache: .*3 layers of \(1, 2, 5, 8\), torch.float32"):
            row.take_in(computed(other, text(5)))
    assert row.tokens == 0


def test_a_product_in_blocks_is_the_product() -> None:
    outputs = 3 * BLOCK_BYTES // (4 * 512) + 17
    rows, weight = torch.ones(3, 1, 512), torch.ones(outputs, 512)
    rows[1] *= 2
    weight[-1] = 3
    product = in_blocks(rows, weight)
    assert torch.equal(product, at_once(rows, weight))
    assert product[1, 0, -1] == 2 * 3 * 512


def test_only_a_form_that_keeps_the_bits_of_rows_is_taken() -> None:
    model = MODELS[torch.float32]

    def crowded(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = torch.cat([at_once(rows[i : i + 1], weight) for i in range(len(rows))])
        return product if len(rows) < 5 else torch.nextafter(product, product + 1)

    def each(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([at_once(rows[i : i + 1], weight) for i in range(len(rows))])

    assert exact_form(model, 4, (crowded, each)) is crowded
    assert exact_form(model, 5, (crowded, each)) is each
    assert exact_form(model, 5, (crowded,)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=str,
)
def test_a_llama_of_another_kind_runs_one_by_one(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    assert exact_form(model, 2) is None
    check_engine(model)


def test_another_model_runs_one_by_one() -> None:
    small = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = MistralForCausalLM(
        MistralConfig(**small, num_attention_heads=2, num_key_value_heads=1, sliding_window=None)
    ).eval()
    assert exact_form(model, 2) is None
    check_engine(model)


def test_a_plain_llama_runs_in_a_batch() -> None:
    assert exact_form(MODELS[torch.float32], ROWS_MAX) in FORMS
    check_engine(MODELS[torch.float32])


def check_engine(model: LlamaForCausalLM) -> None:
    """Two requests in the engine that is made for a model."""
    engine = engine_of(model, capacity_tokens=100, rows_max=2, chunk_tokens=CHUNK)
    assert (engine.free_tokens, engine.free_rows) == (100, 2)
    asked = [request("a", 5), request("b", 12)]
    for one in asked:
        engine.add(one)
    assert ended(run(engine)) == {one.id: alone(model, one) for one in asked}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_real_model_generates_beside_others_what_it_does_alone(dtype: torch.dtype) -> None:
    language = smollm.load()
    model = language.model.to(dtype)
    form = exact_form(model, 3)
    assert form is not None
    questions = ("Name a colour.", "What is the capital of France, and of Italy?", "Why?")
    asked = [
        EngineRequest(question, tuple(language.chat.prompt(question)), 8) for question in questions
    ]
    engines: list[AnyEngine] = [
        Engine(forward, capacity_tokens=500) for forward in (Batched(model, form), OneByOne(model))
    ]
    for engine in engines:
        for one in asked:
            engine.add(one)
    assert ended(run(engines[0])) == ended(run(engines[1]))
