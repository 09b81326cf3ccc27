"""A random Llama of a few thousand weights, equal in every process: the demo without a download.

Its answers are noise; everything about its cache is real. A second seed stands for the next
revision of the same model.
"""

from __future__ import annotations

from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workers.chat_formats import END, USER, VOCABULARY, ByteChat
from workers.generation import LanguageModel

SEED: Final = 20
NEXT_SEED: Final = 21


def load(seed: int = SEED) -> LanguageModel:
    """Make the model with weights of that seed; no file is read."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        initializer_range=0.3,  # far from even odds: the most likely token is never close
        bos_token_id=USER,
        eos_token_id=END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    return LanguageModel("kvharbor/tiny-llama", model, ByteChat())
