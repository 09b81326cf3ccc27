"""Pages on two tiers, and all that may happen while one is copied to the other (I3, I6, I13, I29).

A disk for each worker; pages are copied to it as soon as they are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kvstore.client.outcomes import Hit, Miss
from kvstore.limits import STAGING_LEASE_S
from kvstore.record import RecordState
from kvstore.wire.messages.membership import FreeExtents, InventoryRows
from kvstore.wire.messages.puts import Ingest, Sealed
from kvstore.wire.messages.transfers import Staged
from master.chunk_values import PREFIX
from tests.simulation import master_view
from tests.simulation.pages import HALVES, SMALL, WHOLE, WIDE
from tests.simulation.sim_metadata import SimDisk
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from kvstore.page import PageChain
    from kvstore.record import Record
    from tests.simulation.conftest import MakeScene
    from tests.simulation.disk import DiskStore
    from tests.simulation.scene import Scene

AHEAD: Final = {"disks": 1, "watermark_demote": 0.01}
SLOW_S: Final = 1.0


@pytest.fixture
def tiers(make_scene: MakeScene) -> Scene:
    """One worker with room for 16 small pages in memory and for more on its disk, two clients."""
    return make_scene(clients=2, lease_ttl_s=1.0, **AHEAD)


def disk_of(scene: Scene) -> DiskStore:
    """The first worker's disk."""
    return scene.worker().disks[0]


def sealed(scene: Scene, segment: str) -> dict[bytes, Record]:
    """What the first worker would offer of a segment if it started now."""
    records = scene.worker().memories[f"worker0-{segment}"].all_records()
    return {record.key: record for record in records if record.state is RecordState.SEALED}


def on_disk(scene: Scene, chain: PageChain) -> bool:
    """Whether a chain lies on the disk, and the master knows."""
    core = scene.core
    return set(chain) <= set(sealed(scene, "nvme")) and not core.moves.in_flight


def demoted(scene: Scene, length: int = 4, number: int = 0) -> PageChain:
    """A chain that lies on both tiers."""
    chain = scene.chain(length, number)
    scene.stored(chain)
    until_on_disk(scene, chain)
    return chain


def until_on_disk(scene: Scene, chain: PageChain) -> None:
    """Store a page now and then, which has the master look what else there is."""
    for number in range(900, 930):
        scene.run(0.2)
        if on_disk(scene, chain):
            return
        scene.stored(scene.chain(1, number))
    raise AssertionError("it stays in memory alone")


def pushed_out(scene: Scene, chain: PageChain, first: int = 100) -> None:
    """Store other pages until a chain is in memory no more."""
    for number in range(first, first + 12):
        demoted(scene, 4, number)
        scene.run(2.0)
        if not set(chain) & set(sealed(scene, "dram")):
            return
    raise AssertionError("it stays in memory")


def about_to_move(scene: Scene, chain: PageChain) -> None:
    """Store a chain, and stop the clock when the worker is asked to write it to the disk."""
    scene.hold(Ingest, source="master")
    scene.stored(chain)
    scene.run_until(lambda: bool(scene.held_messages(Ingest)))


def moving(scene: Scene, chain: PageChain) -> None:
    """Store a chain, and stop the clock when it is being written to the disk."""
    about_to_move(scene, chain)
    scene.worker().copy_delay_max_s = SLOW_S
    scene.release()
    scene.run_until(lambda: bool(disk_of(scene).all_records()))
    assert not sealed(scene, "nvme")


def forget_rows(scene: Scene) -> None:
    """Nothing is stored of what chunks hold, so that a new master has to ask for it."""
    store = scene.simulation.masters["master0"].store
    assert isinstance(store, SimDisk)
    for key in [key for key in store.entries if key.startswith(PREFIX)]:
        del store.entries[key]


def restart_worker(scene: Scene) -> None:
    """Kill the worker and start it again."""
    scene.simulation.crash("worker0")
    scene.simulation.restart("worker0")
    scene.settle()


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2])
def test_pages_that_left_memory_are_read_from_the_disk(make_scene: MakeScene, hosts: int) -> None:
    scene = make_scene(clients=2, hosts=hosts, lease_ttl_s=1.0, **AHEAD)
    chain = demoted(scene)
    pushed_out(scene, chain)
    client = hosts - 1
    assert scene.read_all(chain, client=client) == [Hit()] * 4
    assert scene.world.counts["pages staged"] == (4 if hosts == 1 else 0)


