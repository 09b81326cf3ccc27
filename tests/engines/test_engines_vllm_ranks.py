"""Real vLLM engines whose heads are divided among two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.store import KVStore
from tests.cluster.servers import until
from tests.engines.models import text
from tests.engines.vllm_engine import BLOCK, Generated, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up

LENGTH = 200
PROMPT = text(LENGTH)
HIT = (LENGTH - 1) // BLOCK * BLOCK
ONE = ("KvharborConnector", "kvstore.connectors.vllm.connector")
MUTANT = ("RanklessConnector", "tests.engines.vllm_faults")


def divided(model: Path, pool: Up, folder: Path, connector: tuple[str, str]) -> VllmEngine:
    """An engine of two ranks, a processor each, which are processes of their own."""
    return VllmEngine(
        model,
        pool.master,
        folder=folder,
        connector=connector,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        own_process=True,
        options={"tensor_parallel_size": 2},
    )


def local_and_external(engine: VllmEngine, pool: Up) -> tuple[Generated, Generated]:
    """The prompt by the engine's own cache, and by the pool."""
    assert engine.generate([PROMPT]).cached == [0]
    local = engine.generate([PROMPT])
    with KVStore.connect(pool.master) as store:
        until("nothing is on its way", lambda: is_saved(store))
    engine.forget()
    return local, engine.generate([PROMPT])


def is_saved(store: KVStore) -> bool:
    """Whether all pages are there and nobody puts any."""
    status = store.stat()
    return status.pages >= HIT // BLOCK and not status.open_plans


def test_ranks_bring_their_own_heads(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    with divided(model_of("grouped"), pool, tmp_path, ONE) as engine:
        local, external = local_and_external(engine, pool)
    assert local.cached == [HIT]
    assert external == local


def test_a_connector_without_ranks_in_its_keys_is_caught(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    with divided(model_of("grouped"), pool, tmp_path, MUTANT) as engine:
        local, external = local_and_external(engine, pool)
    assert external.cached == [HIT]
    assert external.tokens != local.tokens
