"""LMCache with a pool behind it: its server and real vLLM engines, and its own checks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.cli.mooncake import shimmed
from kvstore.client.store import KVStore
from tests.cluster.servers import until, write_config
from tests.cluster.up import Up, clean_environment, remove_segments
from tests.engines.conftest import DRAM, assert_idle
from tests.engines.lmcache_server import (
    CHUNK,
    QUIET,
    CachedVllm,
    LmcacheServer,
    adapter,
)
from tests.engines.models import text
from tests.engines.program import ROOT
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LENGTH = 200
PROMPT, OTHER = text(LENGTH), text(LENGTH, seed=1)
HIT = LENGTH // CHUNK * CHUNK
"""As many as vLLM itself has of the prompt, in blocks of half that size."""


def objects_in(master: str) -> int:
    """How many objects the pool has."""
    with KVStore.connect(master) as store:
        return store.stat().pages


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Up]:
    """A pool that a test may kill. A busy machine alone does not make its pages go."""
    data_dir, config = tmp_path / "mortal", tmp_path / "mortal.toml"
    write_config(config, {"master": {"worker_lost_after_s": 60.0}})
    try:
        with Up(data_dir, f"--config={config}", dram=DRAM) as up:
            yield up
    finally:
        remove_segments(data_dir)


def test_an_engine_gets_what_another_stored_though_the_server_has_started_anew(
    model_of: Callable[[str], Path], mortal: Up, tmp_path: Path
) -> None:
    model = model_of("grouped")
    with (
        LmcacheServer(mortal.master, tmp_path) as server,
        CachedVllm(model, server, tmp_path) as first,
    ):
        cold, local, other = (first.generate([each]) for each in (PROMPT, PROMPT, OTHER))
        assert (cold.cached, local.cached, other.cached) == ([0], [HIT], [0])
        until("both are in the pool", lambda: objects_in(mortal.master) >= 2 * (HIT // CHUNK))
    with (
        LmcacheServer(mortal.master, tmp_path) as server,
        CachedVllm(model, server, tmp_path) as second,
    ):
        assert second.generate([PROMPT]) == local
        assert_idle(mortal.master)
        mortal.end(signal.SIGKILL)
        assert second.generate([OTHER]) == other


def run(*arguments: str, environment: dict[str, str]) -> str:
    """Run one of LMCache's own commands to its end; what it says."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", *arguments],
        env=clean_environment() | QUIET | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lmcache_s_benchmark_finds_all_that_it_stored_and_every_byte_right(pool: Up) -> None:
    said = run(
        *("lmcache.cli.main", "bench", "l2", "--num-keys=32", "--rounds=2", "--no-skip-verify"),
        *("--lookup-max-hit-rate=1", f"--l2-adapter={adapter(pool.master)}"),
        environment={},
    )
    assert "All 32 keys data verified OK" in said
    assert "1.00" in next(line for line in said.splitlines() if "Actual hit rate" in line)


def test_lmcache_s_own_check_of_remote_storage_passes(pool: Up, tmp_path: Path) -> None:
    module = "remote_storage_plugin.kvharbor"
    config = tmp_path / "lmcache.yaml"
    config.write_text(
        json.dumps(
            {
                "local_cpu": True,
                "max_local_cpu_size": 0.1,
                "remote_url": "plugin://kvharbor",
                "remote_storage_plugins": ["kvharbor"],
                "extra_config": {
                    f"{module}.module_path": "kvstore.connectors.lmcache.remote",
                    f"{module}.class_name": "KvharborRemoteAdapter",
                    "kvharbor": {"masters": pool.master, "timeout_s": 5.0},
                },
            }
        )
    )
    said = run(
        *("lmcache.v1.basic_check", "--mode=test_remote"),
        environment={"LMCACHE_CONFIG_FILE": str(config)},
    )
    results = [
        line for line in said.splitlines() if line.startswith(("| EXISTS", "| PUT", "| GET"))
    ]
    assert len(results) == 4
    assert all("5/5" in line for line in results), said


def test_remote_storage_gives_back_what_it_was_given(pool: Up) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    run("tests.engines.lmcache_remote_program", pool.master, nobody, environment={})


def test_lmcache_s_connector_for_mooncake_store_runs_on_the_pool_by_the_shim(pool: Up) -> None:
    environment = shimmed({"PYTHONPATH": str(ROOT)}, pool.master, None, "lmcache")
    run("tests.engines.lmcache_mooncake_program", environment=environment)
