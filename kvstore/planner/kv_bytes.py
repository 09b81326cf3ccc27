"""Bytes of KV of a token and of a request, by layers, heads, attention and number format.

Keys and values of one head are a vector each. A token has, in every layer,

    kv_heads x (key vector + value vector)         MHA, GQA, MQA
    one latent vector, without a value vector      MLA (DeepSeek-V2: c_KV and the rotated key)

and in layers of sliding attention only the last `window_tokens` tokens are kept. So the memory of
full attention is 2 x layers x kv_heads x head_dim x bytes of an element, a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.namespace import DTYPE_BYTES
from kvstore.planner import checks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.namespace import CacheGroup

DTYPE_BITS: Final = {name: 8 * size for name, size in DTYPE_BYTES.items()} | {"int4": 4}
SCALE_BYTES: Final = {"int8": 2, "int4": 4}
"""Beside each vector, where it is not said otherwise: a scale of 16 bits, with int4 also a zero
point. Formats of floating point have one scale for a whole layer, which does not count."""


class KvFormat(msgspec.Struct, frozen=True):
    """How numbers of the KV cache are stored."""

    dtype: str
    bits: int
    """Of an element."""
    scale_bytes: int
    """Beside each vector."""


def kv_format(dtype: str, scale_bytes: int | None = None) -> KvFormat:
    """The format of that name; None: with the usual scales. BadValue for others."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise BadValue("dtype", dtype, f"one of {', '.join(sorted(DTYPE_BITS))}")
    if scale_bytes is None:
        return KvFormat(dtype, bits, SCALE_BYTES.get(dtype, 0))
    return KvFormat(dtype, bits, scale_bytes and checks.count("scale_bytes", scale_bytes))


def vector_bytes(dim: int, form: KvFormat) -> int:
    """Of one key, value or latent vector; 0 where there is none."""
    return (dim * form.bits + 7) // 8 + form.scale_bytes if dim else 0


def layer_bytes(group: CacheGroup, form: KvFormat) -> int:
    """Of one token in one layer of the group."""
    vectors = vector_bytes(group.key_dim, form) + vector_bytes(group.value_dim, form)
    return group.kv_heads * vectors


def token_bytes(groups: Sequence[CacheGroup], form: KvFormat) -> int:
    """Of one token in all layers, while it is in every window."""
    return sum(group.layers * layer_bytes(group, form) for group in groups)


def request_bytes(groups: Sequence[CacheGroup], form: KvFormat, tokens: float) -> int:
    """Of so many tokens of one request: a window bounds what its layers keep."""
    return sum(
        int(group.layers * layer_bytes(group, form) * min(tokens, group.window_tokens or tokens))
        for group in groups
    )


def arithmetic(groups: Sequence[CacheGroup], form: KvFormat) -> str:
    """The sum of `token_bytes`, written out."""
    return " + ".join(_terms(groups, form))


def _terms(groups: Sequence[CacheGroup], form: KvFormat) -> Iterator[str]:
    element = f"{form.bits / 8:g} B"
    for group in groups:
        vectors = "2 × " if group.value_dim else ""
        heads = f"{group.kv_heads} heads × " if group.value_dim else ""
        size = f"({group.key_dim} × {element} + {form.scale_bytes} B)"
        if not form.scale_bytes:
            size = f"{group.key_dim} × {element}"
        window = f" (last {group.window_tokens} tokens)" if group.window_tokens else ""
        yield f"{vectors}{group.layers} layers × {heads}{size}{window}"
