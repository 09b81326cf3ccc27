"""What the tiny model answers by itself, and what of a text the pool has of it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from kvstore.connectors.transformers import PooledPrefix
from workers.engine import Engine, EngineRequest
from workers.one_by_one import OneByOne
from workers.tiny_llama import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore import KVStore

torch.set_num_threads(1)  # others are at work, and threads that spin slow all of them down


def alone(prompt: str, tokens: int, temperature: float = 0, top_p: float = 1, seed: int = 0) -> str:
    """What one process with the model answers."""
    return load().chat.text(list(alone_tokens(prompt, tokens, temperature, top_p, seed)))


@cache
def alone_tokens(
    prompt: str, tokens: int, temperature: float = 0, top_p: float = 1, seed: int = 0
) -> tuple[int, ...]:
    """The same as tokens."""
    language = load()
    encoded = tuple(prompt.encode())
    stop = frozenset({language.chat.end_token})
    engine = Engine(OneByOne(language.model), capacity_tokens=1 << 16)
    engine.add(EngineRequest("alone", encoded, tokens, temperature, top_p, seed, stop))
    made: list[int] = []
    while engine.running:
        made += [one.token for one in engine.step()]
    return tuple(made)


def in_pool(store: KVStore, tokens: Sequence[int]) -> int:
    """How many of these tokens the pool has the KV of."""
    language = load()
    prefix = PooledPrefix(store, language.model, language.model_id)
    return prefix.fetch(tokens)[1].tokens
