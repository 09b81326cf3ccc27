"""vLLM's own connector for Mooncake Store, unchanged, on a pool by the shim."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from kvstore.cli.mooncake import shimmed
from kvstore.client.store import KVStore
from tests.cluster.servers import until
from tests.engines.models import text
from tests.engines.program import ANSWER_S, ROOT
from tests.engines.vllm_engine import BLOCK, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up

MODULE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector"
SETTINGS: Final = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:1",  # nobody listens there: the shim names the pool
    "protocol": "tcp",
    "global_segment_size": 1 << 24,
    "local_buffer_size": 1 << 24,
}
LENGTH: Final = 200
HIT: Final = (LENGTH - 1) // BLOCK * BLOCK


def test_an_engine_finds_what_another_has_stored(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    settings = tmp_path / "mooncake.json"
    settings.write_text(json.dumps(SETTINGS))
    environment = shimmed({"PYTHONPATH": str(ROOT)}, pool.master, None, "vllm")
    environment["MOONCAKE_CONFIG_PATH"] = str(settings)
    prompt = text(LENGTH)

    def engine() -> VllmEngine:
        return VllmEngine(
            model_of("grouped"),
            pool.master,
            folder=tmp_path,
            connector=("MooncakeStoreConnector", MODULE),
            environment=environment,
        )

    with engine() as first, KVStore.connect(pool.master) as store:
        cold = first.generate([prompt])
        assert cold.cached == [0]
        until("all is stored", lambda: store.stat().pages == HIT // BLOCK, ANSWER_S)
    with engine() as second:
        warm = second.generate([prompt])
        assert warm.cached == [HIT]
        assert warm.tokens == cold.tokens