def test_pages_that_are_read_again_come_back_to_memory(tiers: Scene) -> None:
    chain = demoted(tiers)
    pushed_out(tiers, chain)
    assert tiers.removed(tiers.chain(4, 102)) == [True] * 4
    tiers.run(2.0)
    for _ in range(2):
        assert tiers.read_all(chain) == [Hit()] * 4
    tiers.run_until(lambda: set(chain) <= set(sealed(tiers, "dram")))
    assert set(chain) <= set(sealed(tiers, "nvme"))


def test_a_slot_that_was_reused_under_a_slow_reader_is_a_miss(tiers: Scene) -> None:
    chain = demoted(tiers)
    pushed_out(tiers, chain)
    for number in range(200, 204):
        demoted(tiers, 4, number)
        tiers.run(2.0)
    found = tiers.lookup(chain, lease=False)
    tiers.hold(Staged, target="client0")
    pending, moves = tiers.read(found)
    tiers.run_until(lambda: bool(tiers.held_messages(Staged)))
    tiers.run(STAGING_LEASE_S)
    for number in (*range(100, 104), *range(200, 202)):
        tiers.read_all(tiers.chain(4, number), client=1)
    staging = tiers.worker().mapped["worker0-staging"].all_records()
    assert not set(chain) & {record.key for record in staging}
    tiers.release()
    outcomes = tiers.finish(pending)
    assert all(isinstance(outcome, Miss) for outcome in outcomes)
    tiers.check(found, outcomes, moves)


def test_a_staged_copy_that_rots_is_loaded_anew(tiers: Scene) -> None:
    chain = demoted(tiers, 1)
    pushed_out(tiers, chain)
    tiers.world.counts.clear()
    assert tiers.read_all(chain) == [Hit()]
    staging = tiers.worker().mapped["worker0-staging"]
    (record,) = [each for each in staging.all_records() if each.key == chain.key(0)]
    staging.flip_payload_bit(tiers.world.random, record)
    outcomes = [tiers.read_all(chain)[0] for _ in range(3)]
    assert outcomes[-1] == Hit()


# --- while a page moves ---------------------------------------------------------------------------


def test_a_source_that_was_removed_before_the_move_began_is_not_copied(tiers: Scene) -> None:
    chain = tiers.chain(4)
    about_to_move(tiers, chain)
    assert tiers.removed(chain) == [True] * 4
    tiers.run(2.0)  # the lease of nobody: freed
    tiers.release()
    tiers.run(1.0)
    assert not disk_of(tiers).all_records()


def test_a_page_removed_while_it_moves_is_gone_on_both_tiers(tiers: Scene) -> None:
    chain = tiers.chain(2)
    moving(tiers, chain)
    assert tiers.removed(chain) == [True] * 2
    tiers.worker().copy_delay_max_s = 0.002
    tiers.rest()
    restart_worker(tiers)
    assert tiers.probe(chain) == [False] * 2
    assert not set(chain) & {*sealed(tiers, "dram"), *sealed(tiers, "nvme")}


def test_a_worker_killed_between_bytes_and_record_has_the_page_in_memory(tiers: Scene) -> None:
    chain = tiers.chain(2)
    moving(tiers, chain)
    tiers.worker().copy_delay_max_s = 0.002
    restart_worker(tiers)
    assert set(chain) <= set(sealed(tiers, "dram"))
    assert tiers.read_all(chain) == [Hit()] * 2
    until_on_disk(tiers, chain)


def test_a_copy_that_was_sealed_for_an_earlier_master_is_adopted_once(tiers: Scene) -> None:
    chain = tiers.chain(4)
    about_to_move(tiers, chain)
    tiers.release()
    tiers.hold(Sealed, source="worker")
    tiers.run_until(lambda: set(chain) <= set(sealed(tiers, "nvme")))
    generations = {record.generation for record in sealed(tiers, "nvme").values()}
    tiers.replace_master()
    tiers.lose_held()
    tiers.settle()
    tiers.rest()
    assert {record.generation for record in sealed(tiers, "nvme").values()} == generations
    places = master_view.readable_copies(tiers.leader, WHOLE.id, chain.key(0))
    assert sorted(place.segment for place in places) == ["worker0-dram", "worker0-nvme"]


