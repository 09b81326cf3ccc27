"""The KV of one running row, in memory that grows in place.

A plain cache copies all of a row's KV for every token; here a token costs its own bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from transformers import DynamicCache

from kvstore.errors import BadValue

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STEP_TOKENS: Final = 256
"""How much memory grows by: a copy of all in so many tokens."""


class RowKV:
    """Keys and values of all layers, [layers, 2, kv_heads, tokens, head_dim]."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Hold nothing yet."""
        self._config: Final = config
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, 0, config.head_dim)
        self._states = torch.empty(shape, dtype=dtype, device=device)
        self.tokens = 0

    def take_in(self, cache: DynamicCache) -> None:
        """Copy what the cache has beyond our tokens. BadValue: it is not of this model."""
        held, tokens = self.tokens, int(cache.get_seq_length())
        self.reserve(tokens)
        if not tokens:
            return
        layers, _, heads, _, dim = self._states.shape
        want = [(1, heads, tokens, dim)] * layers
        got = [tuple(layer.keys.shape) for layer in cache.layers]
        if got != want or cache.layers[0].keys.dtype != self._states.dtype:
            raise BadValue("cache", got[:1], f"{layers} layers of {want[0]}, {self._states.dtype}")
        for to, layer in zip(self._states, cache.layers, strict=True):
            to[0, :, held:tokens] = layer.keys[0, :, held:]
            to[1, :, held:tokens] = layer.values[0, :, held:]
        self.tokens = tokens

    def reserve(self, tokens: int) -> None:
        """Have memory for so many tokens in all."""
        capacity = self._states.shape[3]
        if tokens <= capacity:
            return
        more = -(-tokens // STEP_TOKENS) * STEP_TOKENS
        grown = self._states.new_empty((*self._states.shape[:3], more, self._states.shape[4]))
        grown[:, :, :, : self.tokens] = self._states[:, :, :, : self.tokens]
        self._states = grown

    def put(self, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token's keys and values of a layer, [2, kv_heads, head_dim], behind the rest.

        Returns those of all tokens: [1, kv_heads, tokens, head_dim] each. Memory was reserved;
        the token counts once `tokens` is raised, after the last layer.
        """
        of_layer = self._states[layer]
        of_layer[:, :, self.tokens] = states
        held = of_layer[:, :, : self.tokens + 1]
        return held[:1], held[1:]

    def cache(self) -> DynamicCache:
        """As transformers has it: the same memory, which is never written again where it counts."""
        cache = DynamicCache(config=self._config)
        if self.tokens:
            for target, layer in zip(
                cache.layers, self._states[..., : self.tokens, :], strict=True
            ):
                target.lazy_initialization(layer[:1], layer[1:])
                target.keys, target.values = layer[:1], layer[1:]
        return cache
