"""LMCache's server of many engines, and vLLM engines in front of it, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from tests.cluster.servers import until
from tests.cluster.up import clean_environment
from tests.engines.program import LOG_SHOWN, ROOT
from tests.engines.vllm_engine import VllmEngine
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

CHUNK: Final = 64
START_S: Final = 240.0
END_S: Final = 60.0
PLUGIN: Final = {
    "type": "plugin",
    "module_path": "kvstore.connectors.lmcache.l2_adapter",
    "class_name": "KvharborL2Adapter",
}
QUIET: Final = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


def adapter(masters: str, **more: object) -> str:
    """What `--l2-adapter` is told."""
    # On a machine that others keep busy an answer may be late, and a test waits for a hit.
    return json.dumps(PLUGIN | {"adapter_params": {"masters": masters, "timeout_s": 5.0, **more}})


class LmcacheServer:
    """A context manager around one server whose second level is a pool."""

    def __init__(self, masters: str, folder: Path) -> None:
        """Remember how to start it."""
        self.port, self._http_port = free_port(), free_port()
        self._log = folder / f"lmcache-{time.monotonic_ns()}.log"
        self._command = [
            *(sys.executable, "-P", "-m", "lmcache.cli.main", "server"),
            *(f"--port={self.port}", f"--http-port={self._http_port}", f"--chunk-size={CHUNK}"),
            *("--l1-size-gb=0.25", "--eviction-policy=LRU", "--supported-transfer-mode=auto"),
            # What its metrics need is no part of what LMCache needs.
            *("--disable-metrics", f"--l2-adapter={adapter(masters)}"),
        ]

    def __enter__(self) -> Self:
        """Start it and wait until it answers."""
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=clean_environment() | QUIET | {"PYTHONPATH": str(ROOT)},
            )
        try:
            until("the server answers", lambda: self.status() is not None, START_S)
        except BaseException:
            self.__exit__(AssertionError)
            raise
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        """End it, and show its log where the test has failed."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if kind is not None:
            print(f"---- {self._log}\n{self._log.read_text()[-LOG_SHOWN:]}")

    def status(self) -> dict[str, Any] | None:
        """What it says of itself; None while it does not answer."""
        assert self.process.poll() is None, self._log.read_text()[-LOG_SHOWN:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status") as reply:
                said: dict[str, Any] = json.load(reply)
                return said
        except (urllib.error.URLError, ConnectionError):
            return None


class CachedVllm(VllmEngine):
    """A vLLM engine with LMCache's connector."""

    program = "tests.engines.lmcache_vllm_program"

    def __init__(self, model: Path, server: LmcacheServer, folder: Path) -> None:
        """Remember how to start it."""
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": server.port,
            },
        }
        options = {"kv_transfer_config": connector}
        super().__init__(model, folder=folder, environment=QUIET, options=options)
