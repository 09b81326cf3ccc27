"""Forward passes of any causal model of transformers, a row at a time.

Whatever its cache is made of, a model runs here; `batching.py` is for those that can do better.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Final

import torch
from transformers import DynamicCache

from workers.generation import logits_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


class OneByOne:
    """A `Forward` whose rows are plain caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Hold no row yet."""
        self._model: Final = model

    def hold(self, cache: DynamicCache | None) -> DynamicCache:
        """The cache itself, or an empty one."""
        return DynamicCache(config=self._model.config) if cache is None else cache

    def held_tokens(self, kv: DynamicCache) -> int:
        """What the cache says."""
        return int(kv.get_seq_length())

    def extend(self, kv: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        """One forward pass."""
        return logits_after(self._model, kv, tokens)

    def decode(self, rows: Sequence[DynamicCache], tokens: Sequence[int]) -> torch.Tensor:
        """A forward pass for each row."""
        each = zip(rows, tokens, strict=True)
        return torch.stack([logits_after(self._model, kv, [token]) for kv, token in each])

    def cache(self, kv: DynamicCache) -> DynamicCache:
        """The same tensors: layers put others in their place, and never change one."""
        seen = copy(kv)
        seen.layers = [copy(layer) for layer in kv.layers]
        return seen
