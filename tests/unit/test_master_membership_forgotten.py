"""Workers that are given up: after a long absence, or because an operator knows better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.lease import inherited_release_s
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import LeaveWorker
from kvstore.wire.messages.operator import ForgetWorker
from master import losses
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    import pytest

    from kvstore.wire.messages.base import Message

KEYS = chain(1, 8)
LOST_S = limits.WORKER_LOST_AFTER_S


def forget(rig: Rig, name: str) -> Message | None:
    """The answer to an operator's wish."""
    return rig.ask(rig.open("operator", "", "o"), ForgetWorker(name))


def test_a_segment_away_for_too_long_is_forgotten() -> None:
    rig = Rig(Tunables(segment_forget_s=60.0))
    worker = rig.add_worker()
    space = rig.open_namespace()
    space.put(KEYS)
    worker.leave()
    space.remove(KEYS[:32])
    rig.pass_time(65.0)
    assert not rig.master.core.workers
    assert not rig.master.core.segments
    worker.join()
    assert space.probe(KEYS) == bytes(8)
    rig.pass_time(1.0)
    assert not worker.records
    space.put(KEYS)
    worker.leave()
    worker.join()
    assert space.probe(KEYS) == b"\1" * 8


def test_a_forgotten_segment_is_forgotten_by_the_next_master_too() -> None:
    rig = Rig(Tunables(segment_forget_s=60.0))
    worker = rig.add_worker()
    space = rig.open_namespace()
    space.put(KEYS)
    worker.leave()
    rig.pass_time(65.0)
    rig.takeover(2)
    again = rig.open_namespace()
    worker.join()
    assert again.probe(KEYS) == bytes(8)
    rig.pass_time(inherited_release_s(1.0))
    assert not worker.records
    again.put(KEYS)
    assert again.probe(KEYS) == b"\1" * 8


def test_a_worker_that_will_not_come_back_is_forgotten_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "COST_PER_STEP", 1)
    monkeypatch.setattr(losses, "ROW_SLOTS_MAX", 1)
    rig = Rig()
    worker = rig.add_worker()
    space = rig.open_namespace()
    space.put(KEYS)
    worker.leave()
    rig.tick(LOST_S)
    core = rig.master.core
    assert core.tree(1).pages > 0, "it is forgotten while its copies are being dropped"
    assert forget(rig, "w1") == Done()
    assert not core.workers
    assert not any(key.startswith(("workers/", "segments/")) for key in rig.store)
    assert failure(forget(rig, "w1")).code == "bad_value"
    rig.pass_time(1.0)
    assert (core.tree(1).pages, len(core.restored)) == (0, 0)
    worker.join()
    assert space.probe(KEYS) == bytes(8)
    rig.pass_time(limits.LEASE_TTL_S + 1.0)
    assert not worker.records
    space.put(KEYS)
    worker.leave()
    worker.join()
    assert space.probe(KEYS) == b"\1" * 8


def test_nor_is_one_waited_for_that_only_the_last_master_has_met() -> None:
    rig = Rig()
    worker = rig.add_worker()
    rig.open_namespace().put(KEYS)
    worker.leave()
    rig.takeover(2)
    space = rig.open_namespace()
    assert forget(rig, "w1") == Done()
    assert not rig.master.core.lenders.absent
    worker.join()
    assert space.probe(KEYS) == bytes(8)


def test_whoever_is_here_or_on_the_way_out_is_not_forgotten(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    space.match(KEYS)
    worker = rig.workers["w1"]
    assert "lost or has left" in failure(forget(rig, "w1")).text
    assert failure(forget(rig, "w2")).text.startswith("worker: got 'w2', want one that was here")
    assert failure(rig.ask(rig.engine, ForgetWorker("w1"))).code == "access_denied"
    assert worker.ask(LeaveWorker("w1")) is None, "a lease runs"
    assert "lost or has left" in failure(forget(rig, "w1")).text
    rig.pass_time(limits.LEASE_TTL_S + 1.0)
    assert forget(rig, "w1") == Done()
