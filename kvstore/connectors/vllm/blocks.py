"""Blocks of a cache group in the engine's memory, and pages in the pool's buffers.

A page holds a block of each of the group's layers, one after another. The interior of a block is
the kernels' business: it is moved as it lies. Few calls: one a layer; or where the layers lie at
equal distances in one piece of host memory, as on CPUs, one for all that is saved, and one a page
that is loaded. (Of 31 MB a plain copy takes 5.4 ms; by layers 8 in and 10 out, so 6 in, 6 out.)
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch

from kvstore.errors import BadValue, LayoutMismatch
from kvstore.transfer.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTHS: Final = ((8, torch.int64), (1, torch.uint8))
"""Elements that blocks are moved as: the widest that fits is copied fastest."""


class GroupBlocks:
    """The blocks of all layers of one group, on one rank."""

    def __init__(self, layers: Sequence[torch.Tensor], blocks: int, page_bytes: int) -> None:
        """Take each layer's cache, [blocks, ...]; LayoutMismatch where a block is not one piece.

        `page_bytes` is what a page of the namespace has: all layers of one block.
        """
        flat = [_rows(layer, blocks) for layer in layers]
        bytes_each = [each.shape[1] * each.element_size() for each in flat]
        if sum(bytes_each) != page_bytes or len(set(bytes_each)) != 1:
            raise LayoutMismatch(f"blocks of {bytes_each} bytes, a page has {page_bytes}")
        width = next(
            dtype for size, dtype in WIDTHS
            if all(_is_aligned(each, size) for each in flat)
        )  # fmt: skip
        self._layers = [each.view(width) for each in flat]
        self._together = _together(self._layers)
        self._device = self._layers[0].device
        self._width = width
        self._columns = bytes_each[0] // width.itemsize
        self.page_bytes = page_bytes

    def gather(self, blocks: Sequence[int], memory: memoryview) -> None:
        """Copy these blocks out, as pages one after another in `memory`."""
        ids = torch.tensor(blocks, device=self._device)
        pages = self._pages(len(blocks), memory)
        if self._together is not None:
            torch.index_select(self._together, 0, ids, out=pages)
            return
        for number, layer in enumerate(self._layers):
            pages[:, number].copy_(layer.index_select(0, ids))

    def scatter(self, blocks: Sequence[int], memory: memoryview) -> None:
        """Copy pages that lie one after another in `memory` into these blocks."""
        pages = self._pages(len(blocks), memory)
        if self._together is not None:
            for block, page in zip(blocks, pages, strict=True):
                self._together[block].copy_(page)
            return
        ids = torch.tensor(blocks, device=self._device)
        for number, layer in enumerate(self._layers):
            layer.index_copy_(0, ids, pages[:, number].to(self._device))

    @property
    def takes_pages(self) -> bool:
        """Whether pages may come one by one, from anywhere in host memory."""
        return self._together is not None

    def scatter_pages(self, blocks: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy each page into its block; `takes_pages` must hold. They may be read-only."""
        assert self._together is not None
        for block, page in zip(blocks, pages, strict=True):
            # torch wants memory that it might write to.
            memory = (ctypes.c_char * page.nbytes).from_address(address_of(page))
            self._together[block].copy_(self._pages(1, memoryview(memory))[0])

    def _pages(self, count: int, memory: memoryview) -> torch.Tensor:
        """`memory` as [pages, layers, elements of a block]."""
        whole = torch.frombuffer(memory[: count * self.page_bytes], dtype=self._width)
        return whole.view(count, len(self._layers), self._columns)


def _rows(layer: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same memory as [blocks, elements of a block], in the order in which they lie."""
    if layer.shape[0] != blocks:
        raise BadValue("kv_cache", list(layer.shape), f"[{blocks} blocks, ...]")
    inner = sorted(zip(layer.stride()[1:], layer.shape[1:], strict=True))
    elements = 1
    for stride, size in inner:
        if size > 1 and stride != elements:
            raise LayoutMismatch(f"a block with strides {layer.stride()} is not one piece")
        elements *= size
    return layer.as_strided((blocks, elements), (layer.stride(0), 1))


def _together(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The layers' memory as [blocks, layers, elements], where it can be seen so."""
    first = layers[0]
    places = [each.storage_offset() for each in layers]
    step = places[1] - places[0] if len(layers) > 1 else first.shape[1]
    pieces = {(each.untyped_storage().data_ptr(), each.stride(0)) for each in layers}
    is_even = all(after - before == step for before, after in pairwise(places))
    if first.device.type != "cpu" or len(pieces) > 1 or not is_even or step <= 0:
        return None
    return first.as_strided((len(first), len(layers), first.shape[1]), (first.stride(0), step, 1))


def _is_aligned(rows: torch.Tensor, size: int) -> bool:
    own = rows.element_size()
    places = (rows.data_ptr(), rows.stride(0) * own, rows.shape[1] * own)
    return (size >= own and not any(place % size for place in places)) or size == 1
