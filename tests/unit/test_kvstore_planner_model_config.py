"""Hugging Face configurations: whose KV has which shape, and what is asked for where none says."""

from __future__ import annotations

import pytest
import transformers

from kvstore.errors import BadValue
from kvstore.namespace import Attention, CacheGroup
from kvstore.planner import models
from kvstore.planner.model_config import dtype_of, groups_of

LLAMA: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096,
}  # fmt: skip


def full(layers: int, heads: int, dim: int) -> CacheGroup:
    return CacheGroup(Attention.FULL, layers, heads, dim, dim)


def sliding(layers: int, heads: int, dim: int, window: int) -> CacheGroup:
    return CacheGroup(Attention.SLIDING, layers, heads, dim, dim, window)


@pytest.mark.parametrize(
    ("changed", "groups"),
    [
        ({}, (full(32, 8, 128),)),
        ({"head_dim": 64}, (full(32, 8, 64),)),
        ({"head_dim": None}, (full(32, 8, 128),)),
        ({"num_key_value_heads": None}, (full(32, 32, 128),)),
        ({"sliding_window": None}, (full(32, 8, 128),)),
        ({"sliding_window": 64, "use_sliding_window": False}, (full(32, 8, 128),)),
        ({"model_type": "mistral", "sliding_window": 4096}, (sliding(32, 8, 128, 4096),)),
        (
            {"model_type": "gemma2", "sliding_window": 64},
            (full(16, 8, 128), sliding(16, 8, 128, 64)),
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 64},
            (full(5, 8, 128), sliding(27, 8, 128, 64)),
        ),
        ({"sliding_window_pattern": 4, "sliding_window": 64},
         (full(8, 8, 128), sliding(24, 8, 128, 64))),
        ({"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 64},
         (full(28, 8, 128), sliding(4, 8, 128, 64))),
        ({"layer_types": ["full_attention"] * 31 + ["sliding_attention"], "sliding_window": 64},
         (full(31, 8, 128), sliding(1, 8, 128, 64))),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 64}, (full(32, 8, 128),)),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64},
         (CacheGroup(Attention.LATENT, 32, 1, 576, 0),)),
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 32}, (full(32, 1, 128),)),
        ({"multi_query": True, "new_decoder_architecture": True}, (full(32, 8, 128),)),
    ],
)  # fmt: skip
def test_the_layers_have_this_shape(
    changed: dict[str, object], groups: tuple[CacheGroup, ...]
) -> None:
    assert groups_of(LLAMA | changed) == groups


def test_older_names_of_fields_are_read() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
    assert groups_of(gpt2) == (full(12, 12, 64),)


def test_the_text_model_of_a_larger_one_counts() -> None:
    outer = {"model_type": "llava", "torch_dtype": "float16", "text_config": LLAMA}
    assert groups_of(outer) == (full(32, 8, 128),)
    assert dtype_of(outer) == "float16"
    assert dtype_of({"text_config": LLAMA | {"dtype": "bfloat16"}}) == "bfloat16"
    assert dtype_of(LLAMA) is None


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "deepseek-v3"), ("mistral", "mistral-7b-v0.1")]
)
def test_what_transformers_writes_by_default_is_the_model_that_is_known_here(
    family: str, name: str
) -> None:
    written = transformers.AutoConfig.for_model(family).to_dict()
    assert groups_of(written) == models.model(name).groups


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2", "gpt_oss", "gpt2", "cohere2"])
def test_all_layers_that_transformers_counts_are_counted(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    groups = groups_of(config.to_dict())
    assert sum(group.layers for group in groups) == config.num_hidden_layers


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "8", True, float("nan"), 1 << 41])
def test_a_missing_or_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got .*, want a whole number from 1"):
        groups_of(LLAMA | {field: value})


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_key_value_heads": None, "model_type": "brandnew"}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"hidden_size": 4097}, "hidden_size"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"kv_lora_rank": 0, "qk_rope_head_dim": 64}, "kv_lora_rank"),
        ({"sliding_window": 64}, "layer_types"),
        ({"sliding_window": 0, "model_type": "mistral"}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"linear_attn_config": {}}, "linear_attn_config"),
    ],
)
def test_what_a_file_does_not_settle_is_asked_for(changed: dict[str, object], field: str) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got .*, want ") as raised:
        groups_of(LLAMA | changed)
    assert raised.value.field == field
