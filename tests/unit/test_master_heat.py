"""How much is read of runs, and how many replicas more are wanted of what is read much."""

from __future__ import annotations

from math import exp, inf
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvariantBroken
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.operator import ResetPolicy, SetPolicy
from kvstore.wire.messages.reads import GetStatus, Lookup, Prefetch, Status
from kvstore.wire.messages.replicas import GetReplicas, ReplicaReport
from master import heat, replica_counts
from master.events import SessionId
from master.metrics import ShellCounts, exposition
from tests.unit.hot_runs import CHAIN, PAGES, READ_A_SECOND, WINDOW_S, pool, read, reader, the_run
from tests.unit.master_rig import chain
from tests.unit.pools import ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from master.core import Core


def test_reads_are_counted_and_fade() -> None:
    rig, space = pool()
    for _ in range(3):
        space.match(CHAIN)
    assert the_run(rig).reads == 3.0
    rig.pass_time(WINDOW_S)
    space.match(CHAIN)
    assert the_run(rig).reads == pytest.approx(1 + 3 * exp(-1))


def test_half_a_run_is_half_a_read() -> None:
    rig, space = pool()
    rig.ask(rig.engine, Lookup(space.id, CHAIN[: 2 * KEY_BYTES], ()))
    assert the_run(rig).reads == 0.25


def test_a_part_is_that_much_of_a_read_however_often_it_is_named() -> None:
    rig, _ = pool()
    wide = rig.open_namespace(parts=4)
    wide.put(CHAIN, parts=(0, 1, 2, 3))
    rig.ask(rig.engine, Lookup(wide.id, CHAIN, (2,)))
    run = rig.master.core.tree(wide.ordinal).get(CHAIN[:KEY_BYTES])
    assert run is not None
    assert run.reads == 0.25
    rig.ask(rig.engine, Lookup(wide.id, CHAIN, (2,) * 9))
    assert run.reads == 1.25


@pytest.mark.parametrize("name", ["off", "observe", "enforce"])
def test_nothing_is_counted_where_nobody_wants_to_know(name: str) -> None:
    alone, space = pool(1, name)
    space.match(CHAIN)
    assert the_run(alone).reads == 0.0
    rig, space = pool(2, name)
    space.match(CHAIN, lease=False)
    rig.ask(rig.engine, Prefetch(space.id, CHAIN))
    assert the_run(rig).reads == 0.0
    space.match(CHAIN)
    assert the_run(rig).reads == (name != "off")


def test_what_is_read_much_is_to_have_replicas_in_proportion() -> None:
    rig, space = pool()
    read(rig, space, 3, 5 * WINDOW_S)
    assert the_run(rig).extra == 0, "one serves it"
    read(rig, space, 6, 3 * WINDOW_S)
    assert the_run(rig).extra == 1
    assert replica_counts.wanted(rig.master.core, the_run(rig)) == 2
    read(rig, space, 40, WINDOW_S)
    assert the_run(rig).extra == 2, "as many as are allowed"
    assert rig.master.core.counters["replicas_for_heat_wanted"] == 2
    assert heat.totals(rig.master.core) == heat.HeatTotals(1, 2)


def test_what_cools_is_to_have_one_fewer_at_a_time() -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    core, seen = rig.master.core, []
    rig.checks = False
    for _ in range(100):
        rig.pass_time(1.0)
        seen.append(the_run(rig).extra)
    assert sorted(set(seen)) == [0, 1, 2]
    assert seen == sorted(seen, reverse=True)
    assert seen.count(1) > 5, "it stays until the load is half of what it was made for"
    assert not core.heat.table
    assert core.counters["replicas_for_heat_ended"] == 2
    assert core.heat.look_at_s == inf


def test_a_load_about_the_threshold_makes_one_replica_and_keeps_it() -> None:
    rig, space = pool()
    for number in range(30):
        read(rig, space, 3 if number % 2 else 5, 4)
    assert the_run(rig).extra == 1
    counters = rig.master.core.counters
    assert (counters["replicas_for_heat_wanted"], counters["replicas_for_heat_ended"]) == (1, 0)


def test_there_are_no_more_than_hosts() -> None:
    rig, space = pool(2)
    read(rig, space, 40, WINDOW_S)
    assert the_run(rig).extra == 1
    rig.close(rig.workers["w1"].session or SessionId(0))
    rig.pass_time(10.0)
    assert rig.master.core.domains == 1
    assert the_run(rig).extra == 0


def test_one_replica_more_is_for_a_reader_that_has_none() -> None:
    rig, space = pool()
    core, run = rig.master.core, the_run(rig)
    (here,) = {copy.segment.host for copy in run.copies}
    read(rig, space, 40, 2 * WINDOW_S, session=reader(rig, here))
    assert run.extra == 0, "nothing of that crosses a port"
    read(rig, space, 5, 1, session=reader(rig, "w3"))
    assert run.extra == 2
    assert heat.near(core, run) == "w3"


def test_both_halves_of_a_run_have_its_heat() -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    head = CHAIN[: 3 * KEY_BYTES]
    read(rig, space, 40, WINDOW_S, head)
    first, second = the_run(rig), the_run(rig, CHAIN[-KEY_BYTES:])
    assert first is not second
    assert second.extra == 2
    assert first.reads > second.reads > 0.0
    read(rig, space, 40, 4 * WINDOW_S, head)
    assert (first.extra, second.extra) == (2, 0), "only one of them is still read"
    assert heat.totals(rig.master.core) == heat.HeatTotals(1, 2)


