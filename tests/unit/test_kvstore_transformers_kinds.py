"""Caches of every kind through a store: restored ones give the same bits, others are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionLayer

from kvstore.client.outcomes import MissReason, RefusedReason
from kvstore.client.prefix import Kept
from kvstore.connectors.transformers import PooledPrefix, UnsupportedCache, content_of, states
from kvstore.connectors.transformers.kinds import GOING_ON, LayerShape, StateShape
from kvstore.connectors.transformers.naming import states_name
from kvstore.errors import Unavailable
from kvstore.namespace import Attention, content_id
from tests.fake_store import FakeStore
from tests.tiny_model import PAGE, compute, computed, config, greedy, text, tiny
from tests.tiny_models import MAKERS, WINDOW, gemma3, logits_of, model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

RESTORED = sorted(set(MAKERS) - {"jamba"})
STATEFUL = ("gemma3", "mistral", "lfm2", "falcon_h1", "mamba2")
END = 3 * PAGE
TOKENS = text(END + 6)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    for buffer in made.buffers:
        buffer.close()


def pooled(store: FakeStore, model: PreTrainedModel) -> PooledPrefix:
    return PooledPrefix(store, model, "tiny", page_tokens=PAGE)


def split_at(model: PreTrainedModel, end: int) -> DynamicCache:
    """A cache of the first tokens, from one pass that knows no pool."""
    cache = DynamicCache(config=model.config)
    compute(model, TOKENS[:end], cache)
    return cache


def pages_of(store: FakeStore, prefix: PooledPrefix, tokens: list[int]) -> list[bytes]:
    """Keys of the pages that hold all tokens."""
    return list(store.open(prefix.namespace.content, prefix.namespace.layout).chain(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESTORED)
def test_a_restored_cache_gives_the_same_bits(
    store: FakeStore, name: str, dtype: torch.dtype
) -> None:
    model = model_of(name, dtype)
    first = pooled(store, model).prefill(TOKENS)
    assert (first.tokens, first.fetched.tokens, first.kept.trouble) == (END, 0, "")
    assert (first.kept.stored, first.kept.present) == (3, 0)
    restored, fetched = pooled(store, model_of(name, dtype)).fetch(TOKENS)
    assert (fetched.tokens, fetched.trouble) == (END, "")
    original = split_at(model, END)
    want, got = (greedy(model, TOKENS[END:], cache, 4) for cache in (original, restored))
    assert torch.equal(got[1], want[1])
    again = pooled(store, model).prefill(TOKENS)
    assert (again.tokens, again.fetched.tokens, again.kept.stored) == (END, END, 0)


@pytest.mark.parametrize("name", ["deepseek_v3", "falcon_h1", "gemma3", "mamba2"])
def test_generate_goes_on_from_it(store: FakeStore, name: str) -> None:
    model = model_of(name)
    ids = torch.tensor([TOKENS])
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    for _ in range(2):  # cold, warm
        cache = pooled(store, model).prefill(TOKENS).cache
        assert torch.equal(
            model.generate(ids, cache=cache, max_new_tokens=6, do_sample=False), want
        )


@pytest.mark.parametrize("name", GOING_ON)
def test_models_that_are_said_to_go_on_from_a_state_do(name: str) -> None:
    model = model_of(name)
    alone, split = (logits_of(model, TOKENS, each) for each in ([1] * len(TOKENS), [END, 6]))
    assert torch.allclose(alone, split, atol=1e-3)


def test_a_model_that_does_not_is_refused(store: FakeStore) -> None:
    """Once this transformers computes it right, it can be added to GOING_ON."""
    model = model_of("jamba")
    at_once, split = (logits_of(model, TOKENS, each) for each in ([len(TOKENS)], [PAGE, 38]))
    assert not torch.allclose(at_once, split, atol=0.1)
    with pytest.raises(UnsupportedCache, match=r"jamba: does not go on .* want one of: falcon_h1"):
        pooled(store, model)


def test_latents_are_kept_as_they_are(store: FakeStore) -> None:
    prefix = pooled(store, model_of("deepseek_v3"))
    (group,) = prefix.namespace.content.groups
    assert (group.attention, group.layers, group.kv_heads) == (Attention.LATENT, 2, 1)
    assert (group.key_dim, group.value_dim) == (32 + 8, 0)
    assert prefix.namespace.page_bytes == 2 * PAGE * 40 * 4
    assert prefix.ends(TOKENS) is None


def test_only_layers_with_all_tokens_have_pages(store: FakeStore) -> None:
    (group,) = pooled(store, gemma3().eval()).namespace.content.groups
    assert (group.attention, group.layers) == (Attention.FULL, 2)
    assert pooled(store, model_of("mistral")).namespace.is_opaque


@pytest.mark.parametrize("name", STATEFUL)
def test_a_prefix_ends_only_where_states_were_kept(store: FakeStore, name: str) -> None:
    prefix = pooled(store, model_of(name))
    prefix.prefill(TOKENS, also_at=[PAGE + 3])
    assert prefix.ends(TOKENS) == [PAGE, END]
    branch = [*TOKENS[: 2 * PAGE + 5], *range(3, 40)]
    assert prefix.fetch(branch)[1].tokens == PAGE
    assert prefix.fetch(TOKENS[:END])[1].tokens == PAGE  # one token is left to compute
    assert prefix.fetch(TOKENS[:PAGE])[1].tokens == 0
    model = model_of(name)
    restored, _ = prefix.fetch(branch)
    rest = branch[PAGE:]
    assert torch.equal(compute(model, rest, restored), compute(model, rest, split_at(model, PAGE)))


def test_a_window_is_kept_only_where_the_cache_still_has_it(store: FakeStore) -> None:
    model = gemma3().eval()
    prefix = pooled(store, model)
    kept = prefix.store(TOKENS, split_at(model, END + 6))
    assert kept == Kept(trouble=f"no_state: got a cache of {END + 6} tokens, want one of {END}")
    assert not store.held
    # The window begins at token 0 still, so that the one behind the first page is in it.
    assert prefix.store(TOKENS[:WINDOW], split_at(model, WINDOW - 1)).stored == 1
    assert prefix.ends(TOKENS) == [PAGE]
    # One token more, and that is gone.
    assert prefix.store(TOKENS, split_at(model, WINDOW)).trouble.startswith("no_state")


def test_a_recurrent_state_is_kept_only_at_its_own_end(store: FakeStore) -> None:
    model = model_of("lfm2")
    prefix = pooled(store, model)
    assert prefix.store(TOKENS, split_at(model, PAGE + 1)).trouble.startswith("no_state")
    assert not store.held
    assert prefix.store(TOKENS, split_at(model, 2 * PAGE)).trouble == ""
    assert prefix.fetch(TOKENS)[1].tokens == 2 * PAGE
    assert prefix.store(TOKENS[: PAGE - 1], split_at(model, PAGE - 1)) == Kept()


def test_states_alone_do_not_tell_their_length(store: FakeStore) -> None:
    model = model_of("mamba2")
    prefix = pooled(store, model)
    with pytest.raises(UnsupportedCache, match="want `prefill`"):
        prefix.store(TOKENS[:PAGE], split_at(model, PAGE))
    with pytest.raises(UnsupportedCache, match="want one with pages"):
        prefix.expect(TOKENS)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "mamba2"])
def test_states_are_cut_into_pieces(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(states, "PIECE_BYTES", 1000)
    model = model_of(name)
    pooled(store, model).prefill(TOKENS)
    restored, fetched = pooled(store, model).fetch(TOKENS)
    assert fetched.tokens == END
    rest = TOKENS[END:]
    want = compute(model, rest, split_at(model, END))
    assert torch.equal(compute(model, rest, restored), want)
    (*_, piece) = [key for key in store.objects if len(store.held[key, 0]) == 1000]
    store.lose(piece)
    assert pooled(store, model).fetch(TOKENS)[1].tokens == 0
    pooled(store, model).prefill(TOKENS)
    assert store.puts[piece] == 2
    assert max(store.puts[key] for key in store.objects if key != piece) == 1
    assert pooled(store, model).fetch(TOKENS)[1].tokens == END


def test_no_states_are_kept_behind_pages_that_were_refused(store: FakeStore) -> None:
    prefix = pooled(store, gemma3().eval())
    store.refuse[pages_of(store, prefix, TOKENS)[1]] = RefusedReason.OUT_OF_SPACE
    assert prefix.prefill(TOKENS).kept.trouble == "out_of_space"
    assert not store.objects


def test_a_put_that_is_cut_short_leaves_nothing_to_be_found(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "PIECE_BYTES", 1000)
    store.objects_max = 1
    prefix = pooled(store, model_of("lfm2"))
    assert prefix.prefill(TOKENS).kept.trouble == "out_of_space"
    assert len(store.objects) == 1
    assert prefix.ends(TOKENS) == []


def test_what_is_lost_leaves_the_end_before(store: FakeStore) -> None:
    prefix = pooled(store, gemma3().eval())
    prefix.prefill(TOKENS, also_at=[PAGE])
    store.lose(pages_of(store, prefix, TOKENS)[1])
    assert prefix.fetch(TOKENS)[1].tokens == PAGE
    store.lose(pages_of(store, prefix, TOKENS)[0])
    _, fetched = prefix.fetch(TOKENS)
    assert (fetched.tokens, fetched.trouble) == (0, "evicted meanwhile")


def test_a_state_that_cannot_be_read_leaves_the_end_before(store: FakeStore) -> None:
    prefix = pooled(store, model_of("lfm2"))
    prefix.prefill(TOKENS, also_at=[PAGE])
    store.spoil[store.objects[-1]] = MissReason.CHECKSUM
    assert prefix.ends(TOKENS) == [PAGE, END]
    assert prefix.fetch(TOKENS)[1].tokens == PAGE


def test_states_without_room_are_left_out(store: FakeStore) -> None:
    store.objects_max = 0
    prefix = pooled(store, model_of("lfm2"))
    filled = prefix.prefill(TOKENS)
    assert (filled.tokens, filled.kept.trouble) == (END, "out_of_space")
    assert prefix.fetch(TOKENS)[1].tokens == 0


@pytest.mark.parametrize("call", ["probe", "lookup", "read", "match_prefix", "buffer"])
def test_a_pool_in_trouble_leaves_the_model_to_itself(store: FakeStore, call: str) -> None:
    model = gemma3().eval()
    prefix = pooled(store, model)
    prefix.prefill(TOKENS)
    store.fail[call] = Unavailable("gone")
    cache, fetched = pooled(store, model).fetch(TOKENS)
    assert (fetched.tokens, fetched.trouble) == (0, "unavailable: gone")
    rest = compute(model, TOKENS, cache)
    assert torch.equal(rest, compute(model, TOKENS, DynamicCache(config=model.config)))


def test_trouble_with_a_put_is_told(store: FakeStore) -> None:
    store.fail["put_objects"] = Unavailable("gone")
    filled = pooled(store, model_of("lfm2")).prefill(TOKENS)
    assert (filled.tokens, filled.kept.trouble) == (END, "unavailable: gone")


@pytest.mark.parametrize(
    "other",
    [
        lambda: gemma3(sliding_window=WINDOW + 1),
        lambda: gemma3(rms_norm_eps=1e-5),
        lambda: gemma3(layer_types=["full_attention", "sliding_attention"] * 2),
        lambda: gemma3().to(torch.bfloat16),
    ],
    ids=["window", "norm", "order", "dtype"],
)
def test_whatever_changes_the_kv_never_hits(
    store: FakeStore, other: Callable[[], PreTrainedModel]
) -> None:
    """Also where it changes layers above alone, and no weight."""
    torch.manual_seed(7)
    prefix = PooledPrefix(store, gemma3().eval(), "tiny", revision="1", page_tokens=PAGE)
    prefix.prefill(TOKENS)
    torch.manual_seed(7)
    another = PooledPrefix(store, other().eval(), "tiny", revision="1", page_tokens=PAGE)
    assert another.namespace.id != prefix.namespace.id
    assert another.ends(TOKENS) == []
    assert another.fetch(TOKENS)[1].tokens == 0


def test_states_are_named_by_all_that_they_depend_on() -> None:
    state = StateShape("conv", 0, torch.float32, (1, 8, 4), is_set=True)
    layer = LayerShape(LinearAttentionLayer, None, (state,))
    content = content_of(config(), dtype=torch.float32, tenant="t", model_id="m", revision="r")
    names = [
        states_name(content, [layer], PAGE),
        states_name(content, [layer], PAGE + 1),
        states_name(content, [layer, layer], PAGE),
        states_name(content, [layer._replace(states=())], PAGE),
        states_name(content, [layer._replace(states=(state._replace(shape=(1, 8, 5)),))], PAGE),
        states_name(content, [layer._replace(states=(state._replace(dtype=torch.half),))], PAGE),
        states_name(msgspec.structs.replace(content, revision="s"), [layer], PAGE),
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "cache",
    [
        lambda: StaticCache(config=config(), max_cache_len=64),
        lambda: QuantizedCache("fp8", config=config()),
        lambda: DynamicCache(config=config(), offloading=True),
        lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        lambda: _with_layer(DynamicIndexedLayer()),
        lambda: split_at(gemma3().eval(), PAGE),
    ],
    ids=["static", "quantised", "offloaded", "encoder-decoder", "indexed", "windows"],
)
def test_caches_of_other_kinds_are_refused(
    store: FakeStore, cache: Callable[[], DynamicCache]
) -> None:
    prefix = pooled(store, tiny())
    with pytest.raises(UnsupportedCache, match=r"got an? .*want|is a .*want"):
        prefix.store(text(PAGE), cache())
    assert not store.held


def _with_layer(layer: object) -> DynamicCache:
    cache = computed(tiny(), text(PAGE))
    cache.layers[1] = layer
    return cache


@pytest.mark.parametrize(
    "spoilt",
    [("window", 9), ("dtype", torch.float64), ("state", 0)],
    ids=lambda each: each[0],
)
def test_a_cache_of_another_shape_is_refused(store: FakeStore, spoilt: tuple[str, object]) -> None:
    model = model_of("falcon_h1") if spoilt[0] == "state" else gemma3().eval()
    cache = split_at(model, PAGE)
    layer = cache.layers[0]
    if spoilt[0] == "window":
        layer.sliding_window = spoilt[1]
    elif spoilt[0] == "dtype":
        layer.keys = layer.keys.to(spoilt[1])
    else:
        layer.conv_states[0] = layer.conv_states[0][..., 1:]
    with pytest.raises(UnsupportedCache, match=r"layer 0: got .*, want "):
        pooled(store, model).store(TOKENS[:PAGE], cache)


def test_an_encoder_decoder_is_refused(store: FakeStore) -> None:
    small = T5Config(vocab_size=97, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedCache, match="got an encoder-decoder, want a decoder"):
        pooled(store, T5ForConditionalGeneration(small))


@pytest.mark.parametrize(
    "other",
    [{"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True}],
)
def test_equal_weights_under_other_settings_share_no_pages(other: dict[str, object]) -> None:
    ids = [
        content_id(content_of(
            config(**each), dtype=torch.float32, tenant="default", model_id="tiny", revision="r"
        ))
        for each in ({}, {}, other)
    ]  # fmt: skip
    assert ids[0] == ids[1] != ids[2]
