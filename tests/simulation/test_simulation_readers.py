"""Interleavings of readers with all that may happen to a page under them (I1, I4, I8, I9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.outcomes import Hit, Miss, MissReason, Stored
from kvstore.limits import LEASE_MARGIN_S
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.wire.messages.membership import FreeExtents
from kvstore.wire.messages.puts import Sealed
from tests.simulation.pages import SMALL
from tests.simulation.store import EXCLUSIVE

if TYPE_CHECKING:
    from kvstore.page import PageChain
    from kvstore.record import Record
    from tests.simulation.conftest import MakeScene
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.scene import Scene

SEALED, RETIRED = ExtentState.SEALED, ExtentState.RETIRED
LEASE_S = 10.0


def memory_of(scene: Scene, worker: int = 0) -> SegmentMemory:
    """The memory of a worker's segment."""
    return scene.worker(worker).mapped[f"worker{worker}-dram"]


def record_of(scene: Scene, key: bytes, worker: int = 0) -> Record:
    """The record of a page."""
    return next(r for r in memory_of(scene, worker).all_records() if r.key == key)


def fill_over(scene: Scene, chain: PageChain) -> None:
    """Put other pages, once `chain` has expired, where it was."""
    scene.run_until(lambda: not any(scene.probe(chain, client=1)))
    for number in range(50, 56):
        scene.stored(scene.chain(4, number), client=1)


# --- leases ---


def test_a_leased_page_stays_while_others_need_room(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=LEASE_S)
    chain = scene.chain(4)
    scene.stored(chain)
    found = scene.match(chain)
    for number in range(1, 7):
        scene.stored(scene.chain(4, number), client=1)
    assert scene.match(chain, lease=False).pages == 4
    pending, moves = scene.read(found)
    scene.check(found, outcomes := scene.finish(pending), moves)
    assert outcomes == [Hit()] * 4


def test_only_matched_pages_are_leased(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2)
    chain = scene.chain(8)
    scene.stored(chain)
    scene.match(chain.slice(0, 3))
    for number in range(1, 7):
        scene.stored(scene.chain(4, number), client=1)
    assert scene.match(chain, lease=False).pages == 3


def test_a_lease_that_ends_during_a_copy_makes_misses(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain, ttl_s=1.0)
    found = scene.match(chain)
    pending, moves = scene.read(found)
    scene.run(0.001)
    scene.world.pause("client0")  # in the middle of the copy
    scene.run(1.0 + LEASE_MARGIN_S + 0.1)
    fill_over(scene, chain)
    scene.world.resume("client0")
    outcomes = scene.finish(pending)
    assert outcomes == [Miss(MissReason.LEASE_ENDED)] * 4
    scene.check(found, outcomes, moves)  # nothing of the pool's is left behind


def test_a_copy_without_lease_over_reused_memory_is_a_miss(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain, ttl_s=1.0)
    found = scene.lookup(chain, lease=False)
    pending, moves = scene.read(found)
    scene.run(0.001)
    scene.world.pause("client0")
    scene.run(1.0)
    fill_over(scene, chain)
    scene.world.resume("client0")
    outcomes = scene.finish(pending)
    assert all(isinstance(outcome, Miss) for outcome in outcomes)
    scene.check(found, outcomes, moves)


def test_an_old_lease_is_renewed_before_its_pages_are_read(make_scene: MakeScene) -> None:
    scene = make_scene(lease_ttl_s=2.0)
    chain = scene.chain(4)
    scene.stored(chain)
    found = scene.match(chain)
    scene.run(1.6)
    assert scene.finish(scene.read(found)[0]) == [Hit()] * 4


