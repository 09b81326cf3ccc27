"""The class that vLLM loads as a tier behind its own CPU tier, and its talk of vLLM's types.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KvharborTier",
                             "module_path": "kvstore.connectors.vllm.tier"}]}}'

For the minor versions of vLLM in `fields.ENGINES`. Imported by vLLM alone, which calls it in its
scheduler's thread.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.clock import SystemClock
from kvstore.connectors.engine_namespace import as_text, check_fields, namespaces, warnings
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.pool_settings import connect
from kvstore.connectors.vllm.fields import ENGINES
from kvstore.connectors.vllm.tier_fields import tier_fields, tier_settings, with_hash
from kvstore.connectors.vllm.tier_rows import TierRows
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.connectors.vllm.foreign import Vllm
    from kvstore.namespace import Namespace

_LOG: Final = logging.getLogger("kvharbor")
PREFIX: Final = "vllm:kvharbor_tier_"
HASHES: Final = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
TOTALS: Final = {
    "lookups": "Questions to the pool, each for the rows of a step",
    "loaded_rows": "Rows that were loaded from the pool",
    "loaded_bytes": "Bytes of those rows",
    "failed_load_rows": "Rows that were promised and did not come; their tokens were recomputed",
    "saved_rows": "Rows that were stored in the pool",
    "saved_bytes": "Bytes of those rows",
    "known_rows": "Rows that were to be stored and were there already",
    "refused_rows": "Rows that the pool did not take",
    "failed_save_rows": "Rows that were not stored because the pool was in trouble",
    "dropped_rows": "Rows that were not stored because too many others were on their way",
    "circuit_opened": "Times that the pool was found in trouble and left alone for a while",
}


class KvharborTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there for the checker
    """A kvharbor pool behind vLLM's CPU tier: all ranks and cache groups, by vLLM's own rows."""

    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        offloading_spec: Vllm,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Vllm = None,
        **own: object,
    ) -> None:
        """BadValue names what this engine, or its settings, cannot have; the pool may be away."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        self._settings = tier_settings(own)
        self._fields = tier_fields(config, self.block_size_bytes, __version__, self._settings)
        check_fields(self._fields, ENGINES)
        self.locality = Locality(self._settings.locality)
        self._events: list[OffloadingEvent] = []
        self._has_events = config.enable_kv_cache_events
        self._told: dict[str, int] = {}
        clock = SystemClock()
        pool = EnginePool(lambda: connect(self._settings, "vllm"), self._named, clock)
        self.rows = TierRows(
            primary_kv_view,
            pool,
            clock,
            timeout_s=self._settings.timeout_s,
            deadline_s=self._settings.lookup_deadline_s,
            save_bytes_max=self._settings.save_bytes_max,
        )

    def _named(self) -> tuple[Namespace, ...]:
        """The namespace of rows, for the first call: vLLM chooses its hash after its tiers."""
        fields = with_hash(self._fields, hash_in_use(), os.environ)
        check_fields(fields, ENGINES)
        for text in warnings(fields):
            _LOG.warning("kvharbor: %s", text)
        if self._settings.description_file:
            Path(self._settings.description_file).write_text(as_text(fields), encoding="utf-8")
        return namespaces(fields)

    def on_new_request(self, req_context: Vllm) -> RequestOffloadingContext:
        """Have its new chunks only: those of others are there."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Vllm) -> LookupResult:
        """Answer from memory, at first that it is not known yet."""
        is_there = self.rows.is_there(req_context.req_id, key)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: Vllm) -> None:
        """Ask the pool for what the step could not be told."""
        self.rows.step_ended()

    def on_request_finished(self, req_context: Vllm) -> None:
        """Forget what it asked for."""
        self.rows.request_ended(req_context.req_id)

    def submit_store(self, job_metadata: Vllm) -> None:
        """Have chunks put into the pool."""
        job = job_metadata
        self.rows.save(job.job_id, job.keys, job.chunk_ids.tolist())

    def submit_load(self, job_metadata: Vllm) -> None:
        """Have chunks brought."""
        job = job_metadata
        self.rows.load(job.job_id, job.keys, job.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Tell which jobs are over, and which of their chunks are where they should be."""
        results: list[JobResult] = []
        for ended in self.rows.ended():
            good = ended.good
            is_whole = len(good) == len(ended.keys)
            moved = len(good) * self.block_size_bytes
            results.append(JobResult(ended.job, is_whole, good, transfer_bytes=moved))
            if self._has_events and good and not ended.is_load:
                self._events.append(
                    OffloadingEvent(list(good), self.medium, removed=False, locality=self.locality)
                )
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Tell what is in the pool now; what leaves it is the pool's to tell."""
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        """Wait for every job."""
        self.rows.drain()

    def shutdown(self) -> None:
        """End threads and connection, and let go of vLLM's memory."""
        self.rows.close()

    def get_stats(self) -> OffloadingConnectorStats:
        """What was counted since the last call."""
        totals, stats = self.rows.totals, OffloadingConnectorStats()
        for name, count in totals.items():
            if count > self._told.get(name, 0):
                stats.increase_counter(PREFIX + name, count - self._told.get(name, 0))
        self._told = totals
        return stats

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, object]
    ) -> dict[str, OffloadingCounterMetadata]:
        """Counters for vLLM's Prometheus endpoint."""
        return {
            PREFIX + name: OffloadingCounterMetadata(documentation=text)
            for name, text in TOTALS.items()
        }


def hash_in_use() -> str:
    """The name of the hash that this process of vLLM has begun its chains with."""
    seed = kv_cache_utils.get_none_hash_seed()
    for name in HASHES:
        if get_hash_fn_by_name(name)(seed) == kv_cache_utils.NONE_HASH:
            return name
    raise BadValue("prefix_caching_hash_algo", "another one", f"one of {', '.join(HASHES)}")
