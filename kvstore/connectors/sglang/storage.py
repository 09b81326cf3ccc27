"""The class that SGLang's hierarchical cache loads as its third tier.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvharbor", "interface_v1": 1,
      "module_path": "kvstore.connectors.sglang.storage", "class_name": "KvharborStorage"}'

For the versions of SGLang in `fields.ENGINES`. Imported by SGLang alone, called by its threads for
storage: it hands their calls to a `Tier`, and speaks of SGLang's types.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_context, get_server_args
from sglang.version import __version__

from kvstore.clock import SystemClock
from kvstore.connectors.engine_namespace import as_text, check_fields, namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.pool_settings import connect
from kvstore.connectors.sglang.fields import ENGINES, Facts, check_served, engine_fields, plain
from kvstore.connectors.sglang.pages import KV
from kvstore.connectors.sglang.rows import Rows
from kvstore.connectors.sglang.settings import WHERE, settings_of
from kvstore.connectors.sglang.tier import Tier
from kvstore.connectors.sglang.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstore.connectors.sglang.foreign import HostPool, Sglang, Transfer

_LOG: Final = logging.getLogger("kvharbor")
BYTES_PER_GB: Final = 1e9


class KvharborStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there for the checker
    """SGLang's pages in a kvharbor pool: one object on each rank."""

    def __init__(self, storage_config: Sglang, kwargs: Sglang = None) -> None:
        """BadValue names what this engine, or its settings, cannot have; the pool may be away."""
        del kwargs
        extra = storage_config.extra_config or {}
        check_served(storage_config)
        self._settings = settings_of(extra.get(WHERE, {}))
        self._config = storage_config
        self.tier = Tier(storage_config, is_flat=not extra.get("interface_v1", 0))

    # What SGLang tells of its memory, before anything else.

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Take the KV's pages, of which the namespace is made."""
        super().register_mem_pool_host(mem_pool_host)
        self.tier.add_kv(mem_pool_host)
        fields = engine_fields(self._facts(mem_pool_host), self._settings)
        check_fields(fields, ENGINES)
        if self._settings.description_file and self._config.tp_rank == 0:
            path = Path(self._settings.description_file)
            path.write_text(as_text(fields), encoding="utf-8")
        (namespace,) = namespaces(fields)
        clock, settings = SystemClock(), self._settings
        pool = EnginePool(lambda: connect(settings, "sglang"), [namespace], clock)
        weights = Weights(get_context().overrides_log)
        self.tier.open(Rows(pool, namespace, clock, settings.timeout_s, weights.are_named))

    def _facts(self, pool: HostPool) -> Facts:
        arguments, config = get_server_args(), self._config
        return Facts(
            version=__version__,
            model=ModelConfig.from_server_args(arguments),
            arguments=resolved_view(arguments),
            ranks=config.tp_size,
            stages=config.pp_size,
            context_ranks=config.attn_cp_size,
            page_tokens=pool.page_size,
            kv_dtype=plain(pool.dtype),
            layout=f"{pool.layout} {'flat' if self.tier.is_flat else 'in pieces'}",
            pool=f"{type(pool).__name__} {getattr(pool, 'storage_format_tag', None) or '-'}",
            page_bytes=self.tier.page_bytes,
        )

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Take pages of another kind."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.tier.add(host_pool, str(host_pool_name))

    # Finding.

    def batch_exists(self, keys: Sequence[str], extra_info: Sglang = None) -> int:
        """How many pages are there, and leased, from the first on."""
        del extra_info
        return self.tier.leading(keys)

    def exists(self, key: str) -> bool:
        """Whether one is."""
        return bool(self.tier.leading([key]))

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[Transfer] | None = None,
        extra_info: Sglang = None,
    ) -> PoolTransferResult:
        """Which prefixes are there, and leased, with all that they need beside KV."""
        del extra_info
        found = self.tier.restorable(keys, pool_transfers or ())
        if found is None:
            return PoolTransferResult.empty()
        return PoolTransferResult(max(found.lengths, default=0), found.longest, found.lengths)

    # Reading.

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Sglang = None
    ) -> list[bool]:
        """Bring pages into the host's pool; whether each came."""
        del extra_info
        return self.tier.load(KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: Sequence[Transfer], extra_info: Sglang = None
    ) -> dict[str, list[bool]]:
        """The same of several kinds, by their names."""
        del extra_info
        return {t.name: self.tier.load(str(t.name), t.keys, t.host_indices) for t in transfers}

    def batch_get(
        self, keys: Sequence[str], target_locations: Sglang = None, target_sizes: Sglang = None
    ) -> list[torch.Tensor | None]:
        """Bring flat pages; None for what did not come."""
        del target_sizes
        came = self.tier.load_flat(keys, target_locations)
        return [page if ok else None for page, ok in zip(target_locations, came, strict=True)]

    def get(
        self, key: str, target_location: Sglang = None, target_sizes: Sglang = None
    ) -> torch.Tensor | None:
        """Bring one flat page."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    # Writing.

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Sglang = None
    ) -> list[bool]:
        """Store pages of the host's pool; whether each is there now."""
        del extra_info
        return self.tier.save(KV, keys, host_indices)

    def batch_set_v2(
        self, transfers: Sequence[Transfer], extra_info: Sglang = None
    ) -> dict[str, list[bool]]:
        """The same of several kinds, by their names. SGLang stores them before their KV."""
        del extra_info
        return {t.name: self.tier.save(str(t.name), t.keys, t.host_indices) for t in transfers}

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sglang = None,
        target_locations: Sglang = None,
        target_sizes: Sglang = None,
    ) -> bool:
        """Store flat pages; whether all are there now."""
        del target_locations, target_sizes
        return all(self.tier.save_flat(keys, values))

    def set(
        self,
        key: str,
        value: Sglang = None,
        target_location: Sglang = None,
        target_sizes: Sglang = None,
    ) -> bool:
        """Store one flat page."""
        return self.batch_set([key], [value], target_location, target_sizes)

    # The rest.

    def clear(self) -> bool:
        """Take out what engines of this kind have stored, and nothing else."""
        _LOG.info("kvharbor: %d pages were cleared", self.tier.rows.clear())
        return True

    def get_stats(self) -> StorageMetrics:
        """What was moved since this was last asked, for SGLang's own histograms."""
        rows = self.tier.rows
        read, written = rows.take_moves("read"), rows.take_moves("written")
        return StorageMetrics(
            prefetch_pgs=[move.rows for move in read],
            backup_pgs=[move.rows for move in written],
            prefetch_bandwidth=[move.bytes_per_s / BYTES_PER_GB for move in read],
            backup_bandwidth=[move.bytes_per_s / BYTES_PER_GB for move in written],
        )

    def close(self) -> None:
        """Say what was counted, and leave the pool."""
        if self.tier.is_open:
            _LOG.info("kvharbor: %s", self.tier.rows.totals)
            self.tier.rows.close()
