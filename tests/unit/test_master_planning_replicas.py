"""How many replicas puts ask for: what runs remember of it, and who takes no fewer."""

from __future__ import annotations

import pytest

from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.replicas import AwaitReplicas, ReplicasCounted
from master import replica_counts
from tests.unit.master_pages import KEYS, granted, key, refused, upto
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure
from tests.unit.stored_pages import end, offer


def asked(space: OpenedNamespace, keys: bytes = KEYS) -> list[int]:
    """What is remembered of each page."""
    tree = space.rig.master.core.tree(space.ordinal)
    stretches = tree.stretches(keys)
    return [each.run.replicas for each in stretches for _ in range(each.count)]


def put(space: OpenedNamespace, keys: bytes, replicas: int) -> None:
    """All the way."""
    plans = space.begin(keys, replicas=replicas)
    assert isinstance(plans, PutPlans), plans
    assert not any(map(any, space.report(space.write(plans, keys))))


def test_the_most_that_was_asked_for_a_page_counts(space: OpenedNamespace) -> None:
    put(space, upto(6), 2)
    assert asked(space) == [2] * 6
    put(space, KEYS, 0)
    assert asked(space) == [2] * 6 + [0] * 2
    put(space, upto(3), 3)
    assert asked(space) == [3] * 3 + [2] * 3 + [0] * 2
    put(space, upto(4), 1)
    assert asked(space) == [3] * 3 + [2] * 3 + [0] * 2


def test_a_part_that_fills_a_hole_asks_for_its_page(rig: Rig) -> None:
    space = rig.open_namespace(2)
    space.plans(KEYS, parts=(0,))
    space.begin(upto(2), parts=(1,), replicas=4)
    assert asked(space) == [4] * 2 + [0] * 6


@pytest.mark.parametrize("wrong", [-1, 17])
def test_a_number_that_nobody_can_ask_for_is_named(space: OpenedNamespace, wrong: int) -> None:
    reply = failure(space.begin(KEYS, replicas=wrong))
    assert reply.text == f"replicas: got {wrong}, want 1 to 16, or 0 for as many as usual"


def test_who_takes_no_fewer_is_refused_while_there_are_fewer_hosts(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(upto(2))
    plans = space.begin(KEYS, replicas=2, strict=True, wait=True)
    assert isinstance(plans, PutPlans)
    assert refused(plans) == [(0, 8, Outcome.TOO_FEW_HOSTS)]
    assert plans.refused[0].retry_after_s > 0
    assert not rig.master.core.plans
    assert asked(space) == [0] * 2
    rig.add_worker("w2")
    plans = space.begin(KEYS, replicas=2, strict=True)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(2, 6, 0)]


def test_more_than_there_are_hosts_may_be_asked_for(space: OpenedNamespace) -> None:
    plans = space.begin(KEYS, replicas=16)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 8, 0)]
    assert asked(space) == [16] * 8


def test_workers_of_one_host_count_once(rig: Rig, space: OpenedNamespace) -> None:
    rig.add_worker("w2")
    rig.master.core.segments["w2-dram"].host = "w1"
    plans = space.begin(KEYS, replicas=2, strict=True)
    assert isinstance(plans, PutPlans)
    assert refused(plans) == [(0, 8, Outcome.TOO_FEW_HOSTS)]


def test_a_host_whose_chunks_are_too_small_does_not_count(rig: Rig) -> None:
    rig.add_worker("w2", chunk_bytes=16 * 1024)
    space = rig.open_namespace(heads=8)
    plans = space.begin(KEYS, replicas=2, strict=True)
    assert isinstance(plans, PutPlans)
    assert refused(plans) == [(0, 8, Outcome.TOO_FEW_HOSTS)]


def test_what_nobody_asked_for_is_no_reason_to_refuse(space: OpenedNamespace) -> None:
    plans = space.begin(KEYS, strict=True)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 8, 0)]


def test_what_was_asked_for_outlives_the_master(rig: Rig, space: OpenedNamespace) -> None:
    put(space, upto(5), 3)
    put(space, KEYS, 2)
    rig.pass_time(1.0)
    rig.takeover(2)
    assert offer(rig).chunk_starts == ()
    end(rig)
    assert asked(space) == [3] * 5 + [2] * 3


def test_also_where_the_workers_records_are_asked_for(rig: Rig, space: OpenedNamespace) -> None:
    put(space, upto(5), 3)
    rig.pass_time(1.0)
    space.put(chain(7, 1), parent=key(4))
    rig.takeover(2)
    (start,) = offer(rig).chunk_starts
    rig.workers["w1"].send_rows(start)
    end(rig)
    assert asked(space, upto(5)) == [3] * 5
    assert asked(space, chain(7, 1)) == [0]


def test_more_are_made_of_pages_that_are_there_when_a_later_put_wants_them() -> None:
    """I34: what was thinned out before, too."""
    rig = Rig()
    for name in ("w1", "w2", "w3"):
        rig.add_worker(name)
    space = rig.open_namespace()
    rig.pass_time(2.0)
    space.put(KEYS)
    rig.pass_time(1.0)
    run = rig.master.core.tree(space.ordinal).get(key(0))
    assert run is not None
    run.thinned = True
    assert isinstance(space.begin(upto(3), replicas=3), PutPlans)
    rig.pass_time(1.0)
    counts = [
        each
        for stretch in rig.master.core.tree(space.ordinal).stretches(KEYS)
        for each in replica_counts.got(rig.master.core, stretch.run, 1)
    ]
    assert counts == [3] * 3 + [1] * 5


def test_who_waits_for_replicas_does_not_wait_for_those_of_heat() -> None:
    rig = Rig()
    for name in ("w1", "w2"):
        rig.add_worker(name)
    space = rig.open_namespace()
    put(space, KEYS, 2)
    rig.pass_time(1.0)
    run = rig.master.core.tree(space.ordinal).get(key(0))
    assert run is not None
    run.extra, rig.checks = 1, False  # as heat would have it, which knows the run then
    reply = rig.ask(rig.engine, AwaitReplicas(space.id, KEYS + chain(9, 1), 5.0))
    assert reply == ReplicasCounted(b"\2" * 8 + b"\0", b"\2" * 8 + b"\0")
