"""Pages of one kind in a host's memory: where their bytes lie, and what their rows are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.connectors.sglang.foreign import HostPool, Sglang
    from kvstore.connectors.sglang.rows import Pieces

KV: Final = "kv"
DTYPES: Final = ("dtype", "conv_dtype", "temporal_dtype")
"""Where pools say what their elements are: those of states have two kinds, which users may set."""
OF_EACH_RANK: Final = "mamba"
"""States of this kind differ among ranks also where the KV does not."""
PER_HEAD: Final = "MHATokenToKVPoolHost"
"""Pools whose class descends from this one have heads, which differ among ranks."""


class HostPages:
    """One kind of pages."""

    def __init__(self, pool: HostPool, name: str, where: str, page_bytes: int) -> None:
        """`where` tells whose share of the page it is."""
        self._pool = pool
        self.page_bytes = page_bytes
        self._prefix = f"{name}/{page_bytes}/{_elements(pool)}/{where}/"

    def names(self, keys: Iterable[str]) -> list[bytes]:
        """Of the rows of these pages."""
        return [f"{self._prefix}{key}".encode() for key in keys]

    def places(self, indices: torch.Tensor, pages: int) -> list[Pieces]:
        """The pieces of each of these pages; BadValue where it is not the memory of so many."""
        if indices.numel() != pages * self._pool.page_size:
            want = f"{pages} pages of {self._pool.page_size}"
            raise BadValue("host_indices", indices.numel(), want)
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        each = len(addresses) // pages
        pieces = tuple(zip(addresses, sizes, strict=True))
        return [pieces[i : i + each] for i in range(0, len(pieces), each)]


def page_bytes_of(pool: HostPool, name: str, *, flat: bool) -> int:
    """Bytes of one page of this kind; BadValue where its memory cannot be named by addresses."""
    if flat:
        page = pool.get_dummy_flat_data_page()
        return page.numel() * page.element_size()
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except (AttributeError, NotImplementedError, ValueError) as error:
        want = "page_first_direct, or another whose pages have addresses"
        raise BadValue(f"layout of {name} pages", f"{pool.layout} ({error})", want) from error
    return sum(sizes)


def share_of(pool: HostPool, name: str, config: Sglang) -> str:
    """Whose share of a page this rank has: ranks that have the same bytes have one row of it."""
    same = config.is_mla_model and name != OF_EACH_RANK and not _has_heads(pool)
    rank = "all" if same else f"{config.tp_rank}of{config.tp_size}"
    return (
        f"tp{rank}/pp{config.pp_rank}of{config.pp_size}"
        f"/cp{config.attn_cp_rank}of{config.attn_cp_size}"
    )


def _elements(pool: HostPool) -> str:
    """Rows of as many bytes are others' where their elements are of another type."""
    return "+".join([str(getattr(pool, name)) for name in DTYPES if hasattr(pool, name)])


def _has_heads(pool: HostPool) -> bool:
    return any(PER_HEAD in kind.__name__ for kind in type(pool).__mro__)


def pieces_of(page: torch.Tensor, page_bytes: int) -> Pieces:
    """The one piece of a flat page, valid while the caller keeps it; BadValue for another size."""
    size = page.numel() * page.element_size()
    if size != page_bytes or not page.is_contiguous() or page.device.type != "cpu":
        shown = f"{size} bytes on {page.device}, strides {tuple(page.stride())}"
        raise BadValue("page", shown, f"{page_bytes} bytes of the host in one piece")
    return ((page.data_ptr(), size),)
