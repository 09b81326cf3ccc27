"""Connectors with a fault: ones that stop before a load so that a test can break the pool, and
ones that make the mistakes that connectors are known for. vLLM loads them by this module's path.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from unittest.mock import patch

from msgspec.structs import replace

from kvstore.connectors.vllm import connector
from kvstore.connectors.vllm.connector import KvharborConnector
from kvstore.connectors.vllm.fields import engine_fields
from kvstore.page import PageChain, engine_key

if TYPE_CHECKING:
    from kvstore.client.store import KVStore
    from kvstore.connectors.engine_namespace import EngineFields
    from kvstore.connectors.engine_pool import Reached
    from kvstore.connectors.engine_saves import BlockRun, Load
    from kvstore.connectors.vllm.foreign import Vllm
    from kvstore.connectors.vllm.scheduler_side import Orders

PAUSE: Final = "KVHARBOR_TEST_PAUSE"
"""Names the file that, while it is there, stops the next load; a `.here` beside it says so."""
REMOVE: Final = "KVHARBOR_TEST_REMOVE"
"""Names the file that, while it is there, has pages removed just before they are loaded."""
POLL_S: Final = 0.01
TRIES_MAX: Final = 30


def pause_before_load() -> None:
    """Say that a load is about to begin, and wait until the test has done its worst."""
    pause = Path(os.environ[PAUSE])
    if pause.exists():
        pause.with_suffix(".here").touch()
        while pause.exists():
            time.sleep(POLL_S)


class PausingConnector(KvharborConnector):
    """The connector itself, at which a test can stop between lookup and load."""

    def start_load_kv(self, forward_context: Vllm, **_: Vllm) -> None:
        """Wait for the test where there is something to load."""
        loads = self._orders().loads
        if loads:
            pause_before_load()
            if Path(os.environ[REMOVE]).exists():
                for load in loads:
                    self._remove(load)
        super().start_load_kv(forward_context)

    def _remove(self, load: Load) -> None:
        for run in load.runs:

            def remove(pool: Reached, run: BlockRun = run) -> None:
                opened = pool.opened[run.group]
                keys = [engine_key(opened.namespace.id, bytes(each)) for each in run.hashes]
                cast("KVStore", pool.store).remove(opened, PageChain(b"".join(keys[1:])))

            self._pool.call("removing pages", remove, None)


class ForgetfulConnector(PausingConnector):
    """A mutant: it does not remember that a load has failed."""

    _tries = 0

    def update_connector_output(self, connector_output: Vllm) -> None:
        """Forget it; after many loads of one request the test has seen enough."""
        if connector_output.failed_recving or connector_output.invalid_block_ids:
            self._tries += 1
            if self._tries > TRIES_MAX:
                super().update_connector_output(connector_output)


class FirstGroupConnector(KvharborConnector):
    """A mutant: it takes the first cache group for all of them."""

    def _orders(self) -> Orders:
        orders = super()._orders()
        loads = [
            load._replace(runs=tuple(run for run in load.runs if run.group == 0))
            for load in orders.loads
        ]
        return orders._replace(loads=tuple(loads))


def fields_without_ranks(config: Vllm, *others: Vllm) -> EngineFields:
    """What a key without the rank amounts to: each rank's heads pass for all there are."""
    fields = engine_fields(config, *others)
    ranks = fields.tensor_parallel
    groups = [replace(each, kv_heads=each.kv_heads // ranks) for each in fields.groups]
    return replace(fields, tensor_parallel=1, groups=tuple(groups))


class RanklessConnector(KvharborConnector):
    """A mutant: no rank in its keys."""

    def __init__(self, vllm_config: Vllm, role: Vllm, kv_cache_config: Vllm) -> None:
        """As the connector itself, which is told of one rank."""
        with (
            patch.object(connector, "engine_fields", fields_without_ranks),
            patch.object(connector, "get_tensor_model_parallel_rank", lambda: 0),
        ):
            super().__init__(vllm_config, role, kv_cache_config)
