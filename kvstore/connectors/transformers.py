"""Prefix reuse for Hugging Face transformers: a DynamicCache out of the pool, and back into it.

Owns what a transformers model's KV is called (its namespace) and how its cache's tensors map to
pages. Pages, leases and trouble with the pool are kvstore.client.prefix's.

Only full attention has pages: a cache with sliding windows, recurrent states, quantised or
static layers is refused with UnsupportedCache before anything is moved.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore import limits
from kvstore.client.prefix import PageStore, PrefixCache
from kvstore.client.staging import STAGING_BYTES
from kvstore.client.tensors import ORDER, dtype_name, dtype_of, layer_pages
from kvstore.errors import CallerError
from kvstore.namespace import Attention, CacheGroup, Content, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig, PreTrainedModel

    from kvstore.client.locations import Locations
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.prefix import CopyPages, Fetched, Kept
    from kvstore.hints import Hints

POSITION_FIELDS: Final = (
    "alibi",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "position_embedding_type",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
"""Fields of a model's configuration that change its keys without changing its weights."""


class UnsupportedCache(CallerError):
    """This kind of cache, or of model, has no pages: the text names it and what would do."""

    code: ClassVar[str] = "unsupported_cache"


class NamespaceStore(PageStore, Protocol):
    """What the connector needs of a store; `KVStore` is one."""

    @property
    def tenant(self) -> str:
        """Whose pages these are."""
        ...

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        """Make a namespace known."""
        ...


class LayerCache(NamedTuple):
    """Keys and values of one layer, [1, kv_heads, tokens, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Arriving(NamedTuple):
    """KV of a prompt's full pages that comes part by part while the prompt is being computed."""

    layers: list[LayerCache]
    """With room for all of them."""
    pages_max: int
    pages: list[int]
    """Leading pages of which each part has come."""

    @property
    def whole_pages(self) -> int:
        """Leading pages that have come with all their parts."""
        return min(self.pages)


