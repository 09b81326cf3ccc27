"""SGLang's own backend for Mooncake Store, unchanged, on a pool by the shim."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from kvstore.cli.mooncake import shimmed
from kvstore.client.store import KVStore
from tests.cluster.servers import until
from tests.engines.models import text
from tests.engines.program import ROOT
from tests.engines.sglang_engine import PAGE, Generated, SglangEngine, hicache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up

SETTINGS: Final = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:1",  # nobody listens there: the shim names the pool
    "protocol": "tcp",
    "global_segment_size": 1 << 24,
    "prefetch_threshold": PAGE,
}
WITHOUT_MOONCAKE: Final = {"SGLANG_HICACHE_MOONCAKE_REUSE_TE": "0"}
"""Its transfer engine is not installed, and SGLang would begin one for the backend to share."""
LENGTH: Final = 200
PAGES: Final = (LENGTH - 1) // PAGE
HIT: Final = PAGES * PAGE


def test_an_engine_finds_in_the_pool_what_it_has_let_go(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    cache = hicache(pool.master) | {
        "hicache_storage_backend": "mooncake",
        "hicache_storage_backend_extra_config": json.dumps(SETTINGS),
    }
    environment = shimmed({"PYTHONPATH": str(ROOT)}, pool.master, None, "sglang")
    environment |= WITHOUT_MOONCAKE
    prompt = text(LENGTH)
    engine = SglangEngine(model_of("grouped"), cache, folder=tmp_path, environment=environment)
    with engine, KVStore.connect(pool.master) as store:
        cold, local = engine.generate([prompt]), engine.generate([prompt])
        assert (cold.cached, local.cached) == ([0], [HIT])
        # Keys and values of a page are an object each.
        until("all is stored", lambda: store.stat().pages >= 2 * PAGES)
        engine.forget()
        assert engine.generate([prompt]) == Generated(local.tokens, [HIT], [HIT])
