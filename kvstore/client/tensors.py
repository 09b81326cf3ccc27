"""Pages in a buffer seen as torch tensors, and tensors as blocks of a device: nothing is copied.

The only file of the client that imports torch; nothing in the client imports it. Owns the
interior order of a page, "layer,kv,head,token,dim": for each layer first its keys, then its
values, each as [kv_heads, page_tokens, dim].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvstore.errors import BadValue, LayoutMismatch
from kvstore.namespace import Attention
from kvstore.transfer.device import open_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.namespace import Namespace
    from kvstore.transfer.device import Block

ORDER: Final = "layer,kv,head,token,dim"

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class LayerPages(NamedTuple):
    """One layer of every page of a buffer: [pages, kv_heads, page_tokens, dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a namespace's `kv_dtype`. Raises BadValue for a name not in DTYPES."""
    if name not in DTYPES:
        raise BadValue("kv_dtype", name, f"one of {sorted(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The namespace's name of a torch dtype. Raises BadValue for one that pages cannot have."""
    if dtype not in _NAMES:
        raise BadValue("dtype", dtype, f"one of {[str(known) for known in _NAMES]}")
    return _NAMES[dtype]


def tensor_view(memory: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """`memory` as a tensor of exactly `shape`; both are the same bytes.

    The tensor keeps `memory` exported: drop it before the buffer is closed. Raises BadValue when
    `memory` is read-only (torch has no read-only tensors), LayoutMismatch when sizes differ.
    """
    if memory.readonly:
        raise BadValue("memory", "a read-only view", "a writable one: copy it first")
    want = math.prod(shape) * dtype.itemsize
    if memory.nbytes != want:
        raise LayoutMismatch(f"memory has {memory.nbytes} bytes, {list(shape)} takes {want}")
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def device_block(tensor: torch.Tensor) -> Block:
    """A tensor's memory as a block of its device, which keeps the tensor alive until closed.

    Raises BadValue for a tensor with gaps, ConfigError for a device that blocks cannot be on.
    """
    if not tensor.is_contiguous() or not tensor.numel():
        raise BadValue("tensor", list(tensor.stride()), "the strides of a tensor without gaps")
    plain = tensor.detach()
    device = open_device(str(plain.device))
    return device.wrap(plain.data_ptr(), plain.nbytes, plain)


def layer_pages(
    memory: memoryview, namespace: Namespace, part: int | None = None
) -> list[LayerPages]:
    """Every layer of the whole pages that lie one after another in `memory`, as strided views.

    With `part`, those of that part of the pages, which lies there alone. Group by group; latent
    vectors are keys, and values have no dimension there. For one tensor-parallel rank, where a
    page's parts one after another are its layers in order; others raise LayoutMismatch, and so
    does a group of windows, whose pages are not kept.
    """
    content, layout = namespace.content, namespace.layout
    if not {group.attention for group in content.groups} <= {Attention.FULL, Attention.LATENT}:
        raise LayoutMismatch("only full attention and latents have whole layers to view")
    if layout.tensor_parallel != 1 or layout.order != ORDER:
        raise LayoutMismatch(f"got {layout}, views need one tensor-parallel rank and {ORDER}")
    specs = namespace.parts if part is None else (namespace.parts[part],)
    groups = [
        content.groups[spec.group]
        for spec in specs
        for _ in range(spec.layer_start, spec.layer_stop)
    ]
    size = sum(spec.size_bytes for spec in specs)
    pages, rest = divmod(memory.nbytes, size)
    if rest or not pages:
        raise LayoutMismatch(f"{memory.nbytes} bytes are not pages of {size}")
    dtype = dtype_of(content.kv_dtype)
    flat = tensor_view(memory, dtype, (pages, size // dtype.itemsize))
    shapes = [
        (pages, group.kv_heads, layout.page_tokens, dim)
        for group in groups
        for dim in (group.key_dim, group.value_dim)
    ]
    runs = torch.split_with_sizes(flat, [math.prod(shape[1:]) for shape in shapes], dim=1)
    halves = [run.view(shape) for run, shape in zip(runs, shapes, strict=True)]
    return [LayerPages(*both) for both in zip(halves[::2], halves[1::2], strict=True)]
