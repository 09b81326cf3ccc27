"""Pools whose pages have replicas on several hosts, and what can be asked of these, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from master import replica_counts
from master.tunables import Tunables
from tests.unit.master_pages import KEY, KEYS
from tests.unit.master_rig import Rig

if TYPE_CHECKING:
    from master.run import Run

PAGES = len(KEYS) // 32


def rig_of(*workers: str, tunables: Tunables | None = None, chunks: int = 16) -> Rig:
    """A master of pages with two replicas, and workers, each of a host of its own."""
    rig = Rig(tunables or Tunables(cluster="test"))
    for name in workers:
        rig.add_worker(name, chunks)
    rig.pass_time(2.0)  # the scans that newcomers cause are over
    return rig


def run_of(rig: Rig, key: bytes = KEY) -> Run:
    """The run that holds this page of the first namespace."""
    run = rig.master.core.tree(1).get(key)
    assert run is not None
    return run


def got(rig: Rig, key: bytes = KEY) -> list[int]:
    """Replicas of each page of a run."""
    run = run_of(rig, key)
    parts = rig.master.core.tree(run.namespace).parts
    return list(replica_counts.got(rig.master.core, run, parts))


def copies(rig: Rig) -> int:
    """How many copies were begun."""
    return rig.master.core.counters["moves_copy"]
