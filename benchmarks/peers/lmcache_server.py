"""LMCache's server of many engines, as its documents advise to run it: memory alone."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from benchmarks.peers.child import PeerFailed, die_with_parent
from benchmarks.peers.vllm_engine import PYTHON
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

START_S: Final = 240.0
STOP_S: Final = 20.0
POLL_S: Final = 0.2
MEMORY_GB: Final = "2"


class LmcacheServer(AbstractContextManager["LmcacheServer"]):
    """A running server; leaving the context ends it."""

    def __init__(self, folder: Path, chunk_tokens: int) -> None:
        """Start it and wait until it answers; PeerFailed where it does not."""
        port, self._http_port = free_port(), free_port()
        self._log = folder / "lmcache.log"
        environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(str(PYTHON), "-P", "-m", "lmcache.cli.main", "server"),
                    *(f"--port={port}", f"--http-port={self._http_port}"),
                    *(f"--chunk-size={chunk_tokens}", f"--l1-size-gb={MEMORY_GB}"),
                    *("--eviction-policy=LRU", "--disable-metrics"),
                    "--supported-transfer-mode=auto",
                ],
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=die_with_parent,
            )
        self.connector: dict[str, object] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": port,
            },
        }
        try:
            self._await_answer()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _await_answer(self) -> None:
        ends_s = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < ends_s:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(POLL_S)
        raise PeerFailed(f"LMCache's server does not answer: {self._log.read_text()[-2000:]}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
