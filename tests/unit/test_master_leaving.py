"""Workers that take leave: gone from lookups at once, told when the last lease has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.replica import ExtentState
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import LeaveWorker
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.reads import GetStatus, LeaseRenewed, RenewLease, Status
from master.segments import SegmentState
from master.tunables import Tunables
from tests.unit.master_rig import Rig, chain, failure

if TYPE_CHECKING:
    from tests.unit.master_rig import OpenedNamespace

KEYS = chain(1, 8)
LEASE_S = limits.LEASE_TTL_S + limits.LEASE_MARGIN_S


@pytest.fixture
def rig() -> Rig:
    """The first master of a pool, and a worker."""
    made = Rig()
    made.add_worker("w1")
    return made


def leave(rig: Rig, name: str = "w1") -> int:
    """Take leave; the request that is to be answered."""
    session = rig.workers[name].session
    assert session is not None
    assert rig.ask(session, LeaveWorker(name)) is None
    return rig.last_request


def answered(rig: Rig, request: int, name: str = "w1") -> object:
    session = rig.workers[name].session
    assert session is not None
    return rig.reply(session, request)


def stored(rig: Rig) -> OpenedNamespace:
    opened = rig.open_namespace()
    opened.put(KEYS)
    return opened


def states(rig: Rig) -> dict[str, str]:
    status = rig.ask(rig.engine, GetStatus())
    assert isinstance(status, Status)
    return {worker.worker: worker.state for worker in status.workers}


def test_its_pages_are_out_of_lookups_at_once_and_it_has_left_not_been_lost(rig: Rig) -> None:
    opened = stored(rig)
    request = leave(rig)
    assert not any(opened.probe(KEYS))
    rig.tick()
    assert answered(rig, request) == Done()  # no lease ran
    assert states(rig) == {"w1": "left"}
    counters = rig.master.core.counters
    assert (counters["workers_left"], counters["workers_lost"]) == (1, 0)
    rig.close(rig.workers["w1"].session)  # type: ignore[arg-type]  # it is there
    rig.workers["w1"].session = None
    rig.pass_time(limits.WORKER_LOST_AFTER_S + 1)
    assert states(rig) == {"w1": "left"}
    assert counters["workers_lost"] == 0


def test_it_is_told_when_the_last_lease_on_its_pages_has_ended(rig: Rig) -> None:
    opened = stored(rig)
    opened.match(KEYS)
    request = leave(rig)
    rig.tick(LEASE_S - 0.01)
    assert answered(rig, request) is None
    rig.tick(0.02)
    assert answered(rig, request) == Done()


def test_a_renewed_lease_counts_and_none_is_renewed_once_it_leaves(rig: Rig) -> None:
    opened = stored(rig)
    found = opened.match(KEYS)
    generations = found.runs[0].copies[0].generations
    rig.pass_time(5.0)
    renewal = RenewLease(opened.id, KEYS, generations)
    assert rig.ask(rig.engine, renewal) == LeaseRenewed(limits.LEASE_TTL_S, b"\1" * 8)
    request = leave(rig)
    assert rig.ask(rig.engine, renewal) == LeaseRenewed(limits.LEASE_TTL_S, bytes(8))
    rig.tick(LEASE_S - 0.01)
    assert answered(rig, request) is None
    rig.tick(0.02)
    assert answered(rig, request) == Done()


def test_leases_on_other_workers_pages_are_not_waited_for(rig: Rig) -> None:
    opened = stored(rig)
    rig.add_worker("w2")
    opened.match(KEYS)
    request = leave(rig, "w2")
    rig.tick()
    assert answered(rig, request, "w2") == Done()
    assert all(opened.probe(KEYS))


def test_leases_of_an_earlier_master_are_waited_for(rig: Rig) -> None:
    stored(rig)
    rig.takeover(2)
    rig.workers["w1"].join()
    request = leave(rig)
    rig.tick(limits.LEADER_LEASE_S + LEASE_S - 0.01)
    assert answered(rig, request) is None
    rig.tick(0.02)
    assert answered(rig, request) == Done()


def test_open_plans_fail_and_nothing_is_planned_there(rig: Rig) -> None:
    opened = rig.open_namespace()
    plans = opened.plans(KEYS)
    reports = opened.write(plans, KEYS)
    leave(rig)
    assert not rig.master.core.plans
    for report in reports:
        assert failure(rig.workers["w1"].ask(report)).code == "unavailable"
    again = opened.begin(KEYS)
    assert isinstance(again, PutPlans)
    assert not again.spans


def test_nothing_is_freed_there_while_readers_may_read(rig: Rig) -> None:
    opened = stored(rig)
    opened.match(KEYS)
    leave(rig)
    before = dict(rig.workers["w1"].records)
    rig.pass_time(LEASE_S + 1)
    assert rig.workers["w1"].records == before


def test_its_pages_come_back_with_its_next_life(rig: Rig) -> None:
    opened = stored(rig)
    worker = rig.workers["w1"]
    leave(rig)
    rig.tick()
    assert worker.session is not None
    rig.close(worker.session)
    worker.restart()
    worker.join()
    rig.settle()
    assert all(opened.probe(KEYS))
    assert states(rig) == {"w1": "live"}


def test_a_registration_takes_the_leave_back(rig: Rig) -> None:
    opened = stored(rig)
    opened.match(KEYS)
    request = leave(rig)
    worker = rig.workers["w1"]
    old = worker.session
    assert old is not None
    worker.join()
    rig.pass_time(2 * LEASE_S)
    assert rig.reply(old, request) is None
    assert rig.master.core.segments["w1-dram"].state is not SegmentState.LOST
    assert all(opened.probe(KEYS))


def test_a_repeated_leave_is_answered_once_to_the_last_who_asked(rig: Rig) -> None:
    opened = stored(rig)
    opened.match(KEYS)
    first, second = leave(rig), leave(rig)
    rig.tick(LEASE_S + 0.01)
    assert answered(rig, first) is None
    assert answered(rig, second) == Done()
    assert rig.master.core.counters["workers_left"] == 1


def test_who_does_not_wait_has_left_all_the_same(rig: Rig) -> None:
    opened = stored(rig)
    opened.match(KEYS)
    leave(rig)
    session = rig.workers["w1"].session
    assert session is not None
    rig.close(session)
    assert not rig.master.core.leaving
    assert states(rig) == {"w1": "left"}


def test_an_extent_that_was_retired_is_not_forgotten(rig: Rig) -> None:
    opened = stored(rig)
    opened.match(KEYS)
    opened.remove(KEYS)
    leave(rig)
    rig.settle()
    space = rig.master.core.segments["w1-dram"].allocator
    assert space.bytes_in[ExtentState.SEALED] == 0


def test_only_a_worker_takes_its_own_leave(rig: Rig) -> None:
    session = rig.workers["w1"].session
    assert session is not None
    for asker, name, code in (
        (rig.engine, "w1", "access_denied"),
        (session, "w2", "access_denied"),
        (rig.open("worker", "", "w3"), "w3", "unavailable"),
    ):
        assert failure(rig.ask(asker, LeaveWorker(name))).code == code


def test_whoever_waits_has_left_and_is_connected(rig: Rig) -> None:
    stored(rig).match(KEYS)
    leave(rig)
    core = rig.master.core
    core.workers["w1"].left = False
    with pytest.raises(InvariantBroken, match="I18: w1"):
        rig.master.check_invariants()
    core.workers["w1"].left = True
    core.leaving["w2"] = core.leaving.pop("w1")
    with pytest.raises(InvariantBroken, match="I18: w2"):
        rig.master.check_invariants()


def test_a_worker_that_is_forgotten_while_it_waits_is_not_waited_for() -> None:
    rig = Rig(Tunables(cluster="test", segment_forget_s=5.0))
    rig.add_worker("w1")
    stored(rig).match(KEYS)
    leave(rig)
    rig.tick(6.0)
    assert not rig.master.core.leaving
