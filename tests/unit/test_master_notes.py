"""What the master has logged for whoever operates the pool: comings, goings, and changes."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.wire.messages.membership import LeaveWorker, ReportSegment
from kvstore.wire.messages.operator import ResetPolicy, SetPolicy
from tests.unit.master_rig import Rig, chain


@pytest.fixture
def rig() -> Rig:
    """A master with one worker, of whose coming the notes are gone."""
    made = Rig()
    made.add_worker()
    assert made.notes == [
        "worker w1 registers from host w1: 1 segments",
        "segment w1-dram is live: 0 bytes sealed",
    ]
    made.notes.clear()
    return made


def test_a_worker_that_is_lost_and_comes_back(rig: Rig) -> None:
    rig.open_namespace().put(chain(1, 2))
    rig.tick(limits.WORKER_LOST_AFTER_S)
    assert rig.notes == ["worker w1 is lost: silent for 3.0 s"]
    rig.workers["w1"].join()
    assert rig.notes[1:] == [
        "worker w1 registers from host w1: 1 segments",
        "segment w1-dram is live: 8192 bytes sealed",
    ]


def test_two_workers_of_one_name(rig: Rig) -> None:
    worker = rig.workers["w1"]
    before, worker.session = worker.session, rig.open("worker", "", "w1")
    worker.join()
    assert rig.closed == [before]
    assert rig.notes[0] == "worker w1 comes anew: its last connection is closed"


def test_a_worker_that_leaves(rig: Rig) -> None:
    worker = rig.workers["w1"]
    assert worker.session is not None
    rig.ask(worker.session, LeaveWorker("w1"))
    assert rig.notes == ["worker w1 leaves"]


def test_a_medium_is_noted_when_it_changes(rig: Rig) -> None:
    segment = rig.master.core.segments["w1-dram"]
    message = ReportSegment("w1-dram", segment.incarnation, "read_only", "errno 5")
    for _ in range(2):
        rig.workers["w1"].ask(message)
    assert rig.notes == ["segment w1-dram is read_only: errno 5"]


def test_what_operators_change(rig: Rig) -> None:
    operator = rig.open("operator", "", "o")
    rig.ask(operator, SetPolicy("eviction", "ttl-lfu", {"ttl_s": "600"}))
    rig.ask(operator, ResetPolicy("eviction"))
    first, second = rig.notes
    assert first.startswith("policy of eviction: ttl-lfu with {")
    assert "'ttl_s': 600" in first
    assert second == "policy of eviction: as configured, as an operator wishes"


def test_requests_are_not_noted(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(chain(1, 8))
    space.probe(chain(1, 8))
    rig.pass_time(10.0)
    assert not rig.notes
