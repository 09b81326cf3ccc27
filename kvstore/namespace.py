"""What must be equal for pages to be interchangeable: content, layout, and the ids made of them.

Owns the canonical encoding (tagged, length-prefixed, injective) and the byte arithmetic of parts.
It knows nothing of tokens (kvstore.page) or of places (kvstore.segment).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, LayoutMismatch
from kvstore.ids import NamespaceId
from kvstore.require import require, require_text

CONTENT_TAG: Final = b"kvh1.content"
NAMESPACE_TAG: Final = b"kvh1.namespace"
SCHEMA_VERSION: Final = 1

DTYPE_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

FieldValue = str | int | bytes | Sequence["FieldValue"]


def encode_fields(tag: bytes, fields: list[tuple[str, FieldValue]]) -> bytes:
    """Injective bytes of named fields: tag, then name, kind and length before each value.

    Two different (tag, fields) never give the same bytes, because every variable-length item is
    preceded by its length and every value by its kind.
    """
    out = [_sized(tag), struct.pack("<I", len(fields))]
    for name, value in fields:
        out += [_sized(name.encode()), _encode_value(value)]
    return b"".join(out)


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _encode_value(value: FieldValue) -> bytes:
    if isinstance(value, str):
        return b"s" + _sized(value.encode())
    if isinstance(value, int):
        return b"i" + struct.pack("<q", value)
    if isinstance(value, bytes):
        return b"b" + _sized(value)
    return b"l" + struct.pack("<I", len(value)) + b"".join(_encode_value(v) for v in value)


class Attention(StrEnum):
    """How a cache group attends; decides how heads are split over tensor-parallel ranks."""

    FULL = "full"
    """MHA, GQA or MQA: K and V per head; heads are divided among ranks."""
    SLIDING = "sliding"
    """As FULL, over a window; a cache group of its own."""
    LATENT = "latent"
    """MLA: one latent vector per token, equal on all ranks; one writer, one copy."""
    OPAQUE = "opaque"
    """Objects without structure: any size, no prefix."""


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share one shape of KV.

    Bytes per token and layer = kv_heads * (key_dim + value_dim) * bytes of the dtype. For MLA
    kv_heads is 1, key_dim is latent + rope dimensions and value_dim is 0.
    """

    attention: Attention
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int = 0


OPAQUE_GROUP: Final = CacheGroup(Attention.OPAQUE, 0, 0, 0, 0)
WINDOW_TOKENS_MAX: Final = 1 << 40
NAMED_ORDER: Final = "named"
"""Order of the parts of objects whose names are kept: the object, then its name."""
NAME_PART: Final = 1
NAME_PART_BYTES: Final = 1024
"""See kvstore.page.packed_name; an extent of it takes 4 KiB."""
TAILS: Final = "tickets"
"""Name of the namespace of tails: nothing is matched there, and nobody else stores anything."""


class Content(msgspec.Struct, frozen=True, array_like=True):
    """Everything that changes the meaning of KV bytes, whoever holds them."""

    tenant: str
    model: str
    revision: str
    adapter: str
    kv_dtype: str
    groups: tuple[CacheGroup, ...]
    position: str
    """Rope and position configuration, as canonical text."""
    salt: str = ""
    schema_version: int = SCHEMA_VERSION


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How the content's bytes are cut into pages and parts."""

    page_tokens: int = limits.PAGE_TOKENS
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    order: str = "layer,kv,head,token,dim"
    engine: str = ""
    """Layout id of the engine whose kernels own the interior order; empty for our own."""


class PartSpec(msgspec.Struct, frozen=True, array_like=True):
    """The piece of a page that one rank owns; ranges are half-open, sizes in bytes."""

    index: int
    group: int
    pipeline_rank: int
    tensor_rank: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    size_bytes: int