def test_a_renewal_after_a_takeover_is_a_fresh_lease(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    found = scene.match(chain)
    scene.simulation.crash("master0")
    scene.simulation.restart("master0")
    scene.run(6.0)
    assert scene.finish(scene.read(found)[0]) == [Hit()] * 4
    assert scene.core.tree(found.opened.ordinal).get(chain.key(0)) is not None


def test_a_removed_page_is_not_leased_again(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=2.0)
    chain = scene.chain(3)
    scene.stored(chain)
    found = scene.match(chain)
    scene.removed(chain.slice(1, 2), client=1)
    scene.run(1.2)
    outcomes = scene.finish(scene.read(found)[0])
    assert outcomes == [Hit(), Miss(MissReason.LEASE_ENDED), Hit()]


def test_extents_are_freed_only_after_the_last_lease(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=3.0)
    chain = scene.chain(2)
    scene.stored(chain)
    scene.match(chain)
    scene.run(2.0)
    scene.match(chain, client=1)
    leased_s = scene.world.now
    scene.removed(chain)
    scene.run_until(lambda: scene.bytes_in(RETIRED) == 0)
    assert scene.world.now - leased_s >= 3.0 + LEASE_MARGIN_S - 0.05


# --- views ---


def test_a_view_keeps_its_bytes_past_its_lease(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain, ttl_s=1.0)
    outcomes, view = scene.view(scene.match(chain))
    assert outcomes == [Hit()] * 4
    scene.run(3.0)
    fill_over(scene, chain)  # the pages go, but not from under the view
    held = scene.core.counters["extents_held"]
    assert held > 0
    for place, (memory, offset, size) in view.held.items():
        data = memory.payload[offset : offset + size]
        scene.checks.delivered(chain.key(place), 0, data)
    view.end()
    scene.run(1.0)
    assert scene.bytes_in(RETIRED) == 0


def test_the_death_of_a_viewer_frees_what_it_held(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain)
    scene.view(scene.match(chain))
    scene.removed(chain, client=1)
    scene.run(3.0)
    assert scene.bytes_in(RETIRED) == 4 * SMALL
    scene.simulation.crash("client0")
    scene.run(1.0)
    assert scene.bytes_in(RETIRED) == 0


def test_a_view_is_refused_while_the_worker_writes_there(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    chain = scene.chain(2)
    scene.stored(chain)
    found = scene.match(chain)
    record = record_of(scene, chain.key(0))
    memory = memory_of(scene)
    assert memory.try_exclusive("worker0", record.offset, record.size_class)
    outcomes, view = scene.view(found)
    assert outcomes == [Miss(MissReason.BUSY), Hit()]
    view.end()
    memory.unlock(EXCLUSIVE, "worker0", record.offset, record.size_class)


def test_a_viewer_of_a_free_extent_makes_the_next_put_busy_and_costs_no_try(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(clients=2)
    memory = memory_of(scene)
    whole = scene.simulation.options.geometry.payload_bytes
    assert memory.try_shared("client1", 0, whole)  # a late reader of what was freed there
    put = scene.put(scene.chain(1), timeout_s=20.0)
    scene.run(4.0)
    assert scene.world.counts["busy by a reader"] > 3
    assert not put.is_over
    memory.drop_locks("client1")
    assert scene.finish(put) == [Stored()]


# --- damage ---


def test_a_flipped_payload_bit_is_a_miss_and_reported(scene: Scene) -> None:
    chain = scene.chain(3)
    scene.stored(chain)
    memory_of(scene).flip_payload_bit(scene.world.random, record_of(scene, chain.key(1)))
    outcomes = scene.read_all(chain)
    assert outcomes == [Hit(), Miss(MissReason.CHECKSUM), Hit()]
    scene.run(1.0)
    assert scene.core.counters["pages_corrupt"] == 1
    assert scene.match(chain).pages == 1
    assert Stored() in scene.stored(chain)  # and can be put again
    assert scene.read_all(chain) == [Hit()] * 3


def test_a_flipped_record_bit_is_a_miss_and_reported(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    memory_of(scene).flip_record_bit(scene.world.random, record_of(scene, chain.key(1)))
    assert scene.read_all(chain) == [Hit(), Miss(MissReason.STALE)]
    scene.run(1.0)
    assert scene.core.counters["pages_corrupt"] == 1
    assert scene.stored(chain)[1] == Stored()


def test_the_next_replica_is_read_when_one_is_damaged(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2, clients=1)
    chain = scene.chain(2)
    scene.stored(chain)
    (first,) = {p.segment for p in scene.checks.history.pages[chain.key(0)].sealed}
    name = first.removesuffix("-dram")
    scene.world.pause(name)
    scene.run(5.0)  # lost; another replica is put
    assert scene.stored(chain) == [Stored()] * 2
    scene.world.resume(name)
    scene.run_until(lambda: scene.core.segments[first].readable)
    memory = scene.checks.memories[first]
    for record in memory.all_records():
        memory.flip_payload_bit(scene.world.random, record)
    assert scene.read_all(chain) == [Hit()] * 2


# --- eviction and expiry ---


def test_tails_go_first_and_a_parent_stays_with_its_child(scene: Scene) -> None:
    chain = scene.chain(15)
    scene.stored(chain)
    scene.stored(scene.chain(4, 1), client=1)
    pages = scene.match(chain, lease=False).pages
    assert 0 < pages < 15
    assert scene.probe(chain) == [True] * pages + [False] * (15 - pages)


def test_a_parent_expires_with_its_last_child(make_scene: MakeScene) -> None:
    scene = make_scene(page_ttl_s=600.0)
    chain = scene.chain(4)
    scene.stored(chain.slice(0, 2), ttl_s=2.0)
    scene.stored(chain.slice(2, 4), ttl_s=6.0)
    scene.run(4.0)
    assert scene.probe(chain) == [True] * 4
    scene.run(4.0)
    assert scene.probe(chain) == [False] * 4


def test_room_is_used_again_only_when_the_worker_has_freed_it(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    scene.stored(scene.chain(15))
    scene.run(2.0)
    scene.hold(FreeExtents)
    put = scene.put(scene.chain(4, 1), timeout_s=6.0)
    scene.run(1.0)
    assert not put.is_over
    records = memory_of(scene).all_records()
    assert sum(r.state is RecordState.SEALED for r in records) >= 15
    scene.release()
    assert scene.finish(put) == [Stored()] * 4


def test_a_page_is_no_victim_while_its_child_is_being_put(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain.slice(0, 3))
    scene.hold(Sealed)
    child = scene.put(chain)
    scene.run(0.2)
    others = scene.put(scene.chain(13, 1), client=1, timeout_s=3.0)
    scene.run(1.0)
    assert scene.match(chain, lease=False).pages == 3
    scene.release()
    scene.finish(child)
    scene.finish(others)
