"""Models whose dimensions are known here, as their published configurations give them."""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.errors import BadValue
from kvstore.namespace import Attention, CacheGroup


class Model(msgspec.Struct, frozen=True):
    """What a plan needs to know of a model."""

    groups: tuple[CacheGroup, ...]
    parameters: float
    """How many; 0: unknown."""


def _full(layers: int, kv_heads: int, dim: int) -> CacheGroup:
    return CacheGroup(Attention.FULL, layers, kv_heads, dim, dim)


MODELS: Final = {
    "smollm2-135m": Model((_full(30, 3, 64),), 135e6),
    "llama-2-7b": Model((_full(32, 32, 128),), 7e9),
    "llama-3.1-8b": Model((_full(32, 8, 128),), 8e9),
    "llama-3.1-70b": Model((_full(80, 8, 128),), 70e9),
    "qwen2-7b": Model((_full(28, 4, 128),), 7.6e9),
    "mistral-7b-v0.1": Model(
        (CacheGroup(Attention.SLIDING, 32, 8, 128, 128, window_tokens=4096),), 7.2e9
    ),
    "gemma-2-9b": Model(
        (_full(21, 8, 256), CacheGroup(Attention.SLIDING, 21, 8, 256, 256, window_tokens=4096)),
        9.2e9,
    ),
    "deepseek-v3": Model((CacheGroup(Attention.LATENT, 61, 1, 512 + 64, 0),), 671e9),
}


def model(name: str) -> Model:
    """The model of that name; BadValue for others."""
    if name not in MODELS:
        raise BadValue("model", name, f"one of {', '.join(MODELS)}, or --config")
    return MODELS[name]
