"""A random Llama of a few thousand weights, and how tests compute with it. Not a test."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

# For so small a model, more threads only wait for one another.
torch.set_num_threads(1)

PAGE = 16
VOCABULARY = 97


def config(**changes: object) -> LlamaConfig:
    """The tiny model's configuration, with some fields changed."""
    fields: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(fields | changes))


def tiny(dtype: torch.dtype = torch.float32, seed: int = 7, **changes: object) -> LlamaForCausalLM:
    """The model: equal weights for equal arguments."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**changes)).to(dtype).eval()


def text(length: int) -> list[int]:
    """So many tokens of the model's vocabulary."""
    return [3 + (i * 7) % (VOCABULARY - 3) for i in range(length)]


@torch.no_grad()
def compute(model: LlamaForCausalLM, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """Logits of all `tokens`, appended to the cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), cache=cache).logits
    return logits


def computed(model: LlamaForCausalLM, tokens: list[int]) -> DynamicCache:
    """A cache of these tokens, from one forward pass."""
    cache = DynamicCache(config=model.config)
    if tokens:
        compute(model, tokens, cache)
    return cache


def same(one: DynamicCache, other: DynamicCache) -> bool:
    """Whether both hold the same bits."""
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def greedy(
    model: LlamaForCausalLM, rest: list[int], cache: DynamicCache, steps: int
) -> tuple[list[int], torch.Tensor]:
    """Generated tokens and the logits behind each; the last token's KV is not computed."""
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    for _ in range(steps):
        logits.append(compute(model, rest, cache)[0, -1])
        tokens.append(int(logits[-1].argmax()))
        rest = tokens[-1:]
    return tokens, torch.stack(logits)
