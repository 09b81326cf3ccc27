"""Interleavings of workers and masters that are lost and return (I6, I10, I11, I12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.client.outcomes import Hit, MissReason, Refused, RefusedReason, Stored
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import (
    FenceExtents,
    FreeExtents,
    InventoryWanted,
    OfferInventory,
)
from kvstore.wire.messages.puts import Ingest, Sealed
from tests.simulation.pages import SMALL
from tests.simulation.scans import scan

if TYPE_CHECKING:
    from kvstore.page import PageChain
    from kvstore.record import Record
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

T_S = limits.WORKER_LOST_AFTER_S
QUARANTINED, RESERVED, SEALED = (
    ExtentState.QUARANTINED,
    ExtentState.RESERVED,
    ExtentState.SEALED,
)


def records_of(scene: Scene, worker: int = 0) -> list[Record]:
    """What a worker's memory holds."""
    return scene.worker(worker).memories[f"worker{worker}-dram"].all_records()


def holder_of(scene: Scene, chain: PageChain) -> str:
    """The worker that holds a chain's first page."""
    return scene.checks.history.pages[chain.key(0)].sealed[-1].segment.removesuffix("-dram")


# --- the self-fence ---


def test_a_worker_without_contact_takes_no_puts_and_serves_reads(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, hosts=2)
    chain = scene.chain(4)
    scene.stored(chain)
    scene.run(0.6)
    found = scene.match(chain)
    scene.hold(Ingest)
    put = scene.put(scene.chain(2, 1), timeout_s=20.0)
    scene.run(0.2)
    scene.cut_off("worker0")
    scene.run(T_S / 2 + limits.HEARTBEAT_INTERVAL_S)
    assert scene.worker_core().is_fenced(scene.world.now)
    scene.release()
    scene.run(0.3)
    assert len(records_of(scene)) == 4  # nothing was written
    assert scene.finish(scene.read(found)[0]) == [Hit()] * 4
    scene.world.cut.clear()
    scene.finish(put)


def test_contact_lifts_the_fence(scene: Scene) -> None:
    scene.cut_off("worker0")
    scene.run(T_S / 2 + limits.HEARTBEAT_INTERVAL_S)
    assert scene.worker_core().is_fenced(scene.world.now)
    scene.world.cut.clear()
    scene.settle()
    assert not scene.worker_core().is_fenced(scene.world.now)
    assert scene.stored(scene.chain(2)) == [Stored()] * 2


def test_a_pull_that_runs_when_the_fence_falls_ends(scene: Scene) -> None:
    scene.worker().copy_delay_max_s = 1.0
    put = scene.put(scene.chain(8), timeout_s=30.0)
    scene.run_until(lambda: bool(scene.worker().pulls))
    scene.cut_off("worker0")
    scene.run(T_S / 2 + 1.5)
    assert not scene.worker().pulls
    scene.worker().copy_delay_max_s = 0.002
    scene.world.cut.clear()
    assert scene.finish(put) == [Stored()] * 8


def test_a_worker_paused_beyond_t_does_no_harm_when_it_goes_on(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2, clients=2)
    chain = scene.chain(8)
    for worker in scene.simulation.workers.values():
        worker.copy_delay_max_s = 0.2
    put = scene.put(chain, timeout_s=30.0)
    scene.run_until(lambda: any(w.pulls for w in scene.simulation.workers.values()))
    (name,) = {plan.segment.worker for plan in scene.core.plans.values()}
    scene.world.pause(name)
    scene.run(T_S + 1.0)
    assert scene.core.workers[name].lost
    assert len(scene.finish(put)) == 8
    scene.world.resume(name)
    scene.settle()
    scan(scene.checks)
    assert scene.read_all(chain) == [Hit()] * 8


# --- loss and return ---