class PooledPrefix:
    """The longest known prefix of a prompt as a cache for `model(..., cache=cache)`, and back.

    Thread-safe as the store is. A restored cache gives bit for bit the logits of the cache that
    was stored, when the rest of the prompt is computed in the same pieces.
    """

    def __init__(  # noqa: PLR0913 -- each is a wish of its own
        self,
        store: NamespaceStore,
        model: PreTrainedModel,
        model_id: str,
        *,
        revision: str | None = None,
        adapter: str = "",
        salt: str = "",
        page_tokens: int = limits.PAGE_TOKENS,
        layer_groups: int = 1,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Open the model's namespace.

        Pages have a part for each of `layer_groups`, as those of so many pipeline stages have, so
        that one can be stored and read before the others.

        `revision` names the weights; left out, it is a digest of them (about a second a
        gigabyte). Models that are equal in all of this share pages, in whatever process they run.
        Raises UnsupportedCache for a model whose cache has no pages.
        """
        self._config = model.config.get_text_config(decoder=True)
        self._device = model.device
        content = content_of(
            self._config,
            dtype=model.dtype,
            tenant=store.tenant,
            model_id=model_id,
            revision=weights_digest(model) if revision is None else revision,
            adapter=adapter,
            salt=salt,
        )
        layout = Layout(page_tokens, pipeline_parallel=layer_groups, order=ORDER)
        opened = store.open(content, layout)
        self.namespace: Final = opened.namespace
        self._prefix = PrefixCache(store, opened, staging_bytes)

    def fetch(
        self,
        tokens: Sequence[int],
        *,
        arrived: Arriving | None = None,
        hints: Hints | None = None,
    ) -> tuple[DynamicCache, Fetched]:
        """A cache that holds the first `Fetched.tokens` of `tokens`, at most all but the last.

        Compute the rest with it. Nothing known, or the pool in trouble: an empty cache. What has
        `arrived` of these tokens is in it, too, and is the cache's from now on. `hints` say what
        the caller knows of the chat's future, its turn for example.
        """
        layers: list[LayerCache] = []
        has = 0
        if arrived is not None:
            layers, has = arrived.layers, arrived.whole_pages
            tokens = tokens[: arrived.pages_max * self.namespace.layout.page_tokens + 1]

        def begin(pages: int) -> CopyPages:
            if arrived is None:
                layers.extend(self._allocate(pages))
            return lambda first, count, memory: self._unpack(layers, first, count, memory)

        fetched = self._prefix.fetch(tokens, begin, first=has, hints=hints)
        cache = DynamicCache(config=self._config)
        if fetched.pages:
            _fill(cache, layers, fetched.tokens)
        return cache, fetched

    def store(
        self, tokens: Sequence[int], cache: DynamicCache, *, hints: Hints | None = None
    ) -> Kept:
        """Keep the full pages of `tokens` whose KV is in `cache`, prompt and generated alike.

        The cache may hold fewer tokens (the last generated one was not computed) or more. Raises
        UnsupportedCache when its layers are not this model's.
        """
        layers = self._checked(cache)
        held = layers[0].keys.shape[2] if layers else 0
        return self._prefix.store(
            tokens[:held],
            lambda first, count, memory: self._pack(layers, first, count, memory),
            hints=hints,
        )

    def expect(self, tokens: Sequence[int]) -> Arriving:
        """Memory for the pages of a prompt that is being computed elsewhere."""
        pages = len(tokens) // self.namespace.layout.page_tokens
        return Arriving(self._allocate(pages), pages, [0] * len(self.namespace.parts))

    def bring_part(self, arriving: Arriving, part: int, located: Locations) -> int:
        """Bring one part of the located pages, which follow those that have come: how many did.

        At most `part_pages` can be located at once.
        """
        first = arriving.pages[part]
        spec = self.namespace.parts[part]
        layers = arriving.layers[spec.layer_start : spec.layer_stop]

        def unpack(count: int, memory: memoryview) -> None:
            self._unpack(layers, first, count, memory, part)

        came = self._prefix.read_part(located, part, unpack)
        arriving.pages[part] += came
        return came

    def part_pages(self, part: int) -> int:
        """Pages of which one part can be moved at once."""
        return self._prefix.part_pages(part)

    def store_part(
        self, tokens: Sequence[int], part: int, first: int, layers: list[LayerCache]
    ) -> None:
        """Keep one part of the full pages of `tokens` from page `first` on, as far as possible.

        `layers` are those of this part alone, with the KV of these pages. `store` keeps what is
        left out, and costs little where nothing is.
        """
        self._prefix.store_part(
            tokens, part, first,
            lambda start, count, memory: self._pack(layers, start - first, count, memory, part),
        )  # fmt: skip

    def end_session(self, tokens: Sequence[int]) -> None:
        """Say that the chat of these tokens is over: the pool may drop its pages before others."""
        self._prefix.end_session(tokens)

    def close(self) -> None:
        """Give staging memory back; the store stays open."""
        self._prefix.close()

    def _allocate(self, pages: int) -> list[LayerCache]:
        group = self.namespace.content.groups[0]
        dtype = dtype_of(self.namespace.content.kv_dtype)
        shape = (1, group.kv_heads, pages * self.namespace.layout.page_tokens, group.key_dim)
        empty = [
            torch.empty(shape, dtype=dtype, device=self._device) for _ in range(2 * group.layers)
        ]
        return [LayerCache(*both) for both in zip(empty[::2], empty[1::2], strict=True)]

    def _unpack(
        self,
        layers: list[LayerCache],
        first: int,
        count: int,
        memory: memoryview,
        part: int | None = None,
    ) -> None:
        for layer, pages in zip(layers, layer_pages(memory, self.namespace, part), strict=True):
            self._pages_of(layer.keys, first, count).copy_(pages.keys)
            self._pages_of(layer.values, first, count).copy_(pages.values)

    def _pack(
        self,
        layers: list[LayerCache],
        first: int,
        count: int,
        memory: memoryview,
        part: int | None = None,
    ) -> None:
        for layer, pages in zip(layers, layer_pages(memory, self.namespace, part), strict=True):
            pages.keys.copy_(self._pages_of(layer.keys, first, count))
            pages.values.copy_(self._pages_of(layer.values, first, count))

    def _pages_of(self, states: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Pages of a layer's tensor, as a view [pages, kv_heads, page_tokens, head_dim]."""
        step = self.namespace.layout.page_tokens
        tokens = states[0, :, first * step : (first + count) * step]
        heads, _, head_dim = tokens.shape
        return tokens.view(heads, count, step, head_dim).transpose(0, 1)

    def _checked(self, cache: DynamicCache) -> list[LayerCache]:
        """The layers of a cache that is this model's; none when it is empty."""
        _check_kind(cache)
        if not cache.get_seq_length():
            return []
        content, group = self.namespace.content, self.namespace.content.groups[0]
        if len(cache.layers) != group.layers:
            raise UnsupportedCache(f"got {len(cache.layers)} layers, want {group.layers}")
        want = (1, group.kv_heads, cache.get_seq_length(), group.key_dim)
        layers = [LayerCache(layer.keys, layer.values) for layer in cache.layers]
        for i, layer in enumerate(layers):
            for states in layer:
                if tuple(states.shape) != want or states.dtype != dtype_of(content.kv_dtype):
                    raise UnsupportedCache(
                        f"layer {i}: got {list(states.shape)} of {states.dtype}, "
                        f"want {list(want)} of {content.kv_dtype}"
                    )
        return layers


def content_of(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    tenant: str,
    model_id: str,
    revision: str,
    adapter: str = "",
    salt: str = "",
) -> Content:
    """What must be equal for two models' caches to be interchangeable, from a configuration.

    `config` is that of the text decoder. Raises UnsupportedCache when its cache has no pages.
    """
    cache = DynamicCache(config=config)
    _check_kind(cache)
    if config.is_encoder_decoder or getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedCache(f"{config.model_type}: only decoders with keys and values per head")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    group = CacheGroup(Attention.FULL, len(cache.layers), kv_heads, head_dim, head_dim)
    return Content(
        tenant, model_id, revision, adapter, dtype_name(dtype), (group,), _position(config), salt
    )


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights, in the order of their names."""
    digest = hashlib.sha256()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(named.items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _position(config: PreTrainedConfig) -> str:
    """The position fields that the configuration has, as canonical text."""
    fields = {name: getattr(config, name, None) for name in POSITION_FIELDS}
    known = {name: value for name, value in fields.items() if value is not None}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    if len(text) <= limits.NAME_BYTES_MAX:
        return text
    # Factors per dimension can fill kilobytes; a digest tells them apart as well.
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _check_kind(cache: DynamicCache) -> None:
    """Refuse every cache whose state is more, or other, than keys and values of all tokens."""
    if type(cache) is not DynamicCache:
        raise UnsupportedCache(f"got a {type(cache).__name__}, want a DynamicCache")
    if cache.offloading:
        raise UnsupportedCache("got an offloaded cache, want one that stays on its device")
    for i, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedCache(f"layer {i} is a {type(layer).__name__}, want a DynamicLayer")


def _fill(cache: DynamicCache, layers: list[LayerCache], tokens: int) -> None:
    """Give an empty cache these states, of which the first `tokens` are valid.

    Set rather than handed to `update`, which would copy all of it once more. Layers never change
    their tensors in place: the next `update` concatenates into new ones.
    """
    for target, layer in zip(cache.layers, layers, strict=True):
        keys, values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
        target.lazy_initialization(keys, values)
        target.keys, target.values = keys, values
