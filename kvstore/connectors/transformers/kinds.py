"""Which kinds of caches there are, and what each layer of a model's cache holds.

Owns the table of layer classes that can be restored and the refusal of all others, and learns the
layers' shapes: of a model with full attention alone from its configuration, of others by computing
a few tokens with it. Knows no pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvstore.errors import CallerError
from kvstore.namespace import Attention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin

PROBE_TOKENS: Final = 16
"""Computed to see shapes: more than any convolution looks back."""
STATES: Final = ("conv", "recurrent")

GOING_ON: Final = (
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "olmo_hybrid",
    "qwen3_next",
)
"""Models with recurrent states that go on from a state by several tokens as if they had computed
all in one pass. Others (jamba, mamba) do not in the present transformers: their logits would
depend on what the pool happened to have."""


BY_LENGTH: Final = frozenset(("dynamic", "longrope"))
"""Rotary embeddings that turn all tokens otherwise once a prompt is long: a token's keys depend on
what came behind it when they were computed."""
BOTH_WAYS: Final = (True, "all")
"""Of `use_bidirectional_attention`: tokens look at those behind them."""


class UnsupportedCache(CallerError):
    """This kind of cache, or of model, cannot be restored: names it and what would do."""

    code: ClassVar[str] = "unsupported_cache"


class Kind(NamedTuple):
    """What a class of cache layers holds."""

    attention: Attention | None
    has_states: bool


KINDS: Final[Mapping[type, Kind]] = {
    DynamicLayer: Kind(Attention.FULL, has_states=False),
    DynamicSlidingWindowLayer: Kind(Attention.SLIDING, has_states=False),
    LinearAttentionLayer: Kind(None, has_states=True),
    LinearAttentionAndFullAttentionLayer: Kind(Attention.FULL, has_states=True),
    LinearAttentionAndSlidingWindowAttentionLayer: Kind(Attention.SLIDING, has_states=True),
    DummyLayer: Kind(None, has_states=False),  # uses another layer's keys, or has no attention
}


class KVShape(NamedTuple):
    """Keys are [1, kv_heads, tokens, key_dim], values [1, kv_heads, tokens, value_dim].

    LATENT: the latent vectors stand for keys, the rope parts for values.
    """

    attention: Attention
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int = 0
    """SLIDING: all but one of so many tokens are held."""


class StateShape(NamedTuple):
    """One state of a layer, which is as large after any number of tokens."""

    name: str
    """One of STATES: the layer's attribute is called so."""
    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Beginning with the batch, 1."""
    is_set: bool
    """The layer's `has_previous_state`."""


class LayerShape(NamedTuple):
    """What one layer of a model's cache holds."""

    kind: type
    kv: KVShape | None
    states: tuple[StateShape, ...] = ()


def check_kind(cache: DynamicCache) -> DynamicCache:
    """The cache, if all of its layers are of kinds that can be restored."""
    if type(cache) is not DynamicCache:  # a subclass may hold more
        raise UnsupportedCache(f"got a {type(cache).__name__}, want a DynamicCache")
    if cache.offloading:
        raise UnsupportedCache("got an offloaded cache, want one that stays on its device")
    for i, layer in enumerate(cache.layers):
        if type(layer) not in KINDS:
            names = ", ".join(kind.__name__ for kind in KINDS)
            raise UnsupportedCache(f"layer {i} is a {type(layer).__name__}, want one of: {names}")
    return cache


def has_full_attention_alone(config: PreTrainedConfig) -> bool:
    """Whether all layers keep keys and values of all tokens, per head."""
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) is DynamicLayer for layer in layers)
    return plain and getattr(config, "kv_lora_rank", None) is None


def shape_of_heads(config: PreTrainedConfig) -> KVShape:
    """Of each layer of a model with full attention alone."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return KVShape(Attention.FULL, kv_heads, head_dim, head_dim)


def layers_of(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What the layers of a model's cache hold. Raises UnsupportedCache naming what cannot be.

    Of a model that has more than full attention this computes a few tokens.
    """
    config = model.config.get_text_config(decoder=True)
    _check_tokens_say_all(model.config, config)
    cache = check_kind(DynamicCache(config=config))
    recurrent = any(KINDS[type(layer)].has_states for layer in cache.layers)
    if recurrent and config.model_type not in GOING_ON:
        raise UnsupportedCache(
            f"{config.model_type}: does not go on from a recurrent state as if it had computed all "
            f"at once; want one of: {', '.join(GOING_ON)}"
        )
    if has_full_attention_alone(config):
        return (LayerShape(DynamicLayer, shape_of_heads(config)),) * len(cache.layers)
    compute(model, [0] * PROBE_TOKENS, cache)
    return tuple(_shape_of(layer, config) for layer in cache.layers)


