"""Clients at work on a pool without etcd, while its only master and its worker are killed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.history import History
from tests.cluster.rig import Rig, Shape

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TRANSPORTS = ("shm", "tcp")
WORK_S = 1.5


def test_kills_of_master_and_worker_under_load(tmp_path: Path) -> None:
    with Rig(tmp_path / "pool", Shape(masters=1, members=0)) as rig:
        loads = [rig.load(n, 2, transport=way) for n, way in enumerate(TRANSPORTS)]
        (master,), (worker,) = rig.masters, rig.workers
        for victim in (master, worker, master):
            time.sleep(WORK_S)
            victim.kill()
            victim.start()
        time.sleep(WORK_S)
        for load in loads:
            load.end()
        findings = History(rig.calls()).check()
    assert findings.wrong == 0, findings.stories
    assert findings.reads > 1000
    assert findings.puts > 100
    assert findings.longest_s < loads[0].load.timeout_s + 2
