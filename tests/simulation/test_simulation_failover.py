"""Leaders that die, sleep, are cut off or are robbed of their lease, and those that follow them.

(I9, I10, I12, I13, I29.) Two masters, one etcd, and workers that find whoever leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Hit, Miss, MissReason, Stored
from kvstore.errors import Unavailable
from kvstore.wire.messages.membership import RetireExtents
from kvstore.wire.messages.puts import Ingest, Sealed
from kvstore.wire.messages.reads import Removed
from tests.simulation import test_simulation_tiers as tiers
from tests.simulation.scans import scan
from tests.simulation.sim_etcd import ETCD, Done, SimEtcd
from tests.simulation.test_simulation_losses import cut_off

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.client.outcomes import PutOutcome
    from kvstore.page import PageChain
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene
    from tests.simulation.sim_master import SimMaster

LEASE_S = limits.LEADER_LEASE_S
SERVING_AGAIN_S = 3.5


@pytest.fixture
def pool(make_scene: MakeScene) -> Scene:
    """Two masters, one worker and two clients."""
    return make_scene(masters=2, etcd=True, clients=2)


def etcd_of(scene: Scene) -> SimEtcd:
    """Where the masters keep what is durable."""
    assert scene.simulation.etcd is not None
    return scene.simulation.etcd


def another_leads(scene: Scene, old: SimMaster) -> None:
    """Wait until somebody else leads, and has every worker's inventory."""
    scene.run_until(lambda: scene.checks.leader not in (None, old))
    scene.settle()


def is_in_the_pool(outcome: PutOutcome) -> bool:
    """Whether a put has ended well, by its own plan or by another."""
    return isinstance(outcome, Stored | AlreadyThere)


def is_doubtful(scene: Scene, master: SimMaster) -> bool:
    """Whether a master's lease may have ended, as far as it knows."""
    return master.term is not None and scene.world.now >= master.term.until_s


# --- a leader that dies ---


def test_every_page_is_found_soon_after_the_death_of_the_leader(make_scene: MakeScene) -> None:
    scene = make_scene(masters=3, etcd=True, workers=3, clients=2, chunks=4)
    chains = [scene.chain(6, number) for number in range(6)]
    for chain in chains:
        assert scene.stored(chain) == [Stored()] * 6
    old, died_s = scene.leader, scene.world.now
    scene.simulation.crash(old.name)
    another_leads(scene, old)
    assert scene.probe(chains[0]) == [True] * 6
    assert scene.world.now < died_s + SERVING_AGAIN_S
    for chain in chains:
        assert scene.read_all(chain, client=1) == [Hit()] * 6
    assert scene.stored(scene.chain(4, 9)) == [Stored()] * 4


def test_a_leader_that_resigns_is_followed_at_once(pool: Scene) -> None:
    chain = pool.chain(4)
    pool.stored(chain)
    old, stopped_s = pool.leader, pool.world.now
    old.stop()
    another_leads(pool, old)
    assert pool.world.now < stopped_s + 1.0
    assert pool.read_all(chain) == [Hit()] * 4


def test_plans_of_a_dead_leader_are_carried_out_or_made_anew(pool: Scene) -> None:
    chain = pool.chain(6)
    pool.hold(Ingest)
    put = pool.put(chain, timeout_s=20.0)
    pool.run(0.2)
    old = pool.leader
    pool.simulation.crash(old.name)
    pool.release()
    assert all(is_in_the_pool(each) for each in pool.finish(put))
    assert pool.read_all(chain, client=1) == [Hit()] * 6


def test_a_seal_that_the_dead_leader_did_not_hear_of_counts(pool: Scene) -> None:
    chain = pool.chain(6)
    pool.hold(Sealed)
    put = pool.put(chain, timeout_s=20.0)
    pool.run_until(lambda: bool(pool.held_messages(Sealed)))
    old = pool.leader
    pool.simulation.crash(old.name)
    pool.lose_held()
    another_leads(pool, old)
    assert pool.probe(chain) == [True] * 6
    assert all(is_in_the_pool(each) for each in pool.finish(put))


@pytest.mark.parametrize("lost", [RetireExtents, Removed])
def test_a_removal_that_outlives_its_leader_is_a_removal(pool: Scene, lost: type) -> None:
    chain = pool.chain(6)
    pool.stored(chain)
    pool.hold(lost)
    removal = pool.remove(chain.slice(2, 4))
    pool.run_until(lambda: bool(pool.held_messages(lost)))
    old = pool.leader
    pool.simulation.crash(old.name)
    pool.lose_held()
    pool.finish(removal)
    another_leads(pool, old)
    assert pool.probe(chain) == [True, True, False, False, True, True]