def test_a_head_that_is_wanted_more_leaves_its_old_tail_in_the_table() -> None:
    rig, space = pool()
    read(rig, space, 6, 2 * WINDOW_S)
    assert the_run(rig).extra == 1
    read(rig, space, 100, WINDOW_S, CHAIN[: 4 * KEY_BYTES])
    assert the_run(rig).extra == 2
    rig.pass_time(20 * WINDOW_S)
    assert not rig.master.core.heat.table


def test_pages_that_leave_the_pool_leave_the_table() -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    space.remove(CHAIN)
    rig.pass_time(2 * heat.LOOK_S)
    assert not rig.master.core.heat.table
    assert heat.totals(rig.master.core) == heat.HeatTotals(0, 0)


def test_observing_counts_what_would_be_done() -> None:
    rig, space = pool(replication="observe")
    read(rig, space, 40, WINDOW_S)
    core = rig.master.core
    assert heat.totals(core) == heat.HeatTotals(1, 2)
    assert replica_counts.wanted(core, the_run(rig)) == 1
    assert core.counters["replicas_for_heat_observed"] == 2
    assert "replicas_for_heat_wanted" not in core.counters
    enforced = ask(rig, SetPolicy("replication", "enforce", {}))["replication"]
    assert replica_counts.wanted(core, the_run(rig)) == 3
    assert enforced.parameters["port_bytes_per_s"] == 8 * READ_A_SECOND, "the same parameters"
    ask(rig, ResetPolicy("replication"))
    assert replica_counts.wanted(core, the_run(rig)) == 1


def test_switched_off_nothing_is_hot_any_more() -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    ask(rig, SetPolicy("replication", "off", {}))
    assert replica_counts.wanted(rig.master.core, the_run(rig)) == 1
    rig.pass_time(5 * heat.LOOK_S)
    assert the_run(rig).extra == 0
    assert not rig.master.core.heat.table


def test_what_eviction_took_is_wanted_again_only_after_a_while() -> None:
    rig, space = pool()
    read(rig, space, 8, 2 * WINDOW_S)
    run = the_run(rig)
    heat.let_go(rig.master.core, run)
    assert run.extra == 0
    read(rig, space, 8, WINDOW_S / 2)
    assert run.extra == 0
    read(rig, space, 8, WINDOW_S)
    assert run.extra == 1
    run.extra = 0
    heat.let_go(rig.master.core, run)
    assert run.extra == 0, "what had gone before"
    assert rig.master.core.counters["replicas_for_heat_evicted"] == 1


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "HOT_MAX", 2)
    rig, space = pool()
    chains = [chain(number, PAGES) for number in (2, 3, 4)]
    for keys in chains:
        space.put(keys)
    read(rig, space, 10, WINDOW_S, *chains)
    core = rig.master.core
    assert len(core.heat.table) == 2
    assert core.counters["replicas_for_heat_refused"] > 0
    assert sum(the_run(rig, keys[:KEY_BYTES]).extra > 0 for keys in chains) == 2


def test_a_full_table_is_looked_through_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "HOT_PER_LOOK", 1)
    rig, space = pool()
    chains = [chain(number, PAGES) for number in range(2, 6)]
    for keys in chains:
        space.put(keys)
    read(rig, space, 10, WINDOW_S, *chains)
    assert len(rig.master.core.heat.table) == 4
    rig.pass_time(5 * WINDOW_S)
    assert not rig.master.core.heat.table


def test_after_a_takeover_heat_starts_anew() -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    rig.takeover(2)
    for worker in rig.workers.values():
        worker.join()
    rig.pass_time(1.0)
    assert the_run(rig).extra == 0
    assert not rig.master.core.heat.table
    read(rig, space, 40, WINDOW_S)
    assert the_run(rig).extra == 2


def test_operators_are_told_how_much_is_wanted() -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    operator = rig.open("operator", "", "kvharbor")
    report = rig.settled(operator, rig.ask(operator, GetReplicas()))
    assert isinstance(report, ReplicaReport), report
    assert (report.heat, report.hot_runs, report.for_heat) == ("enforce", 1, 2)
    status = rig.ask(operator, GetStatus())
    assert isinstance(status, Status), status
    assert (status.replicas.hot_runs, status.replicas.for_heat) == (1, 2)
    text = exposition(lambda: (status, ShellCounts())).decode()
    assert "\nkvharbor_hot_runs 1.0\n" in text
    assert "\nkvharbor_replicas_for_heat 2.0\n" in text


def wanted_for_ever(core: Core) -> None:
    core.heat.table.clear()


def nobody_looks(core: Core) -> None:
    core.heat.look_at_s = inf


def too_many(core: Core) -> None:
    (hot,) = core.heat.table.values()
    core.heat.table = {(1, bytes([n % 256, n // 256])): hot for n in range(heat.HOT_MAX + 1)}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (wanted_for_ever, "I38: 2 replicas more are wanted for ever"),
        (nobody_looks, "I38: nobody looks"),
        (too_many, "I7: 1025 runs are hot"),
    ],
)
def test_a_table_that_contradicts_itself_is_found(spoil: Callable[[Core], None], text: str) -> None:
    rig, space = pool()
    read(rig, space, 40, WINDOW_S)
    rig.master.check_invariants()
    spoil(rig.master.core)
    with pytest.raises(InvariantBroken, match=text):
        rig.master.check_invariants()
