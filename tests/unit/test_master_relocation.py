"""Drains: what they leave where, that no page is lost, and how often what is stuck is looked at."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.pins import PagesPinned, PinPages
from kvstore.wire.messages.relocation import CancelRelocation, Relocations, RelocationState
from master import relocating, relocation
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig, chain
from tests.unit.relocation_rig import PAGES_OF_CHUNK, holders, is_empty, made, put_at, row_of, start
from tests.unit.striped_pools import is_whole, pool, striped, stripes, tunables

if TYPE_CHECKING:
    from master.directory import Stretch
    from master.run import Copy


@pytest.fixture
def rig() -> Rig:
    return made(16, 16, 16)


def test_a_drain_copies_what_lies_nowhere_else_and_leaves_nothing(rig: Rig) -> None:
    space = rig.open_namespace()
    chains = [chain(number, 8) for number in range(6)]
    for keys in chains:
        put_at(rig, space, "w1", keys)
    row = start(rig, "drain", source="w1")
    assert (row.state, row.left_pages) == ("running", 48)
    rig.pass_time(15.0)
    assert is_empty(rig, "w1")
    assert all(space.probe(keys) == b"\1" * 8 for keys in chains)
    row = row_of(rig, row.id)
    assert (row.state, row.done_pages, row.left_bytes) == ("done", 48, 0)
    assert "worker w1 is drained: nothing lies there any more" in rig.notes
    assert rig.master.core.counters["copies_gone_by_drain"] == 48


def test_every_tier_is_emptied_to_whatever_tiers_the_others_have() -> None:
    rig = Rig(Tunables(cluster="test", replicas=1, nvme_admission="none"))
    worker = rig.add_worker("w1", chunks=4, nvme_chunks=4, join=False)
    worker.tier = "hbm"
    rig.add_worker("w2", chunks=16, nvme_chunks=16)
    worker.join()
    space = rig.open_namespace()
    hot, cold = chain(1, 8), chain(2, 8)
    for keys, tier in ((hot, "hbm"), (cold, "nvme")):
        put_at(rig, space, "w1", keys, tier)
    assert [len(each.records) for each in worker.segments] == [8, 8]
    row = start(rig, "drain", source="w1")
    assert row.left_pages == 16
    rig.pass_time(15.0)
    assert row_of(rig, row.id).state == "done"
    assert [len(each.records) for each in worker.segments] == [0, 0]
    for keys, tier in ((hot, "dram"), (cold, "nvme")):
        (segment,) = space.match(keys, lease=False).segments
        assert (segment.worker, segment.tier) == ("w2", tier)


def test_a_drained_worker_takes_nothing_until_the_drain_is_cancelled(rig: Rig) -> None:
    space = rig.open_namespace()
    row = start(rig, "drain", source="w1")
    rig.pass_time(1.0)
    for number in range(6):
        space.put(chain(number, 8))
    assert is_empty(rig, "w1")
    operator = rig.open("operator", "", "kvharbor")
    reply = rig.ask(operator, CancelRelocation(row.id))
    assert isinstance(reply, Relocations)
    assert reply.rows[0].state == "undone", "it was done before"
    assert not any(key.startswith("relocations/") for key in rig.store)
    for number in range(6, 12):
        space.put(chain(number, 8))
    assert not is_empty(rig, "w1")
    assert rig.ask(operator, CancelRelocation(row.id)) == reply


def test_reads_go_on_and_leased_extents_stay_until_the_lease_has_ended(rig: Rig) -> None:
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    located = space.match(KEYS)
    assert {ref.worker for ref in located.segments} == {"w1"}
    row = start(rig, "drain", source="w1")
    rig.pass_time(rig.tunables.lease_ttl_s - 1.0)
    assert holders(space, KEYS) <= {"w2", "w3"}
    assert not is_empty(rig, "w1")
    assert row_of(rig, row.id).state == "running"
    rig.pass_time(8.0)
    assert is_empty(rig, "w1")
    assert row_of(rig, row.id).state == "done"


def test_what_has_its_replicas_elsewhere_is_not_copied() -> None:
    rig = made(16, 16, 16, tunables=Tunables(cluster="test", replicas=2))
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(5.0)
    (first, second) = sorted(holders(space, KEYS))
    (third,) = {"w1", "w2", "w3"} - {first, second}
    start(rig, "copy", namespace=space.id, target=third)
    rig.pass_time(2.0)
    copied = rig.master.core.counters["moves_copy"]
    start(rig, "drain", source=first)
    rig.pass_time(15.0)
    assert is_empty(rig, first)
    assert holders(space, KEYS) == {second, third}
    assert rig.master.core.counters["moves_copy"] == copied


def test_replicas_are_kept_where_there_is_a_host_for_them() -> None:
    rig = made(16, 16, 16, tunables=Tunables(cluster="test", replicas=2))
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(5.0)
    first, second = sorted(holders(space, KEYS))
    start(rig, "drain", source=first)
    rig.pass_time(15.0)
    assert is_empty(rig, first)
    assert holders(space, KEYS) == {"w1", "w2", "w3"} - {first}
    start(rig, "drain", source=second)
    rig.pass_time(15.0)
    assert is_empty(rig, second)
    assert space.probe(KEYS) == b"\1" * 8


def test_both_workers_of_a_host_can_be_drained_to_a_third_of_it() -> None:
    rig = made(16, 16, 16)
    for worker in rig.workers.values():
        rig.master.core.workers[worker.name].host = "h"
        for segment in rig.master.core.segments.values():
            segment.host = "h"
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    start(rig, "drain", source="w1")
    start(rig, "drain", source="w2")
    rig.pass_time(15.0)
    assert holders(space, KEYS) == {"w3"}


def test_what_is_sealed_after_the_drain_began_goes_too(rig: Rig) -> None:
    space = rig.open_namespace()
    plans = space.plans(KEYS)
    (worker,) = {ref.worker for ref in plans.segments}
    row = start(rig, "drain", source=worker)
    rig.pass_time(2.0)
    assert row_of(rig, row.id).state == "running"
    assert not any(map(any, space.report(space.write(plans, KEYS))))
    rig.pass_time(15.0)
    assert row_of(rig, row.id).state == "done"
    assert is_empty(rig, worker)
    assert space.probe(KEYS) == b"\1" * 8


def test_pages_without_room_elsewhere_stay_and_the_drain_says_so() -> None:
    rig = made(4, 1, tunables=Tunables(cluster="test", replicas=1, pin_quota=1.0))
    space = rig.open_namespace()
    put_at(rig, space, "w1", chain(1, 24))
    pinned = rig.ask(rig.engine, PinPages(space.id, chain(1, 24), "o", True, 600.0))
    assert isinstance(pinned, PagesPinned)
    row = start(rig, "drain", source="w1")
    rig.pass_time(20.0)
    row = row_of(rig, row.id)
    assert (row.state, row.reason) == ("running", "no room")
    assert row.stuck_pages == row.left_pages == 24 - PAGES_OF_CHUNK
    assert space.probe(chain(1, 24)) == b"\1" * 24
    rig.add_worker("w3", chunks=4)
    rig.pass_time(20.0)
    assert row_of(rig, row.id).state == "done"
    assert space.probe(chain(1, 24)) == b"\1" * 24


def test_a_drain_goes_on_under_the_next_master(rig: Rig) -> None:
    space = rig.open_namespace()
    for number in range(6):
        put_at(rig, space, "w1", chain(number, 8))
    rig.holds_moves = True
    row = start(rig, "drain", source="w1")
    rig.pass_time(1.0)
    rig.holds_moves = False
    rig.pass_time(1.0)
    rig.takeover(2)
    rig.workers["w2"].join()
    rig.workers["w1"].join()
    rig.workers["w3"].join()
    again = rig.open_namespace()
    rig.pass_time(40.0)
    assert row_of(rig, row.id).state == "done"
    assert is_empty(rig, "w1")
    assert all(again.probe(chain(number, 8)) == b"\1" * 8 for number in range(6))
    assert again.put(chain(99, 8)).segments[0].worker != "w1"


def test_a_worker_that_was_away_is_emptied_when_it_is_back(rig: Rig) -> None:
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    worker = rig.workers["w1"]
    worker.leave()
    row = start(rig, "drain", source="w1")
    rig.pass_time(1.0)
    away = row_of(rig, row.id)
    assert (away.reason, away.eta_s) == ("worker w1 is not there", inf)
    rig.pass_time(10.0)
    lost = row_of(rig, row.id)
    assert (lost.left_bytes, lost.eta_s) == (0, inf)
    worker.restart()
    worker.join()
    rig.pass_time(40.0)
    assert row_of(rig, row.id).state == "done"
    assert is_empty(rig, "w1")
    assert space.probe(KEYS) == b"\1" * 8


def test_a_drained_worker_that_starts_anew_stays_empty(rig: Rig) -> None:
    space = rig.open_namespace()
    row = start(rig, "drain", source="w1")
    rig.pass_time(1.0)
    assert row_of(rig, row.id).state == "done"
    worker = rig.workers["w1"]
    worker.leave()
    worker.restart()
    worker.join()
    for number in range(6):
        space.put(chain(number, 8))
    assert is_empty(rig, "w1")
    rig.pass_time(2.0)
    assert row_of(rig, row.id).state == "done"


def test_one_step_does_a_bounded_part(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocating, "RUNS_PER_STEP", 1)
    monkeypatch.setattr(relocating, "COPYING_MAX", 1)
    space = rig.open_namespace()
    for number in range(4):
        put_at(rig, space, "w1", chain(number, 8))
    row = start(rig, "drain", source="w1")
    rig.holds_moves = True
    rig.pass_time(1.0)
    assert len(rig.moves) == 1
    rig.holds_moves = False
    rig.obey(rig.moves.pop())
    rig.pass_time(40.0)
    assert row_of(rig, row.id).state == RelocationState.DONE


def test_rates_and_the_time_that_is_left(rig: Rig) -> None:
    tunables = Tunables(cluster="test", replicas=1, copy_bytes_per_s=16 * 1024)
    rig = made(16, 16, tunables=tunables)
    space = rig.open_namespace()
    for number in range(8):
        put_at(rig, space, "w1", chain(number, 8))
    row = start(rig, "drain", source="w1")
    rig.pass_time(8.0)
    row = row_of(rig, row.id)
    assert 0 < row.bytes_per_s < 40_000
    assert row.eta_s == pytest.approx(row.left_bytes / row.bytes_per_s)


def test_what_is_stuck_is_looked_at_the_less_often_the_more_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relocating, "EXTENTS_PER_STEP", 1)
    monkeypatch.setattr(relocation, "REST_OF_STEP_S", 0.25)
    pool = made(4, 1, tunables=Tunables(cluster="test", replicas=1, pin_quota=1.0))
    looks: list[float] = []
    judge = relocating.Visit.judge

    def counted(self: relocating.Visit, stretch: Stretch, copy: Copy) -> float:
        looks.append(pool.now)
        return judge(self, stretch, copy)

    monkeypatch.setattr(relocating.Visit, "judge", counted)
    space = pool.open_namespace()
    put_at(pool, space, "w1", chain(1, 32))
    reply = pool.ask(pool.engine, PinPages(space.id, chain(1, 32), "o", True, 600.0))
    assert isinstance(reply, PagesPinned)
    start(pool, "drain", source="w1")
    pool.pass_time(30.0)
    begun = sorted(set(looks))[-6:]
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert max(gaps) == pytest.approx(relocation.REST_S + 16 * 0.25, abs=0.5)


def test_pages_of_a_stripe_are_copied_once_to_a_host_without_another_of_it() -> None:
    rig = pool(6, tunables(2, 2, replicas=2))
    keys = striped(rig, 8, wait_s=20.0)
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))
    core = rig.master.core
    held = len(rig.workers["w1"].records)
    assert held > 0
    copied = core.counters["copied_pages_nvme"]
    row = start(rig, "drain", source="w1")
    rig.pass_time(30.0)
    assert row_of(rig, row.id).state == "done"
    assert core.counters["copied_pages_nvme"] == copied + held
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))
    assert rig.open_namespace().probe(b"".join(keys)) == b"\1" * 8


def test_nothing_goes_for_the_sake_of_a_worker_that_may_be_dead(rig: Rig) -> None:
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    start(rig, "copy", namespace=space.id, target="w2")
    rig.pass_time(3.0)
    rig.workers["w2"].leave()
    row = start(rig, "move", source="w1", target="w2")
    rig.pass_time(20.0)
    assert not is_empty(rig, "w1")
    assert space.probe(KEYS) == b"\1" * 8
    assert row_of(rig, row.id).reason == "worker w2 is not there"