def test_a_move_whose_answer_is_late_is_fenced_and_its_page_stays(tiers: Scene) -> None:
    chain = tiers.chain(2)
    moving(tiers, chain)
    tiers.worker().copy_delay_max_s = 40.0
    tiers.run(30.0)
    assert tiers.probe(chain) == [True] * 2
    tiers.worker().copy_delay_max_s = 0.002
    tiers.run(40.0)
    assert tiers.read_all(chain) == [Hit()] * 2


def test_a_page_that_does_not_shrink_is_moved_as_it_is(make_scene: MakeScene) -> None:
    scene = make_scene(clients=1, chunks=4, lease_ttl_s=1.0, disk_chunks=8, **AHEAD)
    chains = [scene.chain(1, number, HALVES) for number in range(20)]
    shrinks = [chain for chain in chains if not chain.key(0)[1] % 2]
    stays = [chain for chain in chains if chain.key(0)[1] % 2]
    scene.stored(shrinks[0], namespace=HALVES, parts=(0, 1))
    until_on_disk(scene, shrinks[0])
    scene.stored(shrinks[1], namespace=HALVES, parts=(0, 1))
    until_on_disk(scene, shrinks[1])
    assert sealed(scene, "nvme")[shrinks[1].key(0)].size_class == SMALL
    scene.stored(stays[0], namespace=HALVES, parts=(0, 1))
    until_on_disk(scene, stays[0])
    assert scene.world.counts["moved: too_big"] == 2
    assert sealed(scene, "nvme")[stays[0].key(0)].size_class == WIDE


# --- disks that fail ------------------------------------------------------------------------------


def test_a_disk_that_gives_nothing_back_takes_its_pages_along(tiers: Scene) -> None:
    cold = demoted(tiers)
    pushed_out(tiers, cold)
    disk_of(tiers).fail_reads()
    assert all(isinstance(each, Miss) for each in tiers.read_all(cold))
    tiers.run(1.0)
    assert disk_of(tiers).service is ServiceState.FAILED
    assert tiers.probe(cold) == [False] * 4
    warm = tiers.chain(1, 500)
    tiers.stored(warm)
    assert tiers.read_all(warm) == [Hit()]
    restart_worker(tiers)
    assert tiers.read_all(cold) == [Hit()] * 4


def test_a_page_that_a_disk_did_not_free_does_not_return_once_it_is_removed(tiers: Scene) -> None:
    chain = demoted(tiers)
    disk_of(tiers).fail_writes()
    tiers.hold(FreeExtents)
    assert tiers.removed(chain) == [True] * 4
    tiers.release()
    tiers.run(2.0)
    tiers.worker().links.close()
    tiers.settle()
    assert tiers.removed(chain) == [False] * 4
    restart_worker(tiers)
    assert tiers.probe(chain) == [False] * 4


def test_an_inventory_that_cannot_be_read_does_not_hide_what_lies_there(tiers: Scene) -> None:
    chain = demoted(tiers)
    pushed_out(tiers, chain)
    tiers.hold(InventoryRows)
    tiers.simulation.crash("master0")
    forget_rows(tiers)
    tiers.simulation.restart("master0")
    disk_of(tiers).fail_reads()
    tiers.run(3.0)
    tiers.release()
    tiers.run(3.0)
    assert tiers.core.segments["worker0-dram"].takes_orders
    assert not [each for each in tiers.core.segments.values() if each.id == "worker0-nvme"
                and each.readable]  # fmt: skip
    restart_worker(tiers)
    assert tiers.read_all(chain) == [Hit()] * 4


def test_what_the_power_took_is_a_miss_and_never_wrong_bytes(tiers: Scene) -> None:
    chain = demoted(tiers)
    for _ in range(4):
        tiers.simulation.lose_power("worker0")
        tiers.simulation.restart("worker0")
        tiers.settle()
        assert tiers.read_all(chain) == [Hit()] * 4
