"""What the connector counts, as vLLM's logs and its Prometheus endpoint show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.connectors.vllm.foreign import Vllm

TOTALS: Final = {
    "lookups": "Questions to the pool, for requests",
    "promised_pages": "Pages that requests were told they would be given",
    "short_tokens": "Tokens in the pool that were computed, being too few for a load",
    "failed_loads": "Requests whose load did not come whole, and which were computed instead",
    "loaded_pages": "Pages that were loaded from the pool",
    "loaded_bytes": "Bytes of those pages",
    "failed_load_pages": "Pages that were promised and did not come; their blocks were recomputed",
    "saved_pages": "Pages that were stored in the pool",
    "saved_bytes": "Bytes of those pages",
    "known_pages": "Pages that were to be stored and were there already",
    "refused_pages": "Pages that the pool did not take",
    "failed_save_pages": "Pages that were not stored because the pool was in trouble",
    "dropped_pages": "Pages that were not stored because those before them were still on their way",
    "circuit_opened": "Times that the pool was found in trouble and left alone for a while",
}


class PoolStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there for the checker
    """Counts of one interval, by name."""

    def reset(self) -> None:
        """Begin another interval."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or another interval's."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """As they are: sums need no reduction."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class PoolMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # likewise
    """One Prometheus counter for each name in TOTALS."""

    def __init__(
        self,
        vllm_config: Vllm,
        metric_types: Mapping[type, Vllm],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register them."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {
            name: metric_types[Counter](f"vllm:kvharbor_{name}", text, labelnames)
            for name, text in TOTALS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in made.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            if count:
                self._counters[engine_idx][name].inc(count)
