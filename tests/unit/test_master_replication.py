"""Repair: which copies are made for whom, in which order, and what waits for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.membership import ReportDamage
from kvstore.wire.messages.puts import Ingest
from master.packed import split_keys
from master.tunables import Tunables
from master.victims import evict_copy
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig, chain
from tests.unit.replicated_pools import PAGES, copies, got, rig_of, run_of

if TYPE_CHECKING:
    from tests.unit.master_rig import OpenedNamespace


@pytest.fixture
def rig() -> Rig:
    """Three workers of three hosts."""
    return rig_of("w1", "w2", "w3")


def test_a_page_that_was_put_gets_its_second_replica_on_another_host(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    assert got(rig) == [2] * PAGES
    assert {copy.segment.host for copy in run_of(rig).copies} <= {"w1", "w2", "w3"}
    assert copies(rig) == 1, "all pages of the put at once"
    rig.pass_time(30.0)
    assert copies(rig) == 1
    assert not len(rig.master.core.replication.queue)


def test_where_one_host_lends_nothing_is_noted() -> None:
    rig = rig_of("w1")
    rig.open_namespace().put(KEYS)
    assert not len(rig.master.core.replication.queue)
    assert rig.master.core.replication.queue.next_s() == float("inf")


def test_what_lacked_a_host_is_copied_once_one_comes() -> None:
    rig = rig_of("w1")
    rig.open_namespace().put(KEYS)
    rig.pass_time(20.0)
    assert got(rig) == [1] * PAGES
    rig.add_worker("w2")
    rig.pass_time(3.0)
    assert got(rig) == [2] * PAGES


def test_a_lost_worker_is_waited_for_then_its_pages_are_copied(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    lost = run_of(rig).copies[0].segment.worker
    rig.workers[lost].leave()
    rig.pass_time(4.0)
    assert got(rig) == [1] * PAGES
    assert space.probe(KEYS) == b"\1" * PAGES
    rig.pass_time(10.0)
    assert copies(rig) == 1, "most come back"
    rig.pass_time(6.0)
    assert got(rig) == [2] * PAGES
    assert lost not in {copy.segment.worker for copy in run_of(rig).copies}


def test_a_worker_that_comes_back_in_time_costs_nothing(rig: Rig) -> None:
    rig.open_namespace().put(KEYS)
    rig.pass_time(0.5)
    lost = rig.workers[run_of(rig).copies[0].segment.worker]
    lost.leave()
    rig.pass_time(8.0)
    assert rig.master.core.counters["workers_lost"] == 1
    lost.join()
    rig.pass_time(40.0)
    assert got(rig) == [2] * PAGES
    assert copies(rig) == 1


def test_one_that_comes_back_late_has_too_many_and_they_go(rig: Rig) -> None:
    rig.open_namespace().put(KEYS)
    rig.pass_time(0.5)
    lost = rig.workers[run_of(rig).copies[0].segment.worker]
    lost.leave()
    rig.pass_time(25.0)
    lost.join()
    rig.settle()
    assert got(rig) == [3] * PAGES
    rig.pass_time(10.0)
    assert got(rig) == [3] * PAGES, "it may go again"
    rig.pass_time(25.0)
    assert got(rig) == [2] * PAGES
    assert rig.master.core.counters["replicas_trimmed"] == PAGES


def test_a_damaged_copy_is_made_anew_at_once(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    copy = run_of(rig).copies[0]
    worker = rig.workers[copy.segment.worker]
    columns = copy.offsets[24:32], copy.generations[24:32]
    worker.ask(ReportDamage(copy.segment.id, copy.segment.incarnation, *columns))
    assert got(rig)[3] == 1
    rig.pass_time(0.5)
    assert got(rig) == [2] * PAGES


def test_the_scarcest_come_first(rig: Rig) -> None:
    rig.holds_moves = True
    space = rig.open_namespace()
    core = rig.master.core
    core.namespaces.get(space.id).replicas = 3
    space.put(KEYS)
    rig.pass_time(0.1)
    rig.holds_moves = False
    for move in rig.moves:
        rig.obey(move)
    assert got(rig) == [2] * PAGES
    rig.moves.clear()
    rig.holds_moves = True
    other = chain(2, 4)
    space.put(other)
    rig.now += 0.1
    rig.tick()
    told = [command.message for command in rig.moves]
    assert next(m.keys for m in told if isinstance(m, Ingest)) == other
    assert len(told) == 2


def test_three_replicas_are_made_one_after_the_other(rig: Rig) -> None:
    space = rig.open_namespace()
    rig.master.core.namespaces.get(space.id).replicas = 3
    space.put(KEYS)
    rig.pass_time(1.0)
    assert got(rig) == [3] * PAGES
    assert copies(rig) == 2


def test_more_than_there_are_hosts_is_not_tried_over_and_over() -> None:
    rig = rig_of("w1", "w2")
    space = rig.open_namespace()
    rig.master.core.namespaces.get(space.id).replicas = 3
    space.put(KEYS)
    rig.pass_time(30.0)
    assert got(rig) == [2] * PAGES
    assert copies(rig) == 1
    assert not len(rig.master.core.replication.queue)
    rig.add_worker("w3")
    rig.pass_time(3.0)
    assert got(rig) == [3] * PAGES


def test_a_copy_that_fails_is_tried_again(rig: Rig) -> None:
    rig.holds_moves = True
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.1)
    (move,) = rig.moves
    message = move.message
    assert isinstance(message, Ingest)
    target = rig.segment(message.segment)
    target.locked |= set(range(0, 1 << 20, 4096))
    rig.holds_moves = False
    rig.obey(move)
    assert got(rig) == [1] * PAGES
    target.locked.clear()
    rig.pass_time(5.0)
    assert got(rig) == [2] * PAGES


def test_parts_are_copied_each() -> None:
    rig = rig_of("w1", "w2")
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0, 1))
    rig.pass_time(0.5)
    assert got(rig) == [2] * PAGES
    assert copies(rig) == 2


def test_a_page_without_all_its_parts_is_not_copied() -> None:
    rig = rig_of("w1", "w2")
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0,))
    rig.pass_time(0.5)
    assert copies(rig) == 0
    space.put(KEYS, parts=(1,))
    rig.pass_time(0.5)
    assert got(rig) == [2] * PAGES


def test_long_chains_are_copied_in_pieces_to_one_host(rig: Rig) -> None:
    space = rig.open_namespace()
    keys = chain(5, 100)
    space.put(keys)
    rig.pass_time(1.0)
    runs = {run_of(rig, key): None for key in split_keys(keys)}
    for run in runs:
        assert len(run.copies) == 2, "what is read together lies together"
        assert not any(copy.absent for copy in run.copies)
    assert copies(rig) == 2


def test_a_pool_that_is_full_does_not_copy_over_and_over() -> None:
    tunables = Tunables(cluster="test")
    rig = rig_of("w1", "w2", tunables=tunables, chunks=4)
    rig.checks = False
    space = rig.open_namespace()
    for number in range(200):
        space.put(chain(number, 4))
        rig.pass_time(0.3, 0.1)
    rig.checks = True
    rig.tick()
    core = rig.master.core
    copied = core.counters["copied_pages_dram"]
    assert copied <= core.counters["pages_sealed"] == 800
    assert core.counters["runs_thinned"] > 100
    before = copied
    rig.pass_time(60.0)
    assert core.counters["copied_pages_dram"] <= before + 8, "it rests"


def test_what_was_thinned_out_is_copied_again_when_it_is_used_and_there_is_room(
    rig: Rig,
) -> None:
    space: OpenedNamespace = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    rig.pass_time(11.0)  # so that no lease of what was copied runs
    run = run_of(rig)

    core = rig.master.core
    (here, _) = run.copies
    for page in range(PAGES):
        assert evict_copy(core, here.segment, run, page)
    assert run.thinned
    rig.pass_time(30.0)
    assert got(rig) == [1] * PAGES
    space.match(KEYS)
    rig.pass_time(0.5)
    assert got(rig) == [2] * PAGES
    assert not run.thinned
