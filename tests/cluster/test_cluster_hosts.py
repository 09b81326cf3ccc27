"""Six hosts under load, of which one after the other is lost with all that it holds."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.cluster.chaos import POOLS, Chaos
from tests.cluster.nemesis import HOST_FAULTS
from tests.cluster.rig import Rig

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SEED = 20
SECONDS_MAX = 240.0
"""About 45 where nothing else runs."""


def test_two_replicas_outlast_every_host_one_at_a_time(tmp_path: Path) -> None:
    """Each fault once: every page that clients were told has its replicas is there in the end."""
    pool = POOLS["hosts"]
    with Rig(tmp_path / "pool", pool.shape) as rig:
        result = Chaos(rig, Random(SEED), pool).run(reads=1, seconds_max=SECONDS_MAX)
    print("\n".join(result.report()))
    assert result.verdicts() == []
    assert set(result.faults) == set(HOST_FAULTS)
    assert result.kept > 500
    assert result.findings.reads > 10_000
    assert result.findings.removals > 500