def test_a_removal_outlives_leader_and_worker(pool: Scene) -> None:
    chain = pool.chain(6)
    pool.stored(chain)
    pool.simulation.crash("worker0")
    pool.run(0.2)
    pool.removed(chain.slice(2, 4))
    old = pool.leader
    pool.simulation.crash(old.name)
    pool.simulation.restart("worker0")
    another_leads(pool, old)
    assert pool.probe(chain) == [True, True, False, False, True, True]


@pytest.mark.parametrize("begins", [tiers.about_to_move, tiers.moving])
def test_a_move_that_outlives_its_leader_costs_no_page(
    make_scene: MakeScene, begins: Callable[[Scene, PageChain], None]
) -> None:
    scene = make_scene(masters=2, etcd=True, **tiers.AHEAD)
    chain = scene.chain(4)
    begins(scene, chain)
    old = scene.leader
    scene.simulation.crash(old.name)
    scene.release()
    scene.worker().copy_delay_max_s = 0.002
    another_leads(scene, old)
    assert scene.read_all(chain) == [Hit()] * 4


# --- a leader that sleeps or is cut off ---


def test_a_leader_that_wakes_after_its_term_does_nothing(pool: Scene) -> None:
    chain, other = pool.chain(6), pool.chain(6, 1)
    pool.stored(chain)
    old = pool.leader
    pool.world.pause(old.name)
    another_leads(pool, old)
    assert pool.removed(chain.slice(4, 6)) == [True] * 2
    assert pool.stored(other) == [Stored()] * 6
    pool.world.resume(old.name)
    pool.run(1.0)
    assert old.core is None
    scan(pool.checks)
    assert pool.read_all(other) == [Hit()] * 6
    assert pool.probe(chain) == [True] * 4 + [False] * 2


def test_questions_that_waited_for_a_sleeping_leader_get_no_lease(pool: Scene) -> None:
    chain = pool.chain(4)
    pool.stored(chain)
    old = pool.leader
    for name in pool.simulation.masters:
        if name != old.name:
            cut_off(pool, name, "client0")  # who cannot look elsewhere
    pool.world.pause(old.name)
    question = pool.start_match(chain)
    another_leads(pool, old)
    pool.world.resume(old.name)
    match = pool.finish(question)
    assert [piece.deadline_s for piece in match.pieces] == [None]
    assert pool.world.counts["answers in doubt"] > 0
    pool.world.cut.clear()


def test_a_worker_follows_the_new_leader_while_the_old_one_still_runs(pool: Scene) -> None:
    chain = pool.chain(4)
    pool.stored(chain)
    old = pool.leader
    cut_off(pool, old.name, ETCD)
    another_leads(pool, old)
    assert is_doubtful(pool, old)
    assert pool.worker_core().epoch == pool.leader.epoch
    assert pool.stored(pool.chain(4, 1), client=1) == [Stored()] * 4
    pool.world.cut.clear()
    pool.run(1.0)
    assert old.core is None


