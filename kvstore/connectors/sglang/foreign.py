"""Values of SGLang's as they are read here: SGLang is not there where types are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

Sglang: TypeAlias = Any
"""Some object of SGLang's; attributes that it lacks are found by the tests with real engines."""


class HostPool(Protocol):
    """Pages of one kind in the host's memory."""

    @property
    def layout(self) -> str:
        """In which order a page has its layers and tokens."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        ...

    @property
    def page_size(self) -> int:
        """Indices that one page has."""
        ...

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of these pages, page by page."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory for one page."""
        ...


class Transfer(Protocol):
    """Pages of one kind that go, or come, together."""

    @property
    def name(self) -> str:
        """Of the kind."""
        ...

    @property
    def keys(self) -> Sequence[str] | None:
        """Digests of the pages."""
        ...

    @property
    def host_indices(self) -> torch.Tensor | None:
        """Where in the host's pool they lie."""
        ...

    @property
    def device_indices(self) -> torch.Tensor | None:
        """Where on the device they lie, or shall."""
        ...

    @property
    def hit_policy(self) -> str:
        """Which of them a prefix needs."""
        ...
