"""Blocks of an engine's memory and pages of the pool: the same bytes, however layers lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import torch

from kvstore.connectors.vllm.blocks import GroupBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS, LAYERS, TOKENS, DIM = 9, 3, 4, 8
BLOCK_BYTES = TOKENS * DIM * 2
PAGE_BYTES = LAYERS * BLOCK_BYTES
SOME = [7, 2, 3]


def whole(layers: int) -> torch.Tensor:
    """Memory for so many layers in one piece, every number another one."""
    count = layers * BLOCKS * TOKENS * DIM
    return torch.arange(count, dtype=torch.int16).view(layers, BLOCKS, TOKENS, DIM)


def blocks_first() -> list[torch.Tensor]:
    """Layers of a block beside each other."""
    return list(whole(LAYERS).view(BLOCKS, LAYERS, TOKENS, DIM).unbind(1))


WAYS: Final[dict[str, Callable[[], list[torch.Tensor]]]] = {
    "one piece": lambda: list(whole(LAYERS)),
    "one piece, blocks first": blocks_first,
    "pieces apart": lambda: [each.clone() for each in whole(LAYERS)],
    "the last layer first": lambda: list(whole(LAYERS))[::-1],
    "unequal distances": lambda: [each for i, each in enumerate(whole(5)) if i in {0, 1, 4}],
}


@pytest.mark.parametrize("way", WAYS)
def test_pages_have_the_bytes_of_their_blocks_layer_by_layer(way: str) -> None:
    layers = WAYS[way]()
    memory = bytearray(len(SOME) * PAGE_BYTES)
    GroupBlocks(layers, BLOCKS, PAGE_BYTES).gather(SOME, memoryview(memory))
    want = b"".join([layer[block].numpy().tobytes() for block in SOME for layer in layers])
    assert memory == want


@pytest.mark.parametrize("way", WAYS)
def test_blocks_get_the_bytes_of_their_pages_and_no_others_do(way: str) -> None:
    layers = WAYS[way]()
    before = [layer.clone() for layer in layers]
    pages = torch.arange(-1, -1 - len(SOME) * PAGE_BYTES // 2, -1, dtype=torch.int16)
    memory = bytearray(pages.numpy().tobytes())
    GroupBlocks(layers, BLOCKS, PAGE_BYTES).scatter(SOME, memoryview(memory))
    came = pages.view(len(SOME), LAYERS, TOKENS, DIM)
    for number, layer in enumerate(layers):
        for block in range(BLOCKS):
            right = came[SOME.index(block), number] if block in SOME else before[number][block]
            assert torch.equal(layer[block], right), (number, block)
