"""Replicas for heat, made and dropped: where, when, and at whose cost."""

from __future__ import annotations

from kvstore.wire.messages.operator import ResetPolicy, SetPolicy
from master import replica_counts
from master.victims import evict_copy
from tests.unit.hot_runs import (
    CHAIN,
    PAGES,
    POOL_PAGES,
    WINDOW_S,
    hosts,
    pool,
    read,
    reader,
    the_run,
)
from tests.unit.master_rig import chain
from tests.unit.pools import ask


def test_a_replica_is_made_where_it_is_read_and_dropped_when_it_has_cooled() -> None:
    rig, space = pool()
    before = hosts(rig)
    assert before != {"w3"}
    read(rig, space, 6, 3 * WINDOW_S, session=reader(rig, "w3"))
    assert hosts(rig) == before | {"w3"}
    counters = rig.master.core.counters
    assert (counters["moves_copy"], counters["copied_pages_dram"]) == (1, PAGES)
    rig.checks = False
    rig.pass_time(10 * WINDOW_S)
    rig.checks = True
    rig.settle()
    assert len(hosts(rig)) == 1
    assert counters["replicas_trimmed"] == PAGES
    assert not rig.master.core.heat.table


def test_each_reader_without_one_gets_the_next_replica() -> None:
    rig, space = pool()
    here = hosts(rig)
    others = sorted(set(rig.workers) - here)
    read(rig, space, 5, 2 * WINDOW_S, session=reader(rig, others[0]))
    read(rig, space, 20, WINDOW_S, session=reader(rig, others[0]))
    assert hosts(rig) == here | {others[0]}, "it has one"
    read(rig, space, 20, 2.0, session=reader(rig, others[2]))
    assert hosts(rig) == here | {others[0], others[2]}


def test_a_replica_that_cannot_be_read_is_none_for_its_host() -> None:
    rig, space = pool()
    (here,) = hosts(rig)
    read(rig, space, 6, 3 * WINDOW_S, session=reader(rig, "w3"))
    assert (hosts(rig), the_run(rig).extra) == ({here, "w3"}, 1)
    local = reader(rig, here)
    read(rig, space, 40, 3.0, session=local)
    assert the_run(rig).extra == 1
    rig.workers[here].leave()
    rig.workers[here].connect()  # what it has is still to be compared
    read(rig, space, 40, 3.0, session=local)
    assert the_run(rig).extra == 2


def test_what_is_only_observed_is_not_made_until_an_operator_wants_it() -> None:
    rig, space = pool(replication="observe")
    read(rig, space, 6, 3 * WINDOW_S)
    assert the_run(rig).extra == 1
    assert len(hosts(rig)) == 1
    ask(rig, SetPolicy("replication", "enforce", {}))
    read(rig, space, 6, 3.0)
    assert len(hosts(rig)) == 2
    ask(rig, ResetPolicy("replication"))
    read(rig, space, 6, 3 * WINDOW_S)
    assert len(hosts(rig)) == 1
    assert the_run(rig).extra == 1


def test_nothing_is_let_go_for_heat() -> None:
    rig, space = pool(2)
    rig.checks = False
    space.match(CHAIN)  # so that it is not what makes room
    for number in range(10, 9 + 2 * POOL_PAGES // PAGES):
        space.put(chain(number, PAGES))
    read(rig, space, 1, 3.0)
    counters = rig.master.core.counters
    evicted = counters["pages_evicted"]
    assert evicted > 0, "down to the low watermark"
    read(rig, space, 20, 2 * WINDOW_S)
    assert the_run(rig).extra == 1
    assert 0 < counters["copied_pages_dram"] < PAGES, "up to the high one"
    assert counters["pages_evicted"] == evicted


def test_where_eviction_took_one_page_the_others_go_as_well() -> None:
    rig, space = pool()
    read(rig, space, 6, 3 * WINDOW_S)
    rig.pass_time(1.0)
    run = the_run(rig)
    assert (run.extra, len(run.copies)) == (1, 2)
    run.leased_until_s = run.lapsing_until_s = 0.0
    assert evict_copy(rig.master.core, run.copies[1].segment, run, PAGES - 1)
    rig.pass_time(20.0)
    assert run.extra == 0
    assert replica_counts.got(rig.master.core, run, 1) == b"\1" * PAGES
    assert len(run.copies) == 1, "what is read together lies together"
