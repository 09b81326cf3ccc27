"""A random Llama of a few thousand weights, equal in every process: the demo without a download.

Its answers are noise; everything about its cache is real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workers.generation import LanguageModel

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED: Final = 20
BYTE_VALUES: Final = 256
USER, ASSISTANT, END = BYTE_VALUES, BYTE_VALUES + 1, BYTE_VALUES + 2
VOCABULARY: Final = BYTE_VALUES + 3


class ByteChat:
    """One token a byte, and three for who speaks."""

    end_token: Final = END

    def prompt(self, content: str) -> list[int]:
        """The user's message as bytes."""
        return [USER, *content.encode(), END, ASSISTANT]

    def follow_up(self, content: str) -> list[int]:
        """The end of an answer, then as a prompt."""
        return [END, *self.prompt(content)]

    def text(self, tokens: Sequence[int]) -> str:
        """One character a byte; a dot for those that a terminal could not show."""
        return "".join(chr(t) if 32 <= t < 127 else "·" for t in tokens if t < BYTE_VALUES)


def load() -> LanguageModel:
    """Make the model; no file is read."""
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
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config).eval()
    return LanguageModel("kvharbor/tiny-llama", model, ByteChat())