def _check_tokens_say_all(whole: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Refuse models of which equal first tokens may have different keys: pages go by tokens."""
    if config.is_encoder_decoder:
        raise UnsupportedCache(f"{config.model_type}: got an encoder-decoder, want a decoder")
    if config is not whole:
        raise UnsupportedCache(
            f"{whole.model_type}: got a model whose tokens may stand for images or sounds, want "
            "its text decoder alone"
        )
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given, *(each for each in given.values() if isinstance(each, dict))]
    for kind in BY_LENGTH.intersection(each.get("rope_type", "default") for each in ropes):
        raise UnsupportedCache(
            f"{config.model_type}: got rope of type {kind}, whose keys depend on a prompt's length,"
            " want default, linear, yarn or llama3"
        )
    if getattr(config, "use_bidirectional_attention", None) in BOTH_WAYS:
        raise UnsupportedCache(
            f"{config.model_type}: got attention in both directions, want a causal decoder"
        )


@torch.no_grad()
def compute(model: PreTrainedModel, tokens: Sequence[int], cache: DynamicCache) -> None:
    """Append `tokens` to the cache, in one pass and without logits."""
    ids = torch.tensor([list(tokens)], device=model.device)
    model.base_model(input_ids=ids, cache=cache, use_cache=True)


def check_layers(
    cache: DynamicCache, layers: Sequence[LayerShape], dtype: torch.dtype, held: int
) -> None:
    """Refuse a cache of so many tokens whose layers are not these, or which has several rows."""
    if len(cache.layers) != len(layers):
        raise UnsupportedCache(f"got {len(cache.layers)} layers, want {len(layers)}")
    for i, (layer, want) in enumerate(zip(cache.layers, layers, strict=True)):
        if want.kv is not None:
            _check_kv(f"layer {i}", layer, want.kv, dtype, held)
        states = _states_of(layer)
        if states != want.states:
            raise UnsupportedCache(f"layer {i}: got {list(states)}, want {list(want.states)}")


def check_classes(cache: DynamicCache, layers: Sequence[LayerShape]) -> None:
    """Refuse a cache whose layers are of other kinds, full or empty."""
    for i, (layer, want) in enumerate(zip(cache.layers, layers, strict=False)):
        if type(layer) is not want.kind:
            raise UnsupportedCache(
                f"layer {i} is a {type(layer).__name__}, want a {want.kind.__name__}"
            )


def set_kv(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Give an empty layer what it holds of so many tokens.

    Set rather than handed to `update`, which would copy all of it once more. Layers never change
    these in place: the next `update` concatenates into new ones.
    """
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens


def set_state(layer: CacheLayerMixin, shape: StateShape, state: torch.Tensor) -> None:
    """Give an empty layer one of its recurrent states, as a copy: it writes into its own."""
    layer.lazy_initialization(**{f"{shape.name}_states": state}, state_idx=shape.number)
    getattr(layer, f"{shape.name}_states")[shape.number].copy_(state)
    layer.has_previous_state[shape.number] = shape.is_set


def _check_kv(
    where: str, layer: CacheLayerMixin, want: KVShape, dtype: torch.dtype, held: int
) -> None:
    window = getattr(layer, "sliding_window", 0)
    if window != want.window_tokens:
        raise UnsupportedCache(f"{where}: got a window of {window}, want {want.window_tokens}")
    for states, dim in ((layer.keys, want.key_dim), (layer.values, want.value_dim)):
        tokens = states.shape[2] if window else held
        shape = [1, want.kv_heads, tokens, dim]
        if list(states.shape) != shape or states.dtype != dtype:
            raise UnsupportedCache(
                f"{where}: got {list(states.shape)} of {states.dtype}, want {shape} of {dtype}"
            )


def _shape_of(layer: CacheLayerMixin, config: PreTrainedConfig) -> LayerShape:
    return LayerShape(type(layer), _kv_of(layer, config), _states_of(layer))


def _kv_of(layer: CacheLayerMixin, config: PreTrainedConfig) -> KVShape | None:
    """What a computed layer holds of tokens; a layer that uses another's keys has none."""
    attention = KINDS[type(layer)].attention
    if attention is None or layer.keys is None:
        return None
    heads, key_dim, value_dim = layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]
    if attention is Attention.SLIDING:
        return KVShape(attention, heads, key_dim, value_dim, layer.sliding_window)
    if heads == 1 and key_dim == getattr(config, "kv_lora_rank", None):
        attention = Attention.LATENT
    return KVShape(attention, heads, key_dim, value_dim)


def _states_of(layer: CacheLayerMixin) -> tuple[StateShape, ...]:
    if not KINDS[type(layer)].has_states:
        return ()
    return tuple(
        StateShape(name, number, state.dtype, tuple(state.shape), layer.has_previous_state[number])
        for name in STATES
        for number, state in getattr(layer, f"{name}_states").items()
        if state is not None
    )
