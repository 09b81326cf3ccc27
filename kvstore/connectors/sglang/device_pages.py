"""Pages in the memory of SGLang's device: a row has, layer by layer, the tokens of each buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvstore.errors import BadValue, LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.sglang.foreign import Sglang
    from kvstore.connectors.sglang.rows import Pieces


HEADS: Final = "MHATokenToKVPool"
LATENTS: Final = "MLATokenToKVPool"
"""Caches that are served, by exact name: those made of them have more beside keys and values
(scales, an indexer), without which KV is another's."""
BY_TOKEN: Final = "nhd"
"""The layout in which a buffer's rows are tokens; in SGLang's others they are pages."""


def buffers_of(cache: Sglang) -> list[list[torch.Tensor]]:
    """For each layer its buffers, [tokens, ...]; BadValue for a cache of another kind."""
    kind = type(cache).__name__
    if kind == HEADS and cache.kv_cache_layout != BY_TOKEN:
        raise BadValue("kv_cache_layout", cache.kv_cache_layout, f"{BY_TOKEN}, token after token")
    if kind == HEADS and cache.k_scale_buffer is None:
        return [list(pair) for pair in zip(cache.k_buffer, cache.v_buffer, strict=True)]
    if kind == LATENTS:
        return [[each] for each in cache.kv_buffer]
    want = f"{HEADS} without scales, or {LATENTS}: else use the storage backend"
    raise BadValue("kv cache", kind, want)


def is_alike_on_ranks(cache: Sglang) -> bool:
    """Whether all ranks have the same bytes."""
    return type(cache).__name__ == LATENTS


class DevicePages:
    """All pages of one rank."""

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], page_tokens: int) -> None:
        """LayoutMismatch where a token's bytes are not in one piece."""
        self._layers = [[_bytes_of(buffer) for buffer in layer] for layer in layers]
        self._page_tokens = page_tokens
        widths = [buffer.shape[1] for layer in self._layers for buffer in layer]
        self.page_bytes = page_tokens * sum(widths)

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self._layers)

    def host_rows(self, pages: int) -> torch.Tensor:
        """Memory of the host for so many rows, [pages, bytes]."""
        return torch.empty((pages, self.page_bytes), dtype=torch.uint8)

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the pages that these tokens are, on the host."""
        rows = self.host_rows(len(indices) // self._page_tokens)
        at = 0
        for layer in self._layers:
            for buffer in layer:
                some = buffer.index_select(0, indices.to(buffer.device))
                width = self._page_tokens * buffer.shape[1]
                rows[:, at : at + width].copy_(some.view(len(rows), width))
                at += width
        return rows

    def scatter(self, layer: int, rows: torch.Tensor, indices: torch.Tensor) -> None:
        """One layer of these rows into the tokens that they shall be."""
        widths = [[self._page_tokens * b.shape[1] for b in each] for each in self._layers]
        at = sum(map(sum, widths[:layer]))
        for buffer, width in zip(self._layers[layer], widths[layer], strict=True):
            tokens = rows[:, at : at + width].reshape(-1, buffer.shape[1])
            buffer.index_copy_(0, indices.to(buffer.device), tokens.to(buffer.device))
            at += width

    def settle(self) -> None:
        """Wait until this thread's copies to the device are over."""
        device = self._layers[0][0].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def pieces_of_rows(rows: torch.Tensor) -> list[Pieces]:
    """The one piece of each row, [rows, bytes]."""
    size = rows.shape[1]
    return [((row.data_ptr(), size),) for row in rows]


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as [tokens, bytes]."""
    if not buffer.is_contiguous():
        raise LayoutMismatch(f"tokens with strides {buffer.stride()} are not one piece each")
    return buffer.view(len(buffer), -1).view(torch.uint8)