def test_pages_of_a_lost_worker_are_misses_and_return_with_it(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.simulation.crash("worker0")
    scene.run(T_S + 0.5)
    assert scene.match(chain).pages == 0
    scene.simulation.restart("worker0")
    scene.settle()
    assert scene.read_all(chain) == [Hit()] * 4


def test_a_returning_worker_fills_a_hole(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2)
    chain = scene.chain(4)
    scene.stored(chain.slice(0, 2))
    first = holder_of(scene, chain)
    scene.run(0.1)
    scene.stored(chain)  # the rest goes where there is more room
    assert holder_of(scene, chain.slice(2, 4)) != first
    scene.simulation.crash(first)
    scene.run(T_S + 0.5)
    assert scene.probe(chain) == [False, False, True, True]
    assert scene.match(chain).pages == 0
    scene.simulation.restart(first)
    scene.settle()
    assert scene.match(chain).pages == 4


def test_an_old_reference_into_a_new_life_is_a_miss(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    found = scene.match(chain)
    scene.simulation.crash("worker0")
    scene.simulation.restart("worker0")
    scene.settle()
    outcomes = scene.finish(scene.read(found)[0])
    assert {getattr(outcome, "reason", None) for outcome in outcomes} == {MissReason.STALE}
    assert scene.read_all(chain) == [Hit()] * 2  # in its new life it is found


def test_a_damaged_record_is_not_adopted(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    record = next(r for r in records_of(scene) if r.key == chain.key(0))
    memory = scene.worker().memories["worker0-dram"]
    memory.flip_record_bit(scene.world.random, record)
    scene.simulation.crash("worker0")
    scene.simulation.restart("worker0")
    scene.settle()
    assert scene.probe(chain) == [False, True]


def test_what_was_being_written_when_a_worker_died_is_not_adopted(scene: Scene) -> None:
    scene.worker().copy_delay_max_s = 1.0
    scene.put(scene.chain(4), timeout_s=2.0)
    scene.run_until(lambda: bool(records_of(scene)))
    assert {r.state for r in records_of(scene)} == {RecordState.RESERVED}
    scene.simulation.crash("worker0")
    scene.worker().copy_delay_max_s = 0.002
    scene.simulation.restart("worker0")
    assert records_of(scene) == []


def test_a_put_of_a_lost_worker_goes_elsewhere_and_its_extents_are_fenced_on_return(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(workers=2)
    chain = scene.chain(4)
    scene.hold(Sealed)
    put = scene.put(chain, timeout_s=40.0)
    scene.run(0.5)  # sealed there, and nobody knows
    (name,) = {plan.segment.worker for plan in scene.core.plans.values()}
    scene.cut_off(name)
    scene.lose_held()
    scene.run(T_S + 1.0)
    scene.world.cut.clear()
    scene.finish(put)
    scene.settle()
    scene.run(15.0)
    assert scene.bytes_in(QUARANTINED, 0) == scene.bytes_in(QUARANTINED, 1) == 0
    assert scene.read_all(chain) == [Hit()] * 4


def test_a_lost_workers_extents_leave_all_counts(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2)
    scene.hold(Ingest)
    scene.put(scene.chain(6), timeout_s=3.0)
    scene.run(0.2)
    (name,) = {plan.segment.worker for plan in scene.core.plans.values()}
    scene.simulation.crash(name)
    scene.run(T_S + 0.5)
    assert not [p for p in scene.core.plans.values() if p.segment.worker == name]
    scene.lose_held()
    assert scene.stored(scene.chain(10, 1)) == [Stored()] * 10  # the other segment takes puts
    scene.simulation.restart(name)


def test_a_command_for_another_life_is_refused(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    generation = scene.checks.history.pages[chain.key(0)].sealed[0].generation
    scene.simulation.crash("worker0")
    scene.simulation.restart("worker0")
    scene.settle()
    free = FreeExtents(1, "worker0-dram", 1, SMALL, bytes(8), generation.to_bytes(8, "little"))
    assert scene.command(free) == bytes((Outcome.STALE,))
    assert len(records_of(scene)) == 2


# --- takeovers ---


def test_no_sealed_page_is_lost_when_the_master_dies(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2)
    chains = [scene.chain(4, number) for number in range(5)]
    for chain in chains:
        scene.stored(chain)
    scene.take_over()
    for chain in chains:
        assert scene.read_all(chain) == [Hit()] * 4


def test_a_seal_that_the_old_leader_never_heard_of_is_adopted(scene: Scene) -> None:
    chain = scene.chain(3)
    scene.hold(Sealed)
    scene.put(chain, timeout_s=2.0)
    scene.run(0.5)
    assert {r.state for r in records_of(scene)} == {RecordState.SEALED}
    scene.lose_held()
    scene.take_over()
    assert scene.probe(chain) == [True] * 3


def test_a_seal_reported_to_the_new_leader_is_known_to_it(scene: Scene) -> None:
    chain = scene.chain(3)
    scene.hold(Sealed)
    put = scene.put(chain, timeout_s=20.0)
    scene.run(0.5)
    scene.replace_master()
    scene.release()
    assert len(scene.finish(put)) == 3
    scene.settle()
    assert scene.probe(chain) == [True] * 3
    assert not scene.worker_core().pulls.unreported


def test_nothing_listed_is_reused_until_old_leases_have_ended(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2)
    chain = scene.chain(16)
    scene.stored(chain)
    found = scene.match(chain.slice(0, 12))
    leased_s = scene.world.now
    scene.take_over()
    put = scene.put(scene.chain(8, 1), client=1, timeout_s=30.0)
    scene.run(3.0)
    assert scene.finish(scene.read(found)[0]) == [Hit()] * 12
    scene.run_until(lambda: put.is_over)
    assert scene.world.now >= leased_s + limits.LEASE_TTL_MAX_S
    assert scene.finish(put) == [Stored()] * 8


def test_running_pulls_end_before_the_inventory_is_offered(scene: Scene) -> None:
    scene.worker().copy_delay_max_s = 3.0
    scene.put(scene.chain(6), timeout_s=8.0)
    scene.run_until(lambda: bool(scene.worker().pulls))
    scene.hold(OfferInventory)
    scene.replace_master()
    scene.run_until(lambda: bool(scene.world.held))
    assert not scene.worker().pulls
    assert not scene.worker_core().holdings.works
    scene.worker().copy_delay_max_s = 0.002
    scene.release()
    scene.settle()


def test_no_pull_starts_between_the_offer_and_its_answer(scene: Scene) -> None:
    scene.hold(Ingest)
    scene.put(scene.chain(2), timeout_s=3.0)
    scene.run(0.2)
    scene.hold(InventoryWanted, Ingest)
    scene.worker().links.close()
    scene.run_until(lambda: any(scene.held_messages(InventoryWanted)))
    scene.world.holds = None
    for let_go in scene.world.held[:-1]:
        let_go()  # the ingest comes
    scene.world.held = scene.world.held[-1:]
    scene.run(0.2)
    assert records_of(scene) == []  # not even RESERVED
    scene.release()
    scene.run(5.0)


def test_a_command_of_an_old_leader_is_refused(scene: Scene) -> None:
    chain = scene.chain(3)
    scene.stored(chain)
    generation = scene.checks.history.pages[chain.key(0)].sealed[0].generation
    scene.take_over()
    stale = FreeExtents(1, "worker0-dram", 1, SMALL, bytes(8), generation.to_bytes(8, "little"))
    assert scene.command(stale) == bytes((Outcome.FENCED,))
    assert len(records_of(scene)) == 3
    assert scene.read_all(chain) == [Hit()] * 3


def test_plans_of_an_old_leader_are_refused_by_the_worker(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Ingest)
    put = scene.put(chain, timeout_s=20.0)
    scene.run(0.2)
    scene.take_over()
    scene.release()  # of epoch 1
    assert scene.finish(put) == [Stored()] * 2
    assert {p.generation >> 32 for p in scene.checks.history.pages[chain.key(0)].sealed} == {2}


# --- the bound on quarantine ---


def test_a_full_quarantine_stops_puts_into_that_segment_only(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2, clients=2)
    scene.hold(FenceExtents, Ingest)
    scene.put(scene.chain(8), timeout_s=3.0)
    scene.run(0.2)
    (name,) = {plan.segment.worker for plan in scene.core.plans.values()}
    scene.simulation.crash("client0")
    scene.run(1.0)
    scene.hold(FenceExtents)
    assert scene.bytes_in(QUARANTINED, int(name[-1])) == 8 * SMALL
    chain = scene.chain(4, 1)
    assert scene.stored(chain, client=1) == [Stored()] * 4
    assert holder_of(scene, chain) != name
    scene.release()


def test_a_pool_whose_quarantine_is_full_says_so(scene: Scene) -> None:
    scene.hold(FenceExtents, Ingest)
    scene.put(scene.chain(8), timeout_s=3.0)
    scene.run(0.2)
    scene.simulation.crash("client0")
    scene.run(1.0)
    (outcome,) = scene.stored(scene.chain(1, 1), client=1, timeout_s=1.0)
    assert isinstance(outcome, Refused)
    assert outcome.reason is RefusedReason.QUARANTINE_FULL
    scene.lose_held()


def test_what_only_a_reader_holds_does_not_count_as_quarantined(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2)
    memory = scene.worker().memories["worker0-dram"]
    scene.hold(Ingest)
    scene.put(scene.chain(8), timeout_s=3.0)
    scene.run(0.2)
    assert memory.try_shared("client1", 0, 8 * SMALL)
    scene.lose_held()
    scene.simulation.crash("client0")
    scene.run(2.0)
    assert scene.bytes_in(QUARANTINED) == 8 * SMALL
    assert len(scene.core.segments["worker0-dram"].held) == 8
    assert scene.stored(scene.chain(4, 1), client=1) == [Stored()] * 4
    memory.drop_locks("client1")
    scene.run(1.0)
    assert scene.bytes_in(QUARANTINED) == 0
