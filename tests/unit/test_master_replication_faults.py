"""Repair when all goes wrong: what must not go, must not be forgotten, and must not stop."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.membership import InventoryEnd, ReportSegment
from kvstore.wire.messages.puts import Ingest, PeerSource
from kvstore.wire.messages.reads import Lookup
from kvstore.wire.messages.relocation import StartRelocation
from kvstore.wire.messages.replicas import AwaitReplicas, RepairNow, ReplicasCounted, SetReplicas
from master import awaited, census, replication
from master.events import Command, CommandAnswered
from master.lanes import IN_FLIGHT_MAX
from master.state import STEPS_PER_TICK
from master.tunables import Tunables
from master.victims import evict_copy, evict_tail
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import OpenedNamespace, Rig, chain
from tests.unit.relocation_rig import put_at
from tests.unit.replicated_pools import PAGES, copies, got, rig_of, run_of

if TYPE_CHECKING:
    from master.census import Count
    from master.core import Core
    from master.directory import Stretch, Tree
    from master.repair_queue import Need
    from master.run import Run

PARTS = 8
EVERY = tuple(range(PARTS))


@pytest.fixture
def rig() -> Rig:
    """Three workers of three hosts."""
    return rig_of("w1", "w2", "w3")


def full_target(*, leased: bool) -> tuple[Rig, OpenedNamespace]:
    """A second host whose memory is full of replicas of four pages of eight parts."""
    rig = Rig(Tunables(cluster="test", watermark_high=1.0, watermark_low=0.99))
    rig.add_worker("w1", 64)
    rig.add_worker("w2", 2)
    rig.pass_time(17.0)  # the scans that newcomers cause are over
    space = rig.open_namespace(PARTS)
    for number in range(4):
        space.put(chain(number, 1), parts=EVERY)
        rig.pass_time(1.0, 0.1)
    if leased:
        pages = b"".join(chain(number, 1) for number in range(4))
        rig.ask(rig.engine, Lookup(space.id, pages, (), lease=True))
    else:
        rig.pass_time(12.0)
    assert not rig.master.core.segments["w2-dram"].allocator.free_bytes
    return rig, space


def test_pages_that_lack_a_worker_for_hours_stop_nobody() -> None:
    rig = rig_of("w1", "w2")
    rig.checks = False
    worker = rig.workers["w2"]
    worker.ask(ReportSegment(worker.segment, 1, "read_only", "a bad disk"))
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=86_400.0)
    rig.pass_time(3600.0, 31.0)
    (need,) = rig.master.core.replication.queue
    assert need.tries > 10
    need.tries = 2000  # as often as in a day
    rig.pass_time(62.0, 31.0)
    worker.ask(ReportSegment(worker.segment, 1, "serving", ""))
    rig.pass_time(62.0, 31.0)
    assert got(rig) == [2] * PAGES


def test_pages_of_many_parts_wait_for_room_as_long_as_others() -> None:
    rig, space = full_target(leased=True)
    space.put(chain(9, 1), parts=EVERY)
    rig.pass_time(0.3, 0.1)
    (need,) = rig.master.core.replication.queue
    assert (need.reason, need.tries) == ("room", 1), "not once for each part"
    assert not run_of(rig, chain(9, 1)).thinned
    rig.pass_time(30.0)
    assert got(rig, chain(9, 1)) == [2], "the leases have ended meanwhile"


def test_no_more_room_is_made_than_copies_want() -> None:
    rig, space = full_target(leased=False)
    space.put(chain(9, 1), parts=EVERY)
    rig.pass_time(5.0)
    assert got(rig, chain(9, 1)) == [2]
    assert rig.master.core.counters["copies_evicted_dram"] == 1, "one page of eight parts"


@pytest.mark.parametrize("worker", ["w1", "w2"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_no_replica_goes_for_the_sake_of_one_whose_worker_may_be_dead(
    worker: str, *, is_cut: bool
) -> None:
    rig = rig_of("w1", "w2")
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    assert got(rig) == [2] * PAGES
    rig.ask(rig.open("operator", "", "kvharbor"), SetReplicas(space.id, 1))
    rig.pass_time(13.5)
    dead = rig.workers[worker]
    if is_cut:
        rig.pass_time(1.0)
        dead.leave()
    else:
        dead.session = None  # a machine that is gone: its connection seems to be there
    rig.pass_time(10.0)
    assert rig.master.core.counters["workers_lost"] == 1
    assert space.probe(KEYS) == b"\1" * PAGES
    dead.connect()
    dead.offer()
    dead.ask(InventoryEnd(dead.segment, dead.incarnation))
    rig.pass_time(60.0)
    assert got(rig) == [1] * PAGES, "both are there: one too many"


@pytest.mark.parametrize("is_there", [True, False])
def test_pages_whose_worker_was_away_for_a_moment_are_not_forgotten(*, is_there: bool) -> None:
    rig = rig_of("w1", "w2")
    space = rig.open_namespace()
    rig.holds_moves = True
    space.put(KEYS)
    rig.pass_time(0.3)
    rig.holds_moves = False
    worker = rig.workers[run_of(rig).copies[0].segment.worker]
    worker.leave()
    worker.connect()
    (move,) = rig.moves
    rig.send(CommandAnswered(move.command, None))  # the copy has failed
    rig.pass_time(2.0)
    (need,) = rig.master.core.replication.queue
    assert need.presses
    if is_there:
        worker.offer()
        worker.ask(InventoryEnd(worker.segment, worker.incarnation))
    else:
        worker.leave()
    rig.pass_time(4.0)
    assert not len(rig.master.core.replication.queue)
    if is_there:
        assert got(rig) == [2] * PAGES


def test_a_drain_waits_where_all_that_is_left_may_be_dead() -> None:
    rig = rig_of("w1", "w2", "w3")
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    drained, dead = (copy.segment.worker for copy in run_of(rig).copies)
    operator = rig.open("operator", "", "kvharbor")
    rig.ask(operator, SetReplicas(space.id, 1))
    rig.workers[dead].session = None
    rig.pass_time(1.2)
    rig.ask(operator, StartRelocation("drain", source=drained))
    rig.pass_time(8.0)
    assert rig.master.core.counters["workers_lost"] == 1
    assert space.probe(KEYS) == b"\1" * PAGES
    assert {copy.segment.worker for copy in run_of(rig).copies}.isdisjoint({drained, dead})


@pytest.mark.parametrize(
    ("parts", "segments", "count"), [(1, 2, 8), (4, 2, 2), (16, 2, 1), (1, 6, 2), (1, 20, 1)]
)
def test_a_look_serves_the_fewer_pages_the_more_parts_and_segments_there_are(
    parts: int, segments: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "SEGMENTS_FOR_PART", 2 if segments > 2 else 64)
    rig = rig_of(*(f"w{number}" for number in range(segments)))
    rig.checks = False
    space = rig.open_namespace(parts)
    for number in range(12):
        space.put(chain(number, 1), parts=tuple(range(parts)))
    served: list[Need] = []

    def serve(core: Core, need: Need) -> int:
        served.append(need)
        core.replication.queue.done(need)
        return parts

    monkeypatch.setattr(replication, "_serve", serve)
    rig.tick(0.05)
    assert len(served) == count


def test_a_scan_looks_at_the_fewer_pages_at_once_the_more_parts_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of("w1", "w2")
    space = rig.open_namespace(8)
    for number in range(9):
        space.put(chain(number, 1), parts=EVERY)
    rig.pass_time(2.0)
    seen: list[Run] = []

    def look_at(_core: Core, _tree: Tree, run: Run, _count: Count, *, presses: bool) -> None:
        assert not presses
        seen.append(run)

    monkeypatch.setattr(census, "_look_at", look_at)
    rig.master.core.replication.want_scan(rig.now)
    looks = [0]
    while len(seen) < 9:
        rig.tick(0.5)
        looks.append(len(seen))
    assert max(b - a for a, b in pairwise(looks)) <= 2 * STEPS_PER_TICK
    assert len(set(map(id, seen))) == 9


@pytest.mark.parametrize("comes", [True, False])
def test_a_new_master_waits_for_the_workers_of_the_last_one(*, comes: bool) -> None:
    rig = rig_of("w1", "w2", "w3")
    space = rig.open_namespace()
    for number in range(8):
        space.put(chain(number, 4))
    rig.pass_time(6.0)
    assert copies(rig) == 8
    rig.takeover(2)
    rig.workers["w1"].join()
    rig.workers["w2"].join()
    rig.pass_time(3.0)
    assert not copies(rig), "most come back"
    if comes:
        rig.workers["w3"].join()
    rig.pass_time(30.0)
    assert bool(copies(rig)) is not comes
    there = [got(rig, run.keys[:32]) for run in rig.master.core.tree(1).all_runs()]
    assert there == [[2] * 4] * len(there)


def mixed(rig: Rig, space: OpenedNamespace) -> list[str]:
    """Three workers, of which the first has all of KEYS, the others half of them each."""
    rig.ask(rig.open("operator", "", "kvharbor"), SetReplicas(space.id, 3))
    space.put(KEYS)
    rig.pass_time(13.0)  # so that no lease of what was copied runs
    run = run_of(rig)
    segments = [copy.segment for copy in run.copies]
    for page in range(PAGES):
        assert evict_copy(rig.master.core, segments[1 + (page < PAGES // 2)], run, page)
    assert got(rig) == [2] * PAGES
    run.thinned = False
    return [segment.worker for segment in segments]


def test_pages_that_lie_in_different_places_each_get_one_more(rig: Rig) -> None:
    space = rig.open_namespace()
    mixed(rig, space)
    space.match(KEYS)
    rig.ask(rig.open("operator", "", "kvharbor"), RepairNow(space.id))
    rig.pass_time(3.0)
    assert got(rig) == [3] * PAGES


def test_a_drain_copies_each_page_where_it_is_not_yet(rig: Rig) -> None:
    space = rig.open_namespace()
    drained, *_ = mixed(rig, space)
    operator = rig.open("operator", "", "kvharbor")
    rig.ask(operator, SetReplicas(space.id, 2))
    before = copies(rig)
    rig.ask(operator, StartRelocation("drain", source=drained))
    rig.pass_time(0.1, 0.05)
    assert copies(rig) == before + 2, "by the drain, before anything goes"
    rig.pass_time(3.0)
    assert not rig.workers[drained].records
    assert got(rig) == [2] * PAGES


def test_a_replica_that_eviction_takes_beside_a_hole_is_not_made_again(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    space.remove(KEYS[: 32 * (PAGES - 1)])
    rig.pass_time(11.0)
    run = run_of(rig, KEYS[-32:])
    assert got(rig, KEYS[-32:])[-1] == 2
    assert evict_tail(rig.master.core, run.copies[0].segment, run, PAGES * 4096)
    rig.tick()
    assert run.thinned, "nor forgotten (I34)"


def test_what_was_thinned_out_and_lost_besides_is_made_again() -> None:
    rig = rig_of("w1", "w2", "w3", "w4")
    space = rig.open_namespace()
    rig.ask(rig.open("operator", "", "kvharbor"), SetReplicas(space.id, 3))
    space.put(KEYS)
    rig.pass_time(13.0)
    run = run_of(rig)
    thinned, lost, _ = (copy.segment for copy in run.copies)
    for page in range(PAGES):
        assert evict_copy(rig.master.core, thinned, run, page)
    rig.pass_time(20.0)
    assert got(rig) == [2] * PAGES, "eviction has decided"
    rig.workers[lost.worker].leave()
    rig.pass_time(25.0)
    assert got(rig) == [3] * PAGES


def test_nobody_waits_for_replicas_on_hosts_that_have_gone() -> None:
    rig = rig_of("w1", "w2")
    worker = rig.workers["w2"]
    worker.ask(ReportSegment(worker.segment, 1, "read_only", "a bad disk"))
    space = rig.open_namespace()
    space.put(KEYS)
    assert rig.ask(rig.engine, AwaitReplicas(space.id, KEYS, 60.0)) is None
    request = rig.last_request
    worker.leave()
    rig.pass_time(5.0)
    counted = rig.reply(rig.engine, request)
    assert counted == ReplicasCounted(bytes([1]) * PAGES, bytes([1]) * PAGES)


def test_a_slow_worker_holds_up_its_own_pages_only() -> None:
    rig = rig_of("w1", "w2", "w3", "w4")
    space = rig.open_namespace()
    rig.holds_moves = True
    put_at(rig, space, "w3", KEYS)
    for number in range(30, 50):
        put_at(rig, space, "w1", chain(number, 4))
        space.match(chain(number, 4))  # so that they are hotter
    slow: list[Command] = []
    for _ in range(40):
        rig.pass_time(0.05, 0.05)
        told, rig.moves = rig.moves, []
        for move in told:
            assert isinstance(move.message, Ingest)
            assert isinstance(move.message.source, PeerSource)
            if move.message.source.segment.worker == "w1":
                slow.append(move)
            else:
                rig.obey(move)
    assert len(slow) == IN_FLIGHT_MAX
    assert got(rig) == [2] * PAGES
    rig.holds_moves = False
    for move in slow:
        rig.obey(move)
    rig.pass_time(2.0)
    assert got(rig, chain(49, 1)) == [2] * 4


def test_who_waits_for_replicas_of_pages_that_were_thinned_out_gets_them(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(13.0)
    run = run_of(rig)
    for page in range(PAGES):
        assert evict_copy(rig.master.core, run.copies[0].segment, run, page)
    assert rig.ask(rig.engine, AwaitReplicas(space.id, KEYS, 5.0)) is None
    request = rig.last_request
    rig.pass_time(1.0)
    counted = rig.reply(rig.engine, request)
    assert counted == ReplicasCounted(bytes([2]) * PAGES, bytes([2]) * PAGES)


def test_who_waits_for_many_pages_is_not_counted_anew_for_each(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "PAGES_AT_ONCE", 2)
    space = rig.open_namespace()
    rig.holds_moves = True
    chains = [chain(number, 1) for number in range(8)]
    for keys in chains:
        space.put(keys)
    assert rig.ask(rig.engine, AwaitReplicas(space.id, b"".join(chains), 50.0)) is None
    request = rig.last_request
    looked: list[Run] = []
    got_of = awaited._got  # noqa: SLF001 -- counts how often it is asked

    def counted(core: Core, tree: Tree, stretch: Stretch) -> bytes:
        looked.append(stretch.run)
        return got_of(core, tree, stretch)

    monkeypatch.setattr(awaited, "_got", counted)
    for _ in range(100):
        rig.pass_time(0.05, 0.05)
        told, rig.moves = rig.moves, []
        for move in told:
            rig.obey(move)
            rig.settle()
    assert rig.reply(rig.engine, request) == ReplicasCounted(bytes([2]) * 8, bytes([2]) * 8)
    assert len(looked) <= 3 * 8
