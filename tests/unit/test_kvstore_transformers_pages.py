"""Layers of different shapes in one page, and the parts of it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvstore.client.tensors import ORDER
from kvstore.connectors.transformers.kinds import KVShape
from kvstore.connectors.transformers.naming import content
from kvstore.connectors.transformers.pages import LayerCache, PagedLayers
from kvstore.namespace import Attention, Layout, Namespace, open_layout
from tests.tiny_model import config

PAGE, PAGES = 4, 3
HEADS = KVShape(Attention.FULL, 2, 8, 6)
LATENT = KVShape(Attention.LATENT, 1, 5, 3)
LAYERS = [(0, HEADS), (1, LATENT), (3, HEADS)]


def namespace(stages: int) -> Namespace:
    whole = content(
        config(num_hidden_layers=4), [shape for _, shape in LAYERS],
        dtype=torch.float32, tenant="t", model_id="m", revision="r",
    )  # fmt: skip
    return open_layout(whole, Layout(PAGE, pipeline_parallel=stages, order=ORDER))


def filled() -> DynamicCache:
    """Layer 2 has nothing that is kept."""
    cache = DynamicCache(config=config(num_hidden_layers=4))
    torch.manual_seed(3)
    for number, shape in LAYERS:
        keys, values = (
            torch.rand(1, shape.kv_heads, PAGE * PAGES + 1, dim)
            for dim in (shape.key_dim, shape.value_dim)
        )
        cache.update(keys, values, number)
    return cache


def same(cache: DynamicCache, layers: list[LayerCache]) -> bool:
    """Whether these are the cache's layers 0, 3 and 1: those of one shape are neighbours."""
    return all(
        torch.equal(mine, states[:, :, : PAGE * PAGES])
        for number, layer in zip((0, 3, 1), layers, strict=True)
        for mine, states in zip(
            layer, (cache.layers[number].keys, cache.layers[number].values), strict=True
        )
    )


def test_layers_of_one_shape_are_neighbours() -> None:
    paged = PagedLayers(namespace(1), LAYERS, torch.device("cpu"))
    cache, brought = filled(), paged.allocate(PAGES)
    memory = memoryview(bytearray(PAGES * namespace(1).page_bytes))
    paged.pack(paged.of(cache), 0, PAGES, memory)
    paged.unpack(brought, 0, PAGES, memory)
    assert same(cache, brought)
    restored = DynamicCache(config=config(num_hidden_layers=4))
    paged.fill(restored, brought, PAGE * PAGES)
    assert same(restored, brought)
    assert restored.layers[2].keys is None


@pytest.mark.parametrize("first", [0, 1])
def test_each_part_has_its_own_layers(first: int) -> None:
    parts = namespace(1).parts
    assert [(part.group, part.layer_stop) for part in parts] == [(0, 2), (1, 1)]
    paged = PagedLayers(namespace(1), LAYERS, torch.device("cpu"))
    cache, brought = filled(), paged.allocate(PAGES)
    for part in parts:
        for start, count in ((0, first), (first, PAGES - first)):
            if count:
                memory = memoryview(bytearray(count * part.size_bytes))
                paged.pack(
                    paged.part(paged.of(cache), part.index), start, count, memory, part.index
                )
                paged.unpack(paged.part(brought, part.index), start, count, memory, part.index)
    assert same(cache, brought)
