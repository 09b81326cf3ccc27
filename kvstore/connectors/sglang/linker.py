"""The class that SGLang's radix cache loads to reach the pool from the device's memory at once.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KvharborLinker",
      "linker_module_path": "kvstore.connectors.sglang.linker"}'

For the versions of SGLang in `fields.ENGINES`, and models with full attention. Imported by SGLang
alone, called by its scheduler's thread: it hands calls to `Links`, and speaks of SGLang's types.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.utils import get_device_module
from sglang.version import __version__

from kvstore.clock import SystemClock
from kvstore.connectors.engine_namespace import as_text, check_fields, namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.pool_settings import connect
from kvstore.connectors.sglang.device_pages import DevicePages, buffers_of, is_alike_on_ranks
from kvstore.connectors.sglang.fields import ENGINES, Facts, engine_fields, plain
from kvstore.connectors.sglang.links import Links, Load
from kvstore.connectors.sglang.rows import Rows
from kvstore.connectors.sglang.settings import settings_of
from kvstore.connectors.sglang.weights import Weights
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvstore.connectors.sglang.foreign import Sglang, Transfer

LAYOUT: Final = "device, layer by layer"
DEVICE: Final = get_device_module()


class KvharborLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is not there for mypy
    """SGLang's prefixes in a kvharbor pool, without a cache of the host's: one on each rank."""

    def __init__(
        self,
        server_args: Sglang,
        params: Sglang,
        *,
        components: Collection[ComponentType],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: Sglang = None,
    ) -> None:
        """BadValue names what this engine, or its settings, cannot have; the pool may be away."""
        others = sorted(each.name for each in components if each is not ComponentType.FULL)
        if others:
            raise BadValue("components", others, "full attention alone: else the storage backend")
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise BadValue("draft model", "KV of its own", "none: else the storage backend")
        settings = settings_of(extra_config or {})
        cache = params.token_to_kv_pool_allocator.get_kvcache()
        layers = buffers_of(cache)
        pages = DevicePages(layers, params.page_size)
        group = params.attn_tp_cache_group or params.tp_cache_group
        rank = torch.distributed.get_rank(group=group)
        ranks = torch.distributed.get_world_size(group=group)
        facts = Facts(
            version=__version__,
            model=ModelConfig.from_server_args(server_args),
            arguments=resolved_view(server_args),
            ranks=ranks,
            stages=params.pp_size,
            context_ranks=params.attn_cp_size,
            page_tokens=params.page_size,
            kv_dtype=plain(layers[0][0].dtype),
            layout=LAYOUT,
            pool=type(cache).__name__,
            page_bytes=pages.page_bytes,
        )
        fields = engine_fields(facts, settings)
        check_fields(fields, ENGINES)
        if settings.description_file and rank == 0:
            Path(settings.description_file).write_text(as_text(fields), encoding="utf-8")
        (namespace,) = namespaces(fields)
        clock = SystemClock()
        pool = EnginePool(lambda: connect(settings, "sglang"), [namespace], clock)
        same = is_alike_on_ranks(cache)
        share = f"{'all' if same else rank}/pp{params.pp_rank}/cp{params.attn_cp_rank}/"
        weights = Weights(get_context().overrides_log)
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pages}
        self.layer_done_counter = LayerWiseLoadCounter(pages.layers)
        self._links = Links(
            Rows(pool, namespace, clock, settings.timeout_s, weights.are_named), pages, share,
            self.layer_done_counter, writes=not same or rank == 0,
        )  # fmt: skip

    def lookup(self, rid: str, transfers: Sequence[Transfer]) -> list[int]:
        """Prefixes that are there, and leased, in pages."""
        return self._links.lookup(rid, _kv(transfers).keys or ())

    def load(self, rid: str, transfers: Sequence[Transfer]) -> bool:
        """Have pages come with the next batch."""
        kv = _kv(transfers)
        if not kv.keys or kv.device_indices is None:
            return False
        self._links.load(rid, Load(tuple(kv.keys), kv.device_indices))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether a load had not begun, and does not."""
        return self._links.cancel(rid)

    def start_layer_wise_loading(self) -> int:
        """Begin all that waits."""
        event = DEVICE.Event()
        event.record()
        return self._links.start(event.synchronize)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch has ended; whether all of it came."""
        landed: bool = self.layer_done_counter.finish(counter_index)
        return landed

    def offload(self, transfers: Sequence[Transfer], session_id: str | None = None) -> bool:
        """Store pages, but those that are known to be there."""
        del session_id
        kv = _kv(transfers)
        if not kv.keys or kv.device_indices is None:
            return False
        self._links.save(kv.keys, kv.device_indices, _all_of(self.record_offload_ready()))
        return True

    def num_completed_offloads(self) -> int:
        """How many have ended and were not taken."""
        return self._links.done

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them stored all."""
        return self._links.take()

    def reset(self) -> None:
        """Let what is under way end, and forget all of it."""
        self._links.reset()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """End the threads and the connection."""
        self._links.close()


def _kv(transfers: Sequence[Transfer]) -> Transfer:
    return next(each for each in transfers if each.name == PoolName.KV)


def _all_of(events: Sequence[Sglang]) -> Callable[[], None]:
    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