def test_what_a_leader_in_doubt_locates_is_a_miss_once_it_is_overwritten(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(masters=2, etcd=True, clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain)
    old = scene.leader
    others = [name for name in scene.simulation.masters if name != old.name]
    cut_off(scene, old.name, ETCD)
    for name in others:
        cut_off(scene, "client0", name)
    another_leads(scene, old)
    assert scene.read_all(chain) == [Hit()] * 4  # by what the old leader remembers
    assert scene.removed(chain, client=1) == [True] * 4
    scene.run(limits.LEASE_TTL_MAX_S + LEASE_S + 1.0)
    for number in range(1, 5):
        scene.stored(scene.chain(4, number), client=1)
    found = scene.match(chain)
    assert sum(found.readable) == 4
    outcomes = scene.finish(scene.read(found)[0])
    assert {type(each).__name__ for each in outcomes} == {"Miss"}
    scene.world.cut.clear()


# --- what etcd does ---


def test_leases_of_a_leader_that_was_robbed_of_its_own_are_honoured(
    make_scene: MakeScene,
) -> None:
    """For a moment two masters lead; the later one frees nothing that the earlier one leased."""
    scene = make_scene(masters=2, etcd=True, clients=2)
    chain = scene.chain(6)
    scene.stored(chain)
    old = scene.leader
    cut_off(scene, old.name, ETCD)
    etcd_of(scene).expire_leases()
    scene.run_until(lambda: scene.checks.leader not in (None, old))
    assert not is_doubtful(scene, old)
    scene.run_until(lambda: old.term is not None and old.term.until_s - scene.world.now < 0.1)
    found = scene.match(chain)
    assert found.pieces[0].deadline_s is not None
    another_leads(scene, old)
    assert scene.removed(chain, client=1) == [True] * 6
    scene.run(limits.LEASE_TTL_MAX_S + LEASE_S + 2.0)  # the checkers look on
    scene.world.cut.clear()


def test_plans_of_a_leader_that_was_robbed_of_its_lease_are_refused(pool: Scene) -> None:
    old = pool.leader
    cut_off(pool, old.name, ETCD)
    pool.hold(Ingest, source="client0")
    put = pool.put(pool.chain(6), timeout_s=20.0)
    pool.run(0.2)
    etcd_of(pool).expire_leases()
    another_leads(pool, old)
    assert pool.stored(pool.chain(6, 1), client=1) == [Stored()] * 6
    pool.release()
    assert pool.finish(put) == [Stored()] * 6
    assert pool.world.counts["ingests fenced"] > 0
    pool.world.cut.clear()


def test_an_election_whose_answer_is_lost_is_held_again(pool: Scene) -> None:
    chain = pool.chain(4)
    pool.stored(chain)
    old = pool.leader
    pool.simulation.crash(old.name)
    pool.hold(Done, source=ETCD)
    pool.run_until(lambda: bool(pool.held_messages(Done)))
    pool.lose_held()
    another_leads(pool, old)
    assert pool.leader.epoch == old.epoch + 2
    assert pool.read_all(chain) == [Hit()] * 4


def test_pages_are_read_while_etcd_is_away_for_minutes(pool: Scene) -> None:
    chain = pool.chain(4)
    pool.stored(chain)
    leader, epoch = pool.leader, pool.leader.epoch
    pool.simulation.crash(ETCD)
    pool.run(LEASE_S)
    assert is_doubtful(pool, leader)
    for _ in range(4):
        pool.run(30.0)
        assert pool.read_all(chain) == [Hit()] * 4
    views, view = pool.view(pool.match(chain))
    view.end()
    assert views == [Miss(MissReason.NO_LEASE)] * 4
    with pytest.raises(Unavailable):
        pool.stored(pool.chain(4, 1))
    pool.simulation.restart(ETCD)
    pool.run(2.0)
    assert (pool.leader, leader.epoch) == (leader, epoch)
    assert pool.stored(pool.chain(4, 1)) == [Stored()] * 4


def test_reads_end_where_a_tenant_wants_nothing_doubtful(make_scene: MakeScene) -> None:
    scene = make_scene(masters=2, etcd=True, stale_read_max_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain)
    scene.simulation.crash(ETCD)
    scene.run(LEASE_S + 1.5)
    with pytest.raises(Unavailable):
        scene.match(chain)
    scene.simulation.restart(ETCD)
    scene.settle()
    assert scene.read_all(chain) == [Hit()] * 4


@pytest.mark.parametrize("slept_s", [1.0, 20.0])
def test_there_is_a_leader_again_once_etcd_has_slept(pool: Scene, slept_s: float) -> None:
    chain = pool.chain(4)
    pool.stored(chain)
    pool.world.pause(ETCD)
    pool.run(slept_s)
    pool.world.resume(ETCD)
    pool.run_until(lambda: pool.checks.leader is not None and not is_doubtful(pool, pool.leader))
    pool.settle()
    assert pool.stored(pool.chain(4, 1)) == [Stored()] * 4
    assert pool.read_all(chain) == [Hit()] * 4


def test_a_full_etcd_stops_nothing_but_what_must_be_durable(pool: Scene) -> None:
    chain = pool.chain(6)
    pool.stored(chain)
    etcd_of(pool).is_full = True
    assert pool.stored(pool.chain(4, 1)) == [Stored()] * 4
    assert pool.removed(chain.slice(4, 6)) == [True] * 2  # its holder is there
    pool.simulation.crash("worker0")
    pool.run(0.5)
    with pytest.raises(Unavailable):
        pool.removed(chain.slice(2, 4))
    etcd_of(pool).make_room()
    pool.removed(chain.slice(2, 4))
    pool.simulation.restart("worker0")
    pool.settle()
    assert pool.probe(chain) == [True] * 2 + [False] * 4