class Namespace(msgspec.Struct, frozen=True, dict=True):
    """A content in a layout; equal ids mean interchangeable pages. See `open_layout`."""

    content: Content
    layout: Layout
    parts: tuple[PartSpec, ...]

    @cached_property
    def content_id(self) -> bytes:
        """32 bytes: SHA-256 of the canonical content."""
        return content_id(self.content)

    @cached_property
    def id(self) -> NamespaceId:
        """32 bytes: SHA-256 of content id and layout."""
        return namespace_id(self.content, self.layout)

    @cached_property
    def is_opaque(self) -> bool:
        """Whether pages are named objects of any size, without prefix."""
        return is_opaque(self.content)

    @cached_property
    def keeps_names(self) -> bool:
        """Whether each named object has its name beside it, as a part of its own."""
        return self.is_opaque and self.layout.order == NAMED_ORDER

    @cached_property
    def parts_a_page(self) -> int:
        """Parts that must be there for a page to be readable."""
        return len(self.parts) or (2 if self.keeps_names else 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one whole page, all parts; 0 for an opaque namespace."""
        return sum(part.size_bytes for part in self.parts)


def is_opaque(content: Content) -> bool:
    """Whether `content` holds named objects instead of token pages."""
    return len(content.groups) == 1 and content.groups[0].attention is Attention.OPAQUE


def content_id(content: Content) -> bytes:
    """SHA-256 of the canonical encoding of `content`."""
    groups: list[FieldValue] = [
        [g.attention.value, g.layers, g.kv_heads, g.key_dim, g.value_dim, g.window_tokens]
        for g in content.groups
    ]
    fields: list[tuple[str, FieldValue]] = [
        ("tenant", content.tenant),
        ("model", content.model),
        ("revision", content.revision),
        ("adapter", content.adapter),
        ("kv_dtype", content.kv_dtype),
        ("groups", groups),
        ("position", content.position),
        ("salt", content.salt),
        ("schema_version", content.schema_version),
    ]
    return hashlib.sha256(encode_fields(CONTENT_TAG, fields)).digest()


def namespace_id(content: Content, layout: Layout) -> NamespaceId:
    """SHA-256 of the content id and the layout."""
    fields: list[tuple[str, FieldValue]] = [
        ("content_id", content_id(content)),
        ("page_tokens", layout.page_tokens),
        ("tensor_parallel", layout.tensor_parallel),
        ("pipeline_parallel", layout.pipeline_parallel),
        ("order", layout.order),
        ("engine", layout.engine),
    ]
    return NamespaceId(hashlib.sha256(encode_fields(NAMESPACE_TAG, fields)).digest())


def open_layout(content: Content, layout: Layout) -> Namespace:
    """Check every field and derive the parts. Raises BadValue naming the field."""
    require("content", content, Content, "a Content")
    require("layout", layout, Layout, "a Layout")
    _check_content(content)
    _check_layout(content, layout)
    parts = () if is_opaque(content) else _parts(content, layout)
    return Namespace(content, layout, parts)


def opaque(tenant: str, name: str, salt: str = "", *, keeps_names: bool = False) -> Namespace:
    """A namespace of named objects of any size (Mooncake- and LMCache-style)."""
    require_text("name", name)
    content = Content(tenant, name, "", "", "opaque", (OPAQUE_GROUP,), "", salt)
    order = NAMED_ORDER if keeps_names else "opaque"
    return open_layout(content, Layout(page_tokens=1, order=order))


def tails(tenant: str) -> Namespace:
    """Where a tenant's tickets have the KV of the tokens behind the last full page."""
    return opaque(tenant, TAILS)


def check_part_sizes(namespace: Namespace, parts: list[int], sizes: list[int]) -> None:
    """Refuse sizes that differ from the layout's arithmetic; both numbers are in the error."""
    if len(parts) != len(sizes):
        raise BadValue("part_bytes", len(sizes), f"one size for each of {len(parts)} parts")
    for part, size in zip(parts, sizes, strict=True):
        if namespace.is_opaque:
            _check_object_size(namespace, part, size)
            continue
        if not 0 <= part < len(namespace.parts):
            raise BadValue("part", part, f"0 to {len(namespace.parts) - 1}")
        want = namespace.parts[part].size_bytes
        if size != want:
            raise LayoutMismatch(f"part {part}: got {size} bytes, layout gives {want} bytes")


def _check_object_size(namespace: Namespace, part: int, size: int) -> None:
    if namespace.keeps_names and part == NAME_PART:
        if size != NAME_PART_BYTES:
            raise LayoutMismatch(f"a name: got {size} bytes, want {NAME_PART_BYTES} bytes")
    elif not 0 < size <= limits.CHUNK_BYTES:
        raise BadValue("part_bytes", size, f"1 to {limits.CHUNK_BYTES} bytes")


def _check_content(content: Content) -> None:
    for field in ("tenant", "model", "revision", "adapter", "kv_dtype", "position", "salt"):
        bytes_max = limits.NAME_BYTES_MAX * (8 if field == "position" else 1)
        require_text(f"content.{field}", getattr(content, field), bytes_max)
    if not content.tenant:
        raise BadValue("content.tenant", content.tenant, "a non-empty name")
    if not content.model:
        raise BadValue("content.model", content.model, "a non-empty name")
    _require_ints("content", content, ("schema_version",))
    if content.schema_version != SCHEMA_VERSION:
        raise BadValue("content.schema_version", content.schema_version, str(SCHEMA_VERSION))
    require("content.groups", content.groups, tuple, "a tuple of CacheGroup")
    for i, group in enumerate(content.groups):
        _check_types(f"content.groups[{i}]", group)
    if not 0 < len(content.groups) <= limits.PARTS_MAX:
        raise BadValue("content.groups", len(content.groups), f"1 to {limits.PARTS_MAX} groups")
    if is_opaque(content):
        if content.groups[0] != OPAQUE_GROUP:
            raise BadValue("content.groups[0]", content.groups[0], "no sizes in an opaque group")
        return
    if content.kv_dtype not in DTYPE_BYTES:
        raise BadValue("content.kv_dtype", content.kv_dtype, f"one of {sorted(DTYPE_BYTES)}")
    for i, group in enumerate(content.groups):
        _check_group(f"content.groups[{i}]", group)


def _check_types(where: str, group: CacheGroup) -> None:
    require(where, group, CacheGroup, "a CacheGroup")
    require(f"{where}.attention", group.attention, Attention, "an Attention")
    _require_ints(where, group, ("layers", "kv_heads", "key_dim", "value_dim", "window_tokens"))


def _require_ints(where: str, holder: object, fields: Sequence[str]) -> None:
    for field in fields:
        require(f"{where}.{field}", getattr(holder, field), int, "a whole number")


def _check_group(where: str, group: CacheGroup) -> None:
    if group.attention is Attention.OPAQUE:
        raise BadValue(f"{where}.attention", group.attention.value, "no opaque among others")
    for field, least in (("layers", 1), ("kv_heads", 1), ("key_dim", 1), ("value_dim", 0)):
        value = getattr(group, field)
        if not least <= value <= 1 << 20:
            raise BadValue(f"{where}.{field}", value, f"{least} to {1 << 20}")
    if group.attention is Attention.LATENT and (group.kv_heads, group.value_dim) != (1, 0):
        raise BadValue(where, (group.kv_heads, group.value_dim), "kv_heads 1 and value_dim 0")
    widest = WINDOW_TOKENS_MAX if group.attention is Attention.SLIDING else 0
    if not min(widest, 1) <= group.window_tokens <= widest:
        raise BadValue(f"{where}.window_tokens", group.window_tokens, "> 0 iff sliding")


def _check_layout(content: Content, layout: Layout) -> None:
    _require_ints("layout", layout, ("page_tokens", "tensor_parallel", "pipeline_parallel"))
    if not 1 <= layout.page_tokens <= limits.TOKENS_PER_PAGE_MAX:
        raise BadValue(
            "layout.page_tokens", layout.page_tokens, f"1 to {limits.TOKENS_PER_PAGE_MAX}"
        )
    for field in ("order", "engine"):
        require_text(f"layout.{field}", getattr(layout, field))
    for field in ("tensor_parallel", "pipeline_parallel"):
        value = getattr(layout, field)
        if not 1 <= value <= limits.PARTS_MAX:
            raise BadValue(f"layout.{field}", value, f"1 to {limits.PARTS_MAX}")
    for i, group in enumerate(content.groups):
        if is_opaque(content):
            continue
        ranks, heads = layout.tensor_parallel, group.kv_heads
        splits = group.attention is not Attention.LATENT
        if splits and heads % ranks and ranks % heads:
            raise BadValue("layout.tensor_parallel", ranks, f"a divisor or multiple of {heads}")
        if layout.pipeline_parallel > group.layers:
            raise BadValue(
                "layout.pipeline_parallel", layout.pipeline_parallel, f"<= layers of group {i}"
            )


def _parts(content: Content, layout: Layout) -> tuple[PartSpec, ...]:
    """Parts in order of group, pipeline rank, tensor rank, layer range."""
    parts: list[PartSpec] = []
    dtype_bytes = DTYPE_BYTES[content.kv_dtype]
    for g, group in enumerate(content.groups):
        # Heads that several ranks share (tp > kv_heads) and the MLA latent are stored once.
        ranks = 1 if group.attention is Attention.LATENT else layout.tensor_parallel
        ranks = min(ranks, group.kv_heads)
        heads = group.kv_heads // ranks
        layer_bytes = layout.page_tokens * heads * (group.key_dim + group.value_dim) * dtype_bytes
        if layer_bytes > limits.CHUNK_BYTES:
            raise BadValue(
                "layout.page_tokens", layout.page_tokens, "one layer of a part <= one chunk"
            )
        for stage in range(layout.pipeline_parallel):
            for rank in range(ranks):
                for start, stop in _layer_ranges(group.layers, stage, layout, layer_bytes):
                    if len(parts) == limits.PARTS_MAX:
                        raise BadValue("layout", layout, f"at most {limits.PARTS_MAX} parts a page")
                    parts.append(
                        PartSpec(
                            len(parts), g, stage, rank, start, stop,
                            rank * heads, (rank + 1) * heads, layer_bytes * (stop - start),
                        )
                    )  # fmt: skip
    return tuple(parts)


def _layer_ranges(
    layers: int, stage: int, layout: Layout, layer_bytes: int
) -> list[tuple[int, int]]:
    """This stage's layers, cut so that each range fits one chunk."""
    stages = layout.pipeline_parallel
    first, last = layers * stage // stages, layers * (stage + 1) // stages
    step = max(1, limits.CHUNK_BYTES // layer_bytes)
    return [(i, min(i + step, last)) for i in range(first, last, step)]
