"""Random LoRA adapters for the model of `models.py` with grouped heads, as engines read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import save_file

from tests.engines.models import COMMON, GROUPED

if TYPE_CHECKING:
    from pathlib import Path

RANK: Final = 8
SCALE: Final = 0.3


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of the projections of queries and values of all layers; the folder."""
    hidden, head = int(str(COMMON["hidden_size"])), GROUPED["head_dim"]
    heads = {
        "q_proj": int(str(COMMON["num_attention_heads"])),
        "v_proj": GROUPED["num_key_value_heads"],
    }
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(int(str(COMMON["num_hidden_layers"]))):
        for name, count in heads.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = SCALE * torch.randn(RANK, hidden, generator=draw)
            made = SCALE * torch.randn(count * head, RANK, generator=draw)
            weights[f"{where}.lora_B.weight"] = made
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(heads),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
