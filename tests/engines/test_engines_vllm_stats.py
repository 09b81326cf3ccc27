"""What the connector counts reaches vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from kvstore.connectors.vllm.foreign import Vllm


@pytest.fixture(scope="module")
def connector() -> Vllm:
    """The module; what vLLM itself is warned of while it is imported is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kvstore.connectors.vllm import connector
    return connector


def test_counts_of_ranks_and_intervals_add_up(connector: Vllm) -> None:
    stats = connector.KvharborConnector.build_kv_connector_stats({"saved_pages": 2})
    stats.aggregate(connector.PoolStats(data={"saved_pages": 3, "loaded_pages": 1}))
    assert stats.reduce() == {"saved_pages": 5, "loaded_pages": 1}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_each_engine_has_a_counter_of_each_name(connector: Vllm) -> None:
    from kvstore.connectors.vllm.stats import TOTALS

    config = SimpleNamespace(kv_transfer_config=None)
    kinds: dict[type, object] = {kind: kind for kind in (Counter, Gauge, Histogram)}
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    names = ["model", "engine"]
    metrics = connector.KvharborConnector.build_prom_metrics(config, kinds, names, engines)
    metrics.observe(dict.fromkeys(TOTALS, 2), engine_idx=1)
    metrics.observe({"saved_pages": 1}, engine_idx=1)
    labels = {"model": "m", "engine": "1"}
    found = {
        name: REGISTRY.get_sample_value(f"vllm:kvharbor_{name}_total", labels) for name in TOTALS
    }
    assert found == {name: 3 if name == "saved_pages" else 2 for name in TOTALS}
