"""What SGLang's hierarchical cache lacks on a CPU, put in its place. For tests alone.

Its host pools want pinned memory, and three copies between host and device that are kernels on
other machines; it imports torchvision, which does not load beside torch for CPUs, and uses it for
pictures alone. All that is tested is SGLang's own: pools, trees, controllers and their threads.
"""

from __future__ import annotations

import builtins
import multiprocessing
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available

OF_PICTURES: Final = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
assert not is_torchvision_available()  # transformers looks once, and must not take what follows
for name in OF_PICTURES:
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])

from sglang.srt.entrypoints.engine import Engine  # noqa: E402 -- with that in place
from sglang.srt.managers.scheduler import run_scheduler_process  # noqa: E402 -- with that in place
from sglang.srt.mem_cache.pool_host import base  # noqa: E402 -- with that in place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.connectors.sglang.foreign import Sglang


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Tokens from layers to layers."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target.index_copy_(0, dst_indices, source.index_select(0, src_indices))


def copy_layer_out_of_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer's tokens, from pages that have all layers."""
    pages, places = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, places].view(-1, *target.shape[1:])


def copy_layers_into_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers' tokens into pages; keys of all layers come before values of all layers."""
    pages, places = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        rows = source[src_indices]
        target[pages, number % layers, places] = rows.view(-1, *target.shape[3:])


COPIES: Final = {
    "transfer_kv_direct": copy_rows,
    "transfer_kv_per_layer_direct_pf_lf": copy_layer_out_of_pages,
    "transfer_kv_all_layer_direct_lf_pf": copy_layers_into_pages,
}


def prepare() -> None:
    """Put all of it in place, in a process that has no engine yet."""
    made = base.HostKVCache.__init__

    def without_pins(self: base.HostKVCache, **given: Sglang) -> None:
        made(self, **{**given, "pin_memory": False})

    base.HostKVCache.__init__ = without_pins
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # pools of tests are small, and so are machines
    # Where there are no kernels SGLang does not define their names: anywhere will do.
    for name, copy in COPIES.items():
        setattr(builtins, name, copy)


def fork_from_here() -> None:
    """Have an engine's processes forked: most of a start would be each one's own imports."""
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang sets another


def run_scheduler(*arguments: Sglang, **named: Sglang) -> Sglang:
    """A rank's process."""
    prepare()
    return run_scheduler_process(*arguments, **named)


class CpuEngine(Engine):  # type: ignore[misc]  # SGLang is not there for the checker
    """An engine whose ranks are so prepared."""

    run_scheduler_process_func = staticmethod(run_scheduler)
