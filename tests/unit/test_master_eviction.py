"""The eviction policy in force, and what runs keep when another one takes over."""

from __future__ import annotations

from kvstore.wire.messages.operator import GetPolicies, PolicyRow, SetPolicy
from master.tunables import Tunables
from policies.eviction.lrfu import Lrfu
from policies.eviction.protocol import SAME_USE_S
from policies.eviction.s3_fifo import S3Fifo
from tests.unit.master_rig import OpenedNamespace, Rig, chain
from tests.unit.pools import PAGE, ask, evict

OFTEN, LATE = chain(1, 8), chain(2, 8)


def pool(eviction: str = "lrfu", **parameters: float) -> tuple[Rig, OpenedNamespace]:
    """A pool with pages that were used often and others that were put last."""
    rig = Rig(Tunables("test", eviction=eviction, eviction_parameters=parameters))
    rig.add_worker()
    space = rig.open_namespace()
    space.put(OFTEN)
    for _ in range(4):
        rig.pass_time(SAME_USE_S)
        space.match(OFTEN, lease=False)
    rig.pass_time(SAME_USE_S)
    space.put(LATE)
    return rig, space


def choose(rig: Rig, name: str, **parameters: str) -> PolicyRow:
    """An operator sets it; what is in force then."""
    return ask(rig, SetPolicy("eviction", name, parameters))["eviction"]


def test_the_configuration_chooses() -> None:
    rig, space = pool("lru")
    evict(rig, 8 * PAGE)
    assert space.probe(OFTEN) == bytes(8)
    rig, space = pool("lrfu", half_life_s=600.0)
    assert ask(rig, GetPolicies())["eviction"].parameters["half_life_s"] == 600.0
    evict(rig, 8 * PAGE)
    assert space.probe(LATE) == bytes(8)


def test_an_operator_changes_it_at_once() -> None:
    rig, space = pool("lrfu")
    choose(rig, "lru")
    evict(rig, 8 * PAGE)
    assert space.probe(OFTEN + LATE) == bytes(8) + b"\1" * 8


def test_runs_keep_their_last_use_and_its_count_under_another_policy() -> None:
    rig, space = pool("lru")
    run = rig.master.core.tree(space.ordinal).get(OFTEN[:32])
    assert run is not None
    before = run.touches, run.touched_s
    assert before[0] == 5
    choose(rig, "ttl-lfu", ttl_s="600")
    evict(rig, 8 * PAGE)
    assert space.probe(OFTEN + LATE) == b"\1" * 8 + bytes(8), "by the count of uses"
    assert (run.touches, run.touched_s) == before
    choose(rig, "lrfu")
    rig.pass_time(SAME_USE_S)
    space.match(OFTEN, lease=False)
    assert run.touches == before[0] + 1
    assert run.heat > rig.now, "two uses: one at the time of the last one, and this"


def test_both_halves_of_a_run_have_the_numbers_of_one_policy() -> None:
    rig, space = pool("lrfu")
    choose(rig, "lru")
    space.match(OFTEN[: 4 * 32], lease=False)  # met as a whole by nobody, and split
    space.match(OFTEN, lease=False)
    tree = rig.master.core.tree(space.ordinal)
    halves = [tree.get(OFTEN[at : at + 32]) for at in (0, 4 * 32)]
    assert {half.heat for half in halves if half is not None} == {rig.now}


def test_parameters_that_are_not_named_stay_while_the_policy_does() -> None:
    rig, _ = pool("lrfu", half_life_s=600.0)
    policy = rig.master.core.eviction.policy
    changed = choose(rig, "lrfu", ghost_factor="2")
    assert (changed.parameters["half_life_s"], changed.parameters["ghost_factor"]) == (600.0, 2.0)
    assert rig.master.core.eviction.policy is policy, "what it has learned stays"
    choose(rig, "lru")
    again = choose(rig, "lrfu")
    assert again.parameters["half_life_s"] == Lrfu().parameters.half_life_s


def test_the_new_policy_hears_how_large_the_pool_is() -> None:
    rig, _ = pool()
    choose(rig, "s3-fifo")
    policy = rig.master.core.eviction.policy
    assert isinstance(policy, S3Fifo)
    assert policy.score(rig.master.core.tree(1).all_runs()[0], rig.now) > 0, "no queue is full"
