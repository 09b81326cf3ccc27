"""A prompt in chunks: the same KV as in one engine, layer by layer, and cancelled anywhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from kvstore.errors import BadValue
from tests.tiny_model import computed, same, text, tiny
from tests.unit.engine_runs import CHUNK, one_by_one, request, run
from workers.chunked_prefill import LayerStates, prefill

MODEL = tiny()
LAYERS = 3


def empty() -> DynamicCache:
    return DynamicCache(config=MODEL.config)


def in_pieces(tokens: list[int], ends: list[int]) -> DynamicCache:
    """The KV of tokens computed in passes that end there."""
    cache = empty()
    for start, end in pairwise([0, *ends]):
        MODEL(input_ids=torch.tensor([tokens[start:end]]), cache=cache)
    return cache


@pytest.mark.parametrize(
    ("length", "ends"),
    [(1, [1]), (CHUNK, [8]), (CHUNK + 1, [8, 9]), (3 * CHUNK - 1, [8, 16, 23])],
)
@torch.no_grad()
def test_the_cache_has_each_chunk_when_it_is_yielded(length: int, ends: list[int]) -> None:
    tokens, cache, seen = text(length), empty(), []
    for chunk in prefill(MODEL, cache, tokens, chunk_tokens=CHUNK):
        seen.append(chunk.tokens)
        assert cache.get_seq_length() == chunk.tokens
        assert (chunk.logits is None) == (chunk.tokens < length)
    assert seen == ends
    assert same(cache, in_pieces(tokens, ends))


def test_what_is_known_already_is_not_computed_again() -> None:
    tokens = text(3 * CHUNK)
    cache = computed(MODEL, tokens[: CHUNK + 3])
    ends = [chunk.tokens for chunk in prefill(MODEL, cache, tokens, chunk_tokens=CHUNK)]
    assert ends == [2 * CHUNK, 3 * CHUNK]


def test_an_engine_goes_on_from_a_prefill_as_if_it_had_computed_it() -> None:
    asked = request("a", 2 * CHUNK + 3)
    whole = one_by_one(MODEL)
    whole.add(asked)
    expected = [one.token for one in run(whole)]
    cache = empty()
    *_, last = prefill(MODEL, cache, asked.tokens, chunk_tokens=CHUNK)
    assert last.logits is not None
    first = int(last.logits.argmax())
    assert first == expected[0]
    engine = one_by_one(MODEL)
    tokens = (*asked.tokens, first)
    engine.add(type(asked)("a", tokens, asked.max_tokens - 1), cache)
    assert [one.token for one in run(engine)] == expected[1:]


def test_every_layer_is_told_as_it_is_computed() -> None:
    tokens, cache, told = text(2 * CHUNK + 2), empty(), []

    def on_layer(states: LayerStates) -> None:
        behind = [layer.get_seq_length() for layer in cache.layers[states.layer + 1 :]]
        assert set(behind) <= {states.first}, "a later layer was computed first"
        told.append(states)

    for _ in prefill(MODEL, cache, tokens, chunk_tokens=CHUNK, on_layer=on_layer):
        pass
    assert [(one.layer, one.first) for one in told] == [
        (layer, first) for first in (0, CHUNK, 2 * CHUNK) for layer in range(LAYERS)
    ]
    for layer in range(LAYERS):
        of_layer = [one for one in told if one.layer == layer]
        keys = torch.cat([one.keys for one in of_layer], dim=2)
        values = torch.cat([one.values for one in of_layer], dim=2)
        assert torch.equal(keys, cache.layers[layer].keys)
        assert torch.equal(values, cache.layers[layer].values)


def test_nobody_is_told_of_what_others_compute_between_chunks() -> None:
    told: list[LayerStates] = []
    chunks = prefill(MODEL, empty(), text(2 * CHUNK), chunk_tokens=CHUNK, on_layer=told.append)
    next(chunks)
    computed(MODEL, text(5))
    assert len(told) == LAYERS


def test_nobody_is_told_of_what_another_thread_computes_meanwhile() -> None:
    """As the batch of a worker that does both does."""
    told: list[int] = []

    def on_layer(states: LayerStates) -> None:
        told.append(states.layer)
        if told == [0, 1]:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(computed, MODEL, text(5)).result()

    list(prefill(MODEL, empty(), text(CHUNK), chunk_tokens=CHUNK, on_layer=on_layer))
    assert told == list(range(LAYERS))


@pytest.mark.parametrize("chunks", range(4))
def test_a_prefill_is_cancelled_between_chunks_and_goes_on_later(chunks: int) -> None:
    tokens, cache = text(3 * CHUNK + 1), empty()
    first = prefill(MODEL, cache, tokens, chunk_tokens=CHUNK)
    for _ in range(chunks):
        next(first)
    del first
    assert cache.get_seq_length() == chunks * CHUNK
    list(prefill(MODEL, cache, tokens, chunk_tokens=CHUNK))
    whole = empty()
    list(prefill(MODEL, whole, tokens, chunk_tokens=CHUNK))
    assert same(cache, whole)


@pytest.mark.parametrize("calls", range(1, 2 * LAYERS + 1))
def test_a_chunk_that_is_broken_off_in_any_layer_leaves_the_chunks_before(calls: int) -> None:
    tokens, cache, told = text(2 * CHUNK), empty(), []

    def on_layer(states: LayerStates) -> None:
        told.append(states)
        if len(told) == calls:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        list(prefill(MODEL, cache, tokens, chunk_tokens=CHUNK, on_layer=on_layer))
    kept = (calls - 1) // LAYERS * CHUNK
    assert [layer.get_seq_length() for layer in cache.layers] == [kept] * LAYERS
    list(prefill(MODEL, cache, tokens, chunk_tokens=CHUNK))
    whole = empty()
    list(prefill(MODEL, whole, tokens, chunk_tokens=CHUNK))
    assert same(cache, whole)
    assert len(told) == calls, "a hook was left behind"


def test_other_models_are_told_of_layers_too() -> None:
    config = MistralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=None,
    )
    told: list[LayerStates] = []
    model = MistralForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    list(prefill(model, cache, range(9), chunk_tokens=CHUNK, on_layer=told.append))
    assert [(one.layer, one.first) for one in told] == [(0, 0), (1, 0), (0, 8), (1, 8)]


def test_what_leaves_nothing_to_compute_is_refused() -> None:
    with pytest.raises(BadValue, match="cache: got '5 tokens', want fewer than the prompt's 5"):
        prefill(MODEL, computed(MODEL, text(5)), text(5))
    with pytest.raises(BadValue, match="chunk_tokens: got 0, want at least 1"):
        prefill(MODEL, empty(), text(5), chunk_tokens=0)
