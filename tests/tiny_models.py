"""Random models of a few thousand weights, one of each kind of cache. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.tiny_model import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel

WINDOW: Final = 24
"""More than a page of tests, and no whole number of them."""

_TOKENS: Final = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BASE: Final = _TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_MOE: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_DELTA: Final = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


def _alternating(kind: str) -> dict[str, object]:
    return {"layer_types": [kind, "full_attention"] * 2}


def _deepseek() -> PreTrainedModel:
    fields: dict[str, object] = {
        "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "num_key_value_heads": 4, "num_hidden_layers": 2,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**(_BASE | fields)))


def _qwen3_next() -> PreTrainedModel:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
    fields = _BASE | _MOE | _DELTA | heads | _alternating("linear_attention")
    return Qwen3NextForCausalLM(Qwen3NextConfig(**fields, shared_expert_intermediate_size=32))


def _mamba2() -> PreTrainedModel:
    fields = _TOKENS | {"hidden_size": 64, "num_hidden_layers": 2}
    sizes = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
    return Mamba2ForCausalLM(Mamba2Config(**(fields | sizes)))


def _granite() -> PreTrainedModel:
    fields = _BASE | _MAMBA | _alternating("linear_attention")
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**fields, num_local_experts=0, shared_intermediate_size=32)
    )


def _olmo() -> PreTrainedModel:
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    return OlmoHybridForCausalLM(
        OlmoHybridConfig(**(_BASE | _DELTA | heads | _alternating("linear_attention")))
    )


def _jamba() -> PreTrainedModel:
    fields = {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    }  # fmt: skip
    return JambaForCausalLM(JambaConfig(**(_BASE | fields)))


def gemma3(**changes: object) -> PreTrainedModel:
    """Windows beside full attention."""
    fields: dict[str, object] = {"head_dim": 16, "sliding_window": WINDOW}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**(_BASE | fields | _alternating("sliding_attention") | changes))
    )


def _gemma4() -> PreTrainedModel:
    """Windows and full attention of different shapes, and layers that use others' keys."""
    fields: dict[str, object] = {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": WINDOW, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }  # fmt: skip
    return Gemma4ForCausalLM(Gemma4TextConfig(**(_BASE | fields)))


MAKERS: Final[Mapping[str, Callable[[], PreTrainedModel]]] = {
    "gemma3": gemma3,
    "gemma4": _gemma4,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_BASE, sliding_window=WINDOW)),
    "deepseek_v3": _deepseek,
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_BASE, **_MOE, head_dim=16)),
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(**_BASE, **(_MAMBA | {"mamba_n_heads": 4}), mamba_d_ssm=64)
    ),
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**_BASE, **_alternating("conv"))),
    "lfm2_moe": lambda: Lfm2MoeForCausalLM(
        Lfm2MoeConfig(**_BASE, **_MOE, **_alternating("conv"), num_dense_layers=1)
    ),
    "mamba2": _mamba2,
    "olmo_hybrid": _olmo,
    "qwen3_next": _qwen3_next,
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of that kind: equal weights for equal arguments."""
    torch.manual_seed(7)
    return MAKERS[name]().to(dtype).eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits of all tokens, computed in pieces of these sizes."""
    cache = DynamicCache(config=model.config)
    done, logits = 0, []
    for size in pieces:
        ids = torch.tensor([tokens[done : done + size]])
        logits.append(model(input_ids=ids, cache=cache).logits)
        done += size
    assert done == len(tokens)
    return torch.cat(logits, dim=1)
