"""The KV of the tokens behind the last full page, as one private object, and back into a cache.

Owns its form: for each layer keys, then values, each [kv_heads, tokens, head_dim], as a page would
have them. Sizes follow from the namespace by arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.client.tensors import dtype_of
from kvstore.errors import LayoutMismatch

if TYPE_CHECKING:
    from transformers import DynamicCache

    from kvstore.namespace import Namespace


def tail_bytes(namespace: Namespace, tokens: int) -> int:
    """Bytes of a tail of so many tokens."""
    return namespace.page_bytes // namespace.layout.page_tokens * tokens


def pack_tail(cache: DynamicCache, start: int, end: int) -> bytes:
    """The KV of tokens [start, end) of a cache of one row."""
    states = [
        each[0, :, start:end].contiguous().reshape(-1).view(torch.uint8)
        for layer in cache.layers
        for each in (layer.keys, layer.values)
    ]
    return torch.cat(states).cpu().numpy().tobytes()


def append_tail(cache: DynamicCache, packed: bytearray, namespace: Namespace, tokens: int) -> None:
    """Add a tail of so many tokens to what the cache holds.

    Raises LayoutMismatch when its size is not that of so many tokens of this namespace.
    """
    if len(packed) != tail_bytes(namespace, tokens):
        want = tail_bytes(namespace, tokens)
        raise LayoutMismatch(f"tail of {tokens} tokens: got {len(packed)} bytes, want {want}")
    group = namespace.content.groups[0]
    flat = torch.frombuffer(packed, dtype=dtype_of(namespace.content.kv_dtype))
    states = flat.view(group.layers, 2, 1, group.kv_heads, tokens, group.key_dim)
    for number, (keys, values) in enumerate(states):
        cache.update(keys, values, number)
