"""What a Hugging Face `config.json` says of a model's KV cache.

Read by fields, under the names that families of models use for them:

    layers     num_hidden_layers, n_layer, num_layers
    heads      num_attention_heads, n_head; kv heads num_key_value_heads, num_kv_heads, multi_query
    head_dim   as it stands, or hidden_size (n_embd) / heads
    MLA        kv_lora_rank + qk_rope_head_dim: one latent vector (DeepSeek-V2, V3)
    windows    layer_types with sliding_window; older files by the rule of their model_type

What a file does not say, and its model_type does not settle, is asked for: a guess would be wrong
by the number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.errors import BadValue
from kvstore.namespace import Attention, CacheGroup
from kvstore.planner import checks

Config = Mapping[str, object]

LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head")
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
HIDDEN: Final = ("hidden_size", "n_embd")
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
KV_HEAD_EACH: Final = frozenset(
    ("bloom", "codegen", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "opt", "phi", "stablelm")
)
"""Families whose heads have keys and values of their own where the file does not tell."""
ALL_SLIDING: Final = frozenset(("mistral", "mixtral", "phi3", "starcoder2"))
"""Families in which a window holds for every layer."""
PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Of these families every so-manieth layer sees all tokens, the others a window."""
OTHER_STATE: Final = (
    "attn_layer_period", "layers_block_type", "linear_attn_config", "mamba_d_state", "ssm_cfg",
    "state_size",
)  # fmt: skip
"""Fields of models that keep a state beside KV, or instead."""


def groups_of(config: Config) -> tuple[CacheGroup, ...]:
    """The layers by the shape of their KV. BadValue names the field that is missing or wrong."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return groups_of(inner)
    _refuse_others(config)
    layers = checks.count(*_named(config, LAYERS))
    if config.get("kv_lora_rank") is not None:
        latent = checks.count("kv_lora_rank", config["kv_lora_rank"])
        rope = checks.count("qk_rope_head_dim", config.get("qk_rope_head_dim"))
        return (CacheGroup(Attention.LATENT, layers, 1, latent + rope, 0),)
    heads = checks.count(*_named(config, HEADS))
    kv_heads, dim = _kv_heads(config, heads), _head_dim(config, heads)
    sliding = _sliding_layers(config, layers)
    groups = []
    if sliding < layers:
        groups.append(CacheGroup(Attention.FULL, layers - sliding, kv_heads, dim, dim))
    if sliding:
        window = checks.count("sliding_window", config.get("sliding_window"))
        groups.append(CacheGroup(Attention.SLIDING, sliding, kv_heads, dim, dim, window))
    return tuple(groups)


def dtype_of(config: Config) -> str | None:
    """The weights' format, which the KV cache has unless an engine is told otherwise."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if isinstance(found := place.get(name), str):
                return found
    return None


def _refuse_others(config: Config) -> None:
    want = "a decoder whose layers keep keys and values, or its dimensions as options"
    if config.get("is_encoder_decoder"):
        raise BadValue("is_encoder_decoder", config["is_encoder_decoder"], want)
    for name in OTHER_STATE:
        if config.get(name) is not None:
            raise BadValue(name, config[name], want)


def _named(config: Config, names: tuple[str, ...]) -> tuple[str, object]:
    """The first of these fields that is there; else the usual one, which is missing."""
    for name in names:
        if config.get(name) is not None:
            return name, config[name]
    return names[0], None


def _kv_heads(config: Config, heads: int) -> int:
    # Falcon: the number of KV heads stands in its files too, but only counts without multi_query.
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    name, found = _named(config, KV_HEADS)
    family = config.get("model_type")
    if found is None and family in KV_HEAD_EACH:
        return heads
    if found is None:
        raise BadValue(name, None, f"it: model_type {family!r} does not say how many heads keep KV")
    kv_heads = checks.count(name, found)
    if heads % kv_heads:
        raise BadValue(name, kv_heads, f"a divisor of {heads}, the number of heads")
    return kv_heads


def _head_dim(config: Config, heads: int) -> int:
    if config.get("head_dim") is not None:
        return checks.count("head_dim", config["head_dim"])
    name, found = _named(config, HIDDEN)
    hidden = checks.count(name, found)
    if hidden % heads:
        raise BadValue(name, hidden, f"a multiple of {heads}, the number of heads, or head_dim")
    return hidden // heads


def _sliding_layers(config: Config, layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise BadValue("layer_types", kinds, f"a list of {layers} kinds, one a layer")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise BadValue("layer_types", kind, f"{FULL} or {SLIDING}")
        return kinds.count(SLIDING)
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    return _by_family(config, layers)


def _by_family(config: Config, layers: int) -> int:
    family = config.get("model_type")
    if family in ALL_SLIDING:
        return layers
    if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
        # Qwen: the layers from this one on have the window.
        return max(0, layers - checks.count("max_window_layers", config["max_window_layers"]))
    every = config.get("sliding_window_pattern", PATTERNS.get(str(family)))
    if every is None:
        want = f"it: there is a sliding_window, and model_type {family!r} does not say of which"
        raise BadValue("layer_types", None, want)
    return layers - layers // checks.count("sliding_window_pattern", every)
