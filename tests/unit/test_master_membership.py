"""Workers that come, go quiet, are lost, come back, or are not who they say."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.coordination.metadata_store import EPOCH_MAX
from kvstore.ids import Epoch
from kvstore.replica import ExtentState
from kvstore.segment import Geometry, check_geometry
from kvstore.wire.messages.common import Address
from kvstore.wire.messages.membership import (
    Heartbeat,
    HeartbeatNoted,
    RegisterWorker,
    SegmentOffer,
    WorkerAccepted,
)
from kvstore.wire.messages.reads import GetStatus, Remove, Status
from master import losses
from master.events import RaiseEpoch, Reply, Request
from master.segments import SegmentState
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain, failure

KEYS = chain(1, 8)
LOST_S = limits.WORKER_LOST_AFTER_S


def state(rig: Rig, worker: str = "w1") -> SegmentState:
    """What the master thinks of a worker."""
    return rig.master.core.workers[worker].state


def test_a_worker_joins_and_then_serves(rig: Rig) -> None:
    worker = rig.add_worker("w2", join=False)
    worker.session = rig.open("worker", "", "w2")
    assert worker.register() == WorkerAccepted(1, limits.HEARTBEAT_INTERVAL_S, LOST_S)
    assert state(rig, "w2") is SegmentState.JOINING
    assert rig.master.core.segments["w2-dram"].ref.addresses == (Address("tcp", "w2:1", 1),)
    worker.join()
    assert state(rig, "w2") is SegmentState.LIVE


def test_a_silent_worker_is_lost(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.tick(LOST_S - 0.1)
    assert state(rig) is SegmentState.LIVE
    assert rig.master.wakeup_s == pytest.approx(rig.now + 0.1)
    rig.tick(0.2)
    assert state(rig) is SegmentState.LOST
    assert space.probe(KEYS) == bytes(8)
    assert not space.plans(chain(2, 1)).spans
    assert rig.master.core.counters["workers_lost"] == 1


def test_heartbeats_keep_a_worker(rig: Rig) -> None:
    rig.pass_time(3 * LOST_S)
    assert state(rig) is SegmentState.LIVE


def test_any_request_on_the_control_connection_is_a_sign_of_life(
    rig: Rig, space: OpenedNamespace
) -> None:
    plans = space.plans(KEYS)
    reports = space.write(plans, KEYS)
    rig.tick(LOST_S - 0.1)
    space.report(reports)
    rig.tick(LOST_S - 0.1)
    assert state(rig) is SegmentState.LIVE


def test_another_connection_is_no_sign_of_life(rig: Rig) -> None:
    data = rig.open("worker", "", "w1")
    rig.tick(LOST_S - 0.1)
    assert rig.ask(data, Heartbeat("w1", 1, 0)) == HeartbeatNoted(1, known=False)
    rig.tick(0.2)
    assert state(rig) is SegmentState.LOST


def test_a_lost_worker_is_told_to_register(rig: Rig) -> None:
    worker = rig.workers["w1"]
    rig.tick(LOST_S)
    assert worker.ask(Heartbeat("w1", 1, 0)) == HeartbeatNoted(1, known=False)
    worker.join()
    assert worker.ask(Heartbeat("w1", 1, 0)) == HeartbeatNoted(1, known=True)


def test_a_worker_that_is_back_in_time_lost_nothing(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    plans = space.plans(chain(2, 4))
    worker = rig.workers["w1"]
    worker.leave()
    rig.tick(1.0)
    assert not space.plans(chain(3, 1)).spans
    worker.join()
    assert space.probe(KEYS) == b"\1" * 8
    assert space.report(space.write(plans, chain(2, 4))) == [bytes(4)]


def test_a_worker_whose_connection_ended_is_lost_a_heartbeat_sooner(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    rig.workers["w1"].ask(Heartbeat("w1", 1, 0))
    rig.workers["w1"].leave()
    ends_s = rig.now + LOST_S - limits.HEARTBEAT_INTERVAL_S
    assert rig.master.wakeup_s <= ends_s
    rig.tick(ends_s - rig.now - 0.01)
    assert space.probe(KEYS) == b"\1" * 8
    rig.tick(0.02)
    assert state(rig) is SegmentState.LOST
    assert space.probe(KEYS) == bytes(8)


def test_a_lost_workers_copies_are_cleaned_away_and_adopted_again(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    worker.leave()
    rig.pass_time(LOST_S + 1.0)
    assert rig.master.core.tree(1).pages == 0
    worker.join()
    assert space.probe(KEYS) == b"\1" * 8
    assert rig.master.core.counters["pages_adopted"] == 8


def test_cleaning_is_done_in_steps() -> None:
    rig = Rig()
    rig.checks = False
    worker = rig.add_worker(chunks=2, chunk_bytes=64 * CHUNK)
    space = rig.open_namespace()
    for number in range(8 * losses.SLOTS_PER_STEP):
        space.put(chain(number, 1))
    worker.leave()
    rig.tick(LOST_S)
    assert rig.master.core.tree(1).pages > 0
    assert rig.master.wakeup_s <= rig.now
    rig.settle()
    assert rig.master.core.tree(1).pages == 0
    rig.master.check_invariants()


def test_pages_in_a_row_are_dropped_at_once_and_those_between_others_too(rig: Rig) -> None:
    worker = rig.workers["w1"]
    space = rig.open_namespace(parts=2)
    keys = chain(0, 12)
    space.put(keys[: 5 * 32], parts=(0, 1))
    space.put(chain(1, 3), parts=(1, 0))
    space.put(keys[5 * 32 :], keys[4 * 32 : 5 * 32], (0, 1))
    rig.ask(rig.engine, Remove(space.id, keys[2 * 32 : 3 * 32] + keys[8 * 32 : 10 * 32], 5.0))
    rig.pass_time(1.0)
    there = space.probe(keys + chain(1, 3))
    assert there == b"\1\1\0\1\1\1\1\1\0\0\1\1" + b"\1" * 3
    lost = rig.master.core.counters
    worker.leave()
    rig.pass_time(LOST_S + 1.0)
    assert (lost["pages_lost"], rig.master.core.tree(1).pages) == (2 * there.count(1), 0)
    worker.join()
    assert space.probe(keys + chain(1, 3)) == there


def test_a_return_stops_the_cleaning() -> None:
    rig = Rig()
    worker = rig.add_worker(chunks=2, chunk_bytes=64 * CHUNK)
    space = rig.open_namespace()
    keys = chain(1, 2000)
    space.put(keys)
    worker.leave()
    rig.tick(LOST_S)
    left = rig.master.core.segments["w1-dram"].allocator.bytes_in[ExtentState.SEALED]
    assert 0 < left < 2000 * 4096
    worker.join()
    assert space.probe(keys) == b"\1" * 2000
    assert rig.master.core.counters["pages_lost"] == rig.master.core.counters["pages_adopted"]


def test_leases_outlive_the_loss_of_the_worker(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    rig.pass_time(9.0)
    space.match(KEYS)
    until_s = rig.now + limits.LEASE_TTL_S
    worker.leave()
    rig.pass_time(LOST_S + 1.0)
    worker.join()
    assert space.remove(KEYS) == b"\1" * 8
    rig.pass_time(until_s - rig.now - 0.1)
    assert len(worker.records) == 8
    rig.pass_time(1.0)
    assert not worker.records


def test_a_second_registration_replaces_the_first(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    old = worker.session
    worker.join()
    assert rig.closed == [old]
    assert old is not None
    rig.close(old)
    assert space.probe(KEYS) == b"\1" * 8
    assert state(rig) is SegmentState.LIVE


def test_a_segment_that_is_not_offered_any_more_is_lost(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    message = RegisterWorker("w1", "w1", (), ())
    assert isinstance(worker.ask(message), WorkerAccepted)
    assert space.probe(KEYS) == bytes(8)
    rig.pass_time(1.0)
    worker.join()
    assert space.probe(KEYS) == b"\1" * 8


def test_another_file_under_an_old_name_starts_empty(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    worker.leave()
    old = dict(worker.records)
    worker.geometry = check_geometry(32 * CHUNK, CHUNK)
    worker.incarnation = 2
    worker.records.clear()
    worker.join()
    rig.settle()
    assert space.probe(KEYS) == bytes(8)
    assert rig.master.core.segments["w1-dram"].allocator.bytes_in[ExtentState.SEALED] == 0
    worker.records = {
        o: msgspec.structs.replace(r, incarnation=worker.incarnation) for o, r in old.items()
    }
    worker.join()
    assert space.probe(KEYS) == bytes(8), "what was given up may only come back empty"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"worker": "w2"}, "access_denied"),
        ({"segments": (SegmentOffer("", 1, "dram", Geometry(CHUNK, CHUNK)),)}, "bad_value"),
        ({"segments": (SegmentOffer("x" * 65, 1, "dram", Geometry(CHUNK, CHUNK)),)}, "bad_value"),
        ({"segments": (SegmentOffer("s", 1, "dram", Geometry(CHUNK, 3)),)}, "bad_value"),
        ({"segments": (SegmentOffer("s", 1, "dram", Geometry(0, CHUNK)),)}, "bad_value"),
        ({"segments": (SegmentOffer("s", 1, "dram", Geometry(CHUNK, CHUNK)),) * 2}, "bad_value"),
        ({"segments": (SegmentOffer("w2-dram", 9, "dram", Geometry(CHUNK, CHUNK)),)}, "bad_value"),
        ({"segments": (SegmentOffer("w1-dram", 0, "dram", Geometry(CHUNK, CHUNK)),)}, "bad_value"),
        ({"addresses": (Address("tcp", "h:1", 1),) * 65}, "bad_value"),
        ({"host": "h" * 513}, "bad_value"),
        ({"rack": "r" * 513}, "bad_value"),
        ({"zone": "z" * 513}, "bad_value"),
        ({"epoch": -1}, "bad_value"),
        ({"epoch": EPOCH_MAX}, "bad_value"),
    ],
)
def test_bad_registrations_change_nothing(rig: Rig, change: dict[str, object], code: str) -> None:
    rig.add_worker("w2")
    message = msgspec.structs.replace(RegisterWorker("w1", "h", (), ()), **change)
    worker = rig.workers["w1"]
    assert failure(worker.ask(message)).code == code
    assert state(rig) is SegmentState.LIVE


def test_where_a_worker_stands_is_as_it_said_last(rig: Rig) -> None:
    worker = rig.workers["w1"]
    offer = SegmentOffer("w1-dram", 1, "dram", worker.geometry)
    for where in (("h1", "r1", "z1"), ("h2", "", "")):
        host, rack, zone = where
        worker.ask(RegisterWorker("w1", host, (), (offer,), rack=rack, zone=zone))
        segment = rig.master.core.segments["w1-dram"]
        assert (segment.host, segment.rack, segment.zone) == where
        status = rig.ask(rig.engine, GetStatus())
        assert isinstance(status, Status)
        assert [(each.host, each.rack, each.zone) for each in status.workers] == [where]


def test_a_worker_that_knows_of_a_higher_epoch_ends_this_one(rig: Rig) -> None:
    """I10: what it remembers of removals, and what it refuses, is by generations of that time."""
    message = RegisterWorker("w1", "h", (), (), epoch=7)
    session = rig.open("worker", "", "w1")
    actions = rig.master.handle(Request(session, 1, message), rig.now)
    assert RaiseEpoch(Epoch(7)) in actions
    refusal = next(each.message for each in actions if isinstance(each, Reply))
    assert failure(refusal).code == "stale_epoch"
    assert state(rig) is SegmentState.LIVE  # of the connection before
    rig.takeover(8)
    session = rig.open("worker", "", "w1")
    assert isinstance(rig.ask(session, message), WorkerAccepted)


def test_a_worker_of_this_epoch_that_nobody_has_met_in_it_ends_it_too(rig: Rig) -> None:
    """I6, I10: a store that was put back comes to one epoch twice, and so would generations."""
    stranger = RegisterWorker("w2", "h", (), (), epoch=1)
    session = rig.open("worker", "", "w2")
    actions = rig.master.handle(Request(session, 1, stranger), rig.now)
    assert RaiseEpoch(Epoch(1)) in actions
    known = RegisterWorker("w1", "h", (), (), epoch=1)
    assert isinstance(rig.ask(rig.open("worker", "", "w1"), known), WorkerAccepted)


def test_a_worker_that_took_another_name_in_this_epoch_goes_on(rig: Rig) -> None:
    rig.workers["w1"].leave()
    rig.pass_time(LOST_S + 0.5)
    moved = (SegmentOffer("w1-dram", 1, "dram", Geometry(CHUNK, CHUNK)),)
    named_anew = RegisterWorker("w2", "h", (), moved, epoch=1)
    assert isinstance(rig.ask(rig.open("worker", "", "w2"), named_anew), WorkerAccepted)


def test_only_workers_register(rig: Rig) -> None:
    assert failure(rig.ask(rig.engine, RegisterWorker("w1", "h", (), ()))).code == "access_denied"
    assert failure(rig.ask(rig.engine, Heartbeat("w1", 1, 0))).code == "access_denied"


def test_a_lost_workers_segment_may_move(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    old = rig.workers.pop("w1")
    old.leave()
    rig.pass_time(LOST_S + 0.5)
    new = rig.add_worker("w2", join=False)
    new.segment, new.records, new.geometry = old.segment, old.records, old.geometry
    new.restart()
    new.incarnation = 2
    new.join()
    assert space.probe(KEYS) == b"\1" * 8
    assert space.match(KEYS).segments[0].worker == "w2"


def test_status_shows_everything(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.plans(chain(2, 2))
    rig.tick(1.0)
    status = rig.ask(rig.engine, GetStatus())
    assert isinstance(status, Status)
    assert (status.pages, status.open_plans, status.namespaces) == (10, 1, 1)
    assert (status.uptime_s, status.sessions) == (1.0, 2)
    (worker,) = status.workers
    assert (worker.worker, worker.state, worker.heard_ago_s) == ("w1", "live", 1.0)
    assert worker.addresses == ("tcp:w1:1",)
    (segment,) = status.segments
    assert segment.sealed_bytes == 8 * 4096
    assert segment.reserved_bytes == 2 * 4096
    parts = (
        segment.free_bytes,
        segment.reserved_bytes,
        segment.sealed_bytes,
        segment.retired_bytes,
        segment.quarantined_bytes,
    )
    assert sum(parts) == segment.capacity_bytes
    assert status.counters["pages_sealed"] == 8
