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
def scene(make_scene: MakeScene) -> Scene:
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


def test_a_leader_that_resigns_is_followed_at_once(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    old, stopped_s = scene.leader, scene.world.now
    old.stop()
    another_leads(scene, old)
    assert scene.world.now < stopped_s + 1.0
    assert scene.read_all(chain) == [Hit()] * 4


def test_plans_of_a_dead_leader_are_carried_out_or_made_anew(scene: Scene) -> None:
    chain = scene.chain(6)
    scene.hold(Ingest)
    put = scene.put(chain, timeout_s=20.0)
    scene.run(0.2)
    old = scene.leader
    scene.simulation.crash(old.name)
    scene.release()
    assert all(is_in_the_pool(each) for each in scene.finish(put))
    assert scene.read_all(chain, client=1) == [Hit()] * 6


def test_a_seal_that_the_dead_leader_did_not_hear_of_counts(scene: Scene) -> None:
    chain = scene.chain(6)
    scene.hold(Sealed)
    put = scene.put(chain, timeout_s=20.0)
    scene.run_until(lambda: bool(scene.held_messages(Sealed)))
    old = scene.leader
    scene.simulation.crash(old.name)
    scene.lose_held()
    another_leads(scene, old)
    assert scene.probe(chain) == [True] * 6
    assert all(is_in_the_pool(each) for each in scene.finish(put))


@pytest.mark.parametrize("lost", [RetireExtents, Removed])
def test_a_removal_that_outlives_its_leader_is_a_removal(scene: Scene, lost: type) -> None:
    chain = scene.chain(6)
    scene.stored(chain)
    scene.hold(lost)
    removal = scene.remove(chain.slice(2, 4))
    scene.run_until(lambda: bool(scene.held_messages(lost)))
    old = scene.leader
    scene.simulation.crash(old.name)
    scene.lose_held()
    scene.finish(removal)
    another_leads(scene, old)
    assert scene.probe(chain) == [True, True, False, False, True, True]


def test_a_removal_outlives_leader_and_worker(scene: Scene) -> None:
    chain = scene.chain(6)
    scene.stored(chain)
    scene.simulation.crash("worker0")
    scene.run(0.2)
    scene.removed(chain.slice(2, 4))
    old = scene.leader
    scene.simulation.crash(old.name)
    scene.simulation.restart("worker0")
    another_leads(scene, old)
    assert scene.probe(chain) == [True, True, False, False, True, True]


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


def test_a_leader_that_wakes_after_its_term_does_nothing(scene: Scene) -> None:
    chain, other = scene.chain(6), scene.chain(6, 1)
    scene.stored(chain)
    old = scene.leader
    scene.world.pause(old.name)
    another_leads(scene, old)
    assert scene.removed(chain.slice(4, 6)) == [True] * 2
    assert scene.stored(other) == [Stored()] * 6
    scene.world.resume(old.name)
    scene.run(1.0)
    assert old.core is None
    scan(scene.checks)
    assert scene.read_all(other) == [Hit()] * 6
    assert scene.probe(chain) == [True] * 4 + [False] * 2


def test_questions_that_waited_for_a_sleeping_leader_get_no_lease(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    old = scene.leader
    for name in scene.simulation.masters:
        if name != old.name:
            scene.cut_off(name, "client0")  # who cannot look elsewhere
    scene.world.pause(old.name)
    question = scene.start_match(chain)
    another_leads(scene, old)
    scene.world.resume(old.name)
    match = scene.finish(question)
    assert [piece.deadline_s for piece in match.pieces] == [None]
    assert scene.world.counts["answers in doubt"] > 0
    scene.world.cut.clear()


def test_a_worker_follows_the_new_leader_while_the_old_one_still_runs(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    old = scene.leader
    scene.cut_off(old.name, ETCD)
    another_leads(scene, old)
    assert is_doubtful(scene, old)
    assert scene.worker_core().epoch == scene.leader.epoch
    assert scene.stored(scene.chain(4, 1), client=1) == [Stored()] * 4
    scene.world.cut.clear()
    scene.run(1.0)
    assert old.core is None


def test_what_a_leader_in_doubt_locates_is_a_miss_once_it_is_overwritten(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(masters=2, etcd=True, clients=2, lease_ttl_s=1.0)
    chain = scene.chain(4)
    scene.stored(chain)
    old = scene.leader
    others = [name for name in scene.simulation.masters if name != old.name]
    scene.cut_off(old.name, ETCD)
    for name in others:
        scene.cut_off("client0", name)
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


def test_leases_of_a_leader_that_was_robbed_of_its_own_are_honoured(scene: Scene) -> None:
    """For a moment two masters lead; the later one frees nothing that the earlier one leased."""
    chain = scene.chain(6)
    scene.stored(chain)
    old = scene.leader
    scene.cut_off(old.name, ETCD)
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


def test_a_worker_does_not_go_back_to_a_leader_of_the_past(scene: Scene) -> None:
    old = scene.leader
    scene.cut_off(old.name, ETCD)
    etcd_of(scene).expire_leases()
    scene.run_until(lambda: scene.checks.leader not in (None, old))
    scene.cut_off("worker0", old.name)
    scene.worker().links.close()
    scene.run_until(lambda: scene.worker_core().epoch == scene.leader.epoch)
    scene.world.cut = {(old.name, ETCD), (ETCD, old.name)}
    scene.cut_off("worker0", scene.leader.name)
    scene.worker().links.close()
    scene.run(0.3)
    assert not is_doubtful(scene, old)
    assert scene.worker_core().epoch == scene.leader.epoch
    scene.world.cut.clear()


def test_plans_of_a_leader_that_was_robbed_of_its_lease_are_refused(scene: Scene) -> None:
    old = scene.leader
    scene.cut_off(old.name, ETCD)
    scene.hold(Ingest, source="client0")
    put = scene.put(scene.chain(6), timeout_s=20.0)
    scene.run(0.2)
    etcd_of(scene).expire_leases()
    another_leads(scene, old)
    assert scene.stored(scene.chain(6, 1), client=1) == [Stored()] * 6
    scene.release()
    assert scene.finish(put) == [Stored()] * 6
    assert scene.world.counts["ingests fenced"] > 0
    scene.world.cut.clear()


def put_etcd_back(scene: Scene, takeovers: int = 3) -> None:
    """Put it back to before so many takeovers, and see that it is overtaken."""
    etcd, chain = etcd_of(scene), scene.chain(4)
    earlier = {key: value for key, value in etcd.entries.items() if not value.lease}
    for number in range(takeovers):
        scene.stored(scene.chain(4, number))
        old = scene.leader
        scene.simulation.crash(old.name)
        another_leads(scene, old)
        scene.simulation.restart(old.name)
    last = scene.leader.epoch
    for name in scene.simulation.masters:
        scene.simulation.crash(name)
    etcd.entries = earlier
    scene.checks.etcd_was_put_back()
    for name in scene.simulation.masters:
        scene.simulation.restart(name)
    scene.settle()
    assert scene.leader.epoch > last
    assert scene.worker_core().epoch == scene.leader.epoch
    assert scene.read_all(chain) == [Hit()] * 4
    assert scene.stored(scene.chain(4, 9)) == [Stored()] * 4


@pytest.mark.parametrize("takeovers", [1, 3])
def test_an_etcd_that_was_put_back_to_an_earlier_state_is_overtaken(
    scene: Scene, takeovers: int
) -> None:
    put_etcd_back(scene, takeovers)


def test_an_election_whose_answer_is_lost_is_held_again(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    old = scene.leader
    scene.simulation.crash(old.name)
    scene.hold(Done, source=ETCD)
    scene.run_until(lambda: bool(scene.held_messages(Done)))
    scene.lose_held()
    another_leads(scene, old)
    assert scene.leader.epoch == old.epoch + 2
    assert scene.read_all(chain) == [Hit()] * 4


def test_pages_are_read_while_etcd_is_away_for_minutes(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    leader, epoch = scene.leader, scene.leader.epoch
    scene.simulation.crash(ETCD)
    scene.run(LEASE_S)
    assert is_doubtful(scene, leader)
    for _ in range(4):
        scene.run(30.0)
        assert scene.read_all(chain) == [Hit()] * 4
    views, view = scene.view(scene.match(chain))
    view.end()
    assert views == [Miss(MissReason.NO_LEASE)] * 4
    with pytest.raises(Unavailable):
        scene.stored(scene.chain(4, 1))
    scene.simulation.restart(ETCD)
    scene.run(2.0)
    assert (scene.leader, leader.epoch) == (leader, epoch)
    assert scene.core.counters["pages_lost"] == 0  # its workers had no chance to register
    assert scene.stored(scene.chain(4, 1)) == [Stored()] * 4


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
def test_there_is_a_leader_again_once_etcd_has_slept(scene: Scene, slept_s: float) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.world.pause(ETCD)
    scene.run(slept_s)
    scene.world.resume(ETCD)
    scene.run_until(
        lambda: scene.checks.leader is not None and not is_doubtful(scene, scene.leader)
    )
    scene.settle()
    assert scene.stored(scene.chain(4, 1)) == [Stored()] * 4
    assert scene.read_all(chain) == [Hit()] * 4


def test_a_full_etcd_stops_nothing_but_what_must_be_durable(scene: Scene) -> None:
    chain = scene.chain(6)
    scene.stored(chain)
    etcd_of(scene).is_full = True
    assert scene.stored(scene.chain(4, 1)) == [Stored()] * 4
    assert scene.removed(chain.slice(4, 6)) == [True] * 2  # its holder is there
    scene.simulation.crash("worker0")
    scene.run(0.5)
    with pytest.raises(Unavailable):
        scene.removed(chain.slice(2, 4))
    etcd_of(scene).make_room()
    scene.removed(chain.slice(2, 4))
    scene.simulation.restart("worker0")
    scene.settle()
    assert scene.probe(chain) == [True] * 2 + [False] * 4
