"""Random models of a few layers, one of each kind of attention, in folders as engines read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

SEED: Final = 11
COMMON: Final = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
GROUPED: Final = {"num_key_value_heads": 2, "head_dim": 32}
WINDOW: Final = 64


def _config(kind: str) -> transformers.PretrainedConfig:
    if kind == "grouped":
        return transformers.LlamaConfig(**COMMON, **GROUPED)
    if kind == "experts":
        experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        return transformers.Qwen3MoeConfig(**COMMON, **GROUPED, **experts)
    if kind == "windows":
        return transformers.Gemma3TextConfig(
            **{**COMMON, **GROUPED, "num_hidden_layers": 4},
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    assert kind == "latent", kind
    return transformers.DeepseekV2Config(
        **COMMON,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        first_k_dense_replace=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )


def make_model(kind: str, folder: Path) -> Path:
    """Write the model there: grouped, experts, windows or latent; the folder."""
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(_config(kind))
    model.float().eval().save_pretrained(folder, safe_serialization=True)
    return folder


def text(length: int, seed: int = 0) -> list[int]:
    """So many tokens of their vocabulary; another seed gives another text from the first on."""
    return [3 + (i * 7 + seed * 131 + (i * seed) % 17) % 500 for i in range(length)]
