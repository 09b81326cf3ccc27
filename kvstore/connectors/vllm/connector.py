"""The class that vLLM loads: it hands vLLM's calls to the two halves, and speaks of vLLM's types.

    --kv-transfer-config '{"kv_connector": "KvharborConnector",
      "kv_connector_module_path": "kvstore.connectors.vllm.connector",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

For the minor versions of vLLM in `fields.ENGINES`. Imported by vLLM alone.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm import __version__
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.clock import SystemClock
from kvstore.connectors.engine_namespace import as_text, check_fields, namespaces, warnings
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.pool_settings import connect
from kvstore.connectors.vllm.events import BlockEvents, RankPuts
from kvstore.connectors.vllm.fields import ENGINES, engine_fields
from kvstore.connectors.vllm.scheduler_side import Orders, SchedulerSide
from kvstore.connectors.vllm.settings import least_load, settings_of
from kvstore.connectors.vllm.stats import PoolMetrics, PoolStats
from kvstore.connectors.vllm.worker_side import NOTHING_ARRIVED, WorkerSide
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.connectors.vllm.foreign import Vllm

_LOG: Final = logging.getLogger("kvharbor")
ROLE: Final = "kv_both"
POLICY: Final = "recompute"


class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there for the checker
    """What goes from the scheduler to each worker with a step."""

    def __init__(self, orders: Orders, namespace_ids: tuple[bytes, ...]) -> None:
        """Name the namespaces, too: a rank that has others must not take part."""
        self.orders = orders
        self.namespace_ids = namespace_ids


class KvharborConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # likewise
    """vLLM's prefixes in a kvharbor pool. One object in the scheduler, one on each rank."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Vllm, role: KVConnectorRole, kv_cache_config: Vllm) -> None:
        """BadValue names what this engine, or its settings, cannot have; the pool may be away."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_role != ROLE:
            raise BadValue("kv_role", transfer.kv_role, ROLE)
        if transfer.kv_load_failure_policy != POLICY:
            raise BadValue("kv_load_failure_policy", transfer.kv_load_failure_policy, POLICY)
        settings = settings_of(transfer.kv_connector_extra_config)
        fields = engine_fields(vllm_config, kv_cache_config, __version__, settings, os.environ)
        check_fields(fields, ENGINES)
        made = namespaces(fields)
        self._ids = tuple([bytes(each.id) for each in made])
        self._layers = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._told: dict[str, int] = {}
        self._arrived = NOTHING_ARRIVED
        clock = SystemClock()
        self._pool = EnginePool(lambda: connect(settings, "vllm"), made, clock)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._events: BlockEvents | None = None
        publishes = vllm_config.kv_events_config
        is_published = publishes is not None and publishes.enable_kv_cache_events
        if role is KVConnectorRole.SCHEDULER:
            for text in warnings(fields):
                _LOG.warning("kvharbor: %s", text)
            if settings.description_file:
                Path(settings.description_file).write_text(as_text(fields), encoding="utf-8")
            device = vllm_config.device_config.device_type
            self._scheduler = SchedulerSide(
                made, self._pool, clock, settings.timeout_s, settings.lookup_deadline_s,
                settings.handover_deadline_s, least_load(settings, device),
            )  # fmt: skip
            self._scheduler.reach()
            if is_published:
                ranks = [len(each.parts) for each in made]
                self._events = BlockEvents(ranks, made[0].layout.page_tokens)
                self._scheduler.on_save = self._events.plan
        else:
            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerSide(
                made, rank, self._pool, settings.timeout_s, settings.save_buffer_bytes
            )
            self._worker.tells_puts = is_published

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what was not saved is a miss later."""
        return False

    @property
    def scheduler_half(self) -> SchedulerSide:
        """Of the object in the scheduler."""
        assert self._scheduler is not None, "a call of the scheduler's at a worker"
        return self._scheduler

    @property
    def worker_half(self) -> WorkerSide:
        """Of an object on a rank."""
        assert self._worker is not None, "a call of a worker's at the scheduler"
        return self._worker

    # At the scheduler.

    def on_new_request(self, request: Vllm) -> None:
        """Begin to ask for its blocks."""
        self.scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Vllm, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What can be loaded, between two steps: True wherever there is something."""
        tokens = self.scheduler_half.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Vllm, blocks: Vllm, num_external_tokens: int
    ) -> None:
        """Take note of where it is to be loaded to."""
        self.scheduler_half.allotted(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Vllm) -> KVConnectorMetadata:
        """Send orders along with a step."""
        return StepOrders(self.scheduler_half.orders(scheduler_output), self._ids)

    def update_connector_output(self, connector_output: Vllm) -> None:
        """Hear which loads failed."""
        failed = sorted(connector_output.failed_recving or ())
        bad = sorted(connector_output.invalid_block_ids or ())
        lost = self.scheduler_half.loads_failed(failed, bad) if failed or bad else []
        if self._events is not None:
            self._events.put(connector_output.kv_connector_worker_meta)
            self._events.lost(lost)

    def take_events(self) -> list[Vllm]:
        """Tell of what this engine has put into the pool, where vLLM publishes KV events."""
        return [] if self._events is None else self._events.take()

    def request_finished(
        self, request: Vllm, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks go at once: what is saved of them was copied."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Vllm,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished, of engines with several cache groups."""
        return False, self.scheduler_half.finished(request.request_id)

    def reset_cache(self) -> bool:
        """Find nothing of before any more; the pool is not this engine's alone, its pages stay."""
        self.scheduler_half.leave()
        return True

    # At a worker.

    def register_kv_caches(self, kv_caches: Mapping[str, Vllm]) -> None:
        """Take the engine's memory."""
        blocks = self._kv_cache_config.num_blocks
        self.worker_half.register(kv_caches, self._layers, blocks)
        self.worker_half.reach()

    def start_load_kv(self, forward_context: Vllm, **_: Vllm) -> None:
        """Load what requests wait for."""
        if self._is_of_one_mind:
            self.worker_half.load(self._orders().loads)
        else:
            self.worker_half.refuse(self._orders().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request is computed before its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Vllm, attn_metadata: Vllm, **_: Vllm
    ) -> None:
        """Nothing yet: whole blocks of all layers are saved after the step."""

    def wait_for_save(self) -> None:
        """Copy out what is to be saved; the engine may reuse the blocks when it returns."""
        if self._is_of_one_mind:
            self.worker_half.save(self._orders().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell which loads have ended."""
        self.worker_half.abandon(finished_req_ids)
        self._arrived = self.worker_half.arrived()
        return KVConnectorTransferResults(
            finished_recving=set(self._arrived.finished),
            failed_recving=set(self._arrived.failed),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks did not come; vLLM asks right after get_transfer_results."""
        return set(self._arrived.bad_blocks)

    def build_connector_worker_meta(self) -> RankPuts | None:
        """Send along what this rank has put."""
        put = self.worker_half.put_blocks()
        return RankPuts(put) if put else None

    def get_kv_connector_stats(self) -> PoolStats | None:
        """What was counted since the last call, on this rank or in the scheduler."""
        side = self._worker or self._scheduler
        assert side is not None
        totals = side.totals
        news = {name: count - self._told.get(name, 0) for name, count in totals.items()}
        self._told = totals
        return PoolStats(data={name: count for name, count in news.items() if count})

    def _orders(self) -> Orders:
        orders: Orders = self._get_connector_metadata().orders
        return orders

    @property
    def _is_of_one_mind(self) -> bool:
        return self.worker_half.is_of_one_mind(self._get_connector_metadata().namespace_ids)

    # Both.

    def shutdown(self) -> None:
        """End threads and connections, and give all memory back."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """As vLLM rebuilds them in another process."""
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Vllm,
        metric_types: Mapping[type, Vllm],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolMetrics:
        """Counters for vLLM's Prometheus endpoint."""
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
