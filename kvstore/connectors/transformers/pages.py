"""Keys and values of all tokens, as pages: between a cache's tensors and the pool's memory.

Owns where each layer's tokens lie in a page. Which layers have pages is said by whoever makes it:
those of full attention and of latents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvstore.client.tensors import dtype_of, layer_pages
from kvstore.connectors.transformers.kinds import set_kv
from kvstore.namespace import Attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import DynamicCache

    from kvstore.client.tensors import LayerPages
    from kvstore.connectors.transformers.kinds import KVShape
    from kvstore.namespace import Namespace


class LayerCache(NamedTuple):
    """Keys and values of one layer, [1, kv_heads, tokens, dim] each."""

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


class PagedLayers:
    """The layers of one namespace's pages, in the order in which pages have them."""

    def __init__(
        self, namespace: Namespace, layers: Sequence[tuple[int, KVShape]], device: torch.device
    ) -> None:
        """`layers` are numbers in the cache, and shapes; those of one shape become neighbours."""
        shapes = list(dict.fromkeys(shape for _, shape in layers))
        self._layers = sorted(layers, key=lambda layer: shapes.index(layer[1]))
        self._namespace = namespace
        self._page_tokens: Final = namespace.layout.page_tokens
        self._device = device

    def allocate(self, pages: int) -> list[LayerCache]:
        """Memory for so many pages."""
        dtype = dtype_of(self._namespace.content.kv_dtype)
        tokens = pages * self._page_tokens
        return [
            LayerCache(
                *(
                    torch.empty((1, shape.kv_heads, tokens, dim), dtype=dtype, device=self._device)
                    for dim in (shape.key_dim, shape.value_dim)
                )
            )
            for _, shape in self._layers
        ]

    def of(self, cache: DynamicCache) -> list[LayerCache]:
        """These layers of a cache that holds something."""
        held = (cache.layers[number] for number, _ in self._layers)
        return [LayerCache(layer.keys, layer.values) for layer in held]

    def fill(self, cache: DynamicCache, layers: list[LayerCache], tokens: int) -> None:
        """Give an empty cache these states, of which the first `tokens` are valid."""
        for (number, _), layer in zip(self._layers, layers, strict=True):
            keys, values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
            set_kv(cache.layers[number], keys, values, tokens)

    def unpack(
        self,
        layers: list[LayerCache],
        first: int,
        count: int,
        memory: memoryview,
        part: int | None = None,
    ) -> None:
        """Copy pages [first, first + count) out of `memory`; those of one part into its layers."""
        for shape, layer, pages in self._beside(layers, memory, part):
            keys, values = _halves(shape, pages)
            self._pages_of(layer.keys, first, count).copy_(keys)
            self._pages_of(layer.values, first, count).copy_(values)

    def pack(
        self,
        layers: list[LayerCache],
        first: int,
        count: int,
        memory: memoryview,
        part: int | None = None,
    ) -> None:
        """As `unpack`, into `memory`."""
        for shape, layer, pages in self._beside(layers, memory, part):
            keys, values = _halves(shape, pages)
            keys.copy_(self._pages_of(layer.keys, first, count))
            values.copy_(self._pages_of(layer.values, first, count))

    def part(self, layers: list[LayerCache], part: int) -> list[LayerCache]:
        """Those of all layers that this part has."""
        return layers[self._range(part)]

    def _range(self, part: int | None) -> slice:
        if part is None:
            return slice(None)
        spec = self._namespace.parts[part]
        before = sum(group.layers for group in self._namespace.content.groups[: spec.group])
        return slice(before + spec.layer_start, before + spec.layer_stop)

    def _beside(
        self, layers: list[LayerCache], memory: memoryview, part: int | None
    ) -> list[tuple[KVShape, LayerCache, LayerPages]]:
        shapes = [shape for _, shape in self._layers[self._range(part)]]
        pages = layer_pages(memory, self._namespace, part)
        return list(zip(shapes, layers, pages, strict=True))

    def _pages_of(self, states: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Pages of a layer's tensor, as a view [pages, kv_heads, page_tokens, dim]."""
        step = self._page_tokens
        tokens = states[0, :, first * step : (first + count) * step]
        heads, _, dim = tokens.shape
        return tokens.view(heads, count, step, dim).transpose(0, 1)


def _halves(shape: KVShape, pages: LayerPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys and values of such a layer are in its pages."""
    if shape.attention is Attention.LATENT:
        latent, rope = torch.split_with_sizes(pages.keys, (shape.key_dim, shape.value_dim), -1)
        return latent, rope
    return pages.keys, pages.values
