"""Clients at work on a pool without etcd, while its only master and its worker are killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.history import History, read_history
from tests.cluster.load_client import Load
from tests.cluster.load_process import LoadProcess
from tests.cluster.servers import Server, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CLUSTER = f"load-{os.getpid()}"
TRANSPORTS = ("shm", "tcp")
WORK_S = 1.5


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Server]:
    settings = {
        "data_dir": str(tmp_path / "m"),
        "listen": f"127.0.0.1:{free_port()}",
        "unix": "off",
        "admin": "off",
    }
    server = Server("master", tmp_path / "m", {"cluster": {"name": CLUSTER}, "master": settings})
    server.start()
    yield server
    server.discard()


@pytest.fixture
def worker(tmp_path: Path, master: Server) -> Iterator[Server]:
    settings = {
        "id": "w",
        "data_dir": str(tmp_path / "w"),
        "master": [master.address],
        "listen": f"127.0.0.1:{free_port()}",
        "admin": "off",
        "dram": "64MiB",
        "chunk": "16MiB",
    }
    server = Server("worker", tmp_path / "w", {"cluster": {"name": CLUSTER}, "worker": settings})
    server.start()
    yield server
    server.discard()
    Path(f"/dev/shm/kvharbor-{CLUSTER}-w-dram0").unlink()


def test_kills_of_master_and_worker_under_load(
    tmp_path: Path, master: Server, worker: Server
) -> None:
    loads = [
        LoadProcess(Load((master.address,), str(tmp_path / way), 1, number, 2, transport=way))
        for number, way in enumerate(TRANSPORTS)
    ]
    try:
        for victim in (master, worker, master):
            time.sleep(WORK_S)
            victim.kill()
            victim.start()
        time.sleep(WORK_S)
        for load in loads:
            load.end()
    finally:
        for load in loads:
            load.discard()
    findings = History(call for load in loads for call in read_history(load.history)).check()
    assert findings.wrong == 0, findings.stories
    assert findings.reads > 1000
    assert findings.puts > 100
    assert findings.longest_s < loads[0].load.timeout_s + 2
