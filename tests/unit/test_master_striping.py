"""Stripes in operation: made of what is cold, read and rebuilt when hosts go, dissolved in time."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.membership import ReportDamage
from kvstore.wire.messages.puts import Ingest, StripeSource
from kvstore.wire.messages.reads import RenewLease, StripeTotals
from kvstore.wire.messages.replicas import GetReplicas, ReplicaReport
from master import degraded, replica_counts
from master import stripes as book
from master.packed import word
from master.status import status
from master.striping import apart
from tests.unit.striped_pools import (
    COLD_AFTER_S,
    data_of,
    holder,
    hosts,
    is_whole,
    lose,
    pool,
    put_pages,
    striped,
    stripes,
    tunables,
)

if TYPE_CHECKING:
    from tests.unit.master_rig import OpenedNamespace, Rig

PAGE = 4096


def used(rig: Rig) -> int:
    """Bytes that are planned or sealed in all segments."""
    return sum(each.allocator.used_bytes for each in rig.master.core.segments.values())


def probe(rig: Rig, keys: list[bytes]) -> bytes:
    return rig.open_namespace().probe(b"".join(keys))


def test_cold_pages_are_striped_over_hosts_that_differ() -> None:
    rig = pool(6, tunables(4, 2))
    put_pages(rig.open_namespace(), 24)
    rig.pass_time(5.0)
    made = stripes(rig)
    assert len(made) >= 3
    assert all(is_whole(rig, stripe) for stripe in made)
    assert {stripe.spare for stripe in made} == {2}
    totals = status(rig.master.core).stripes
    assert totals == StripeTotals(len(made), 2 * len(made) * PAGE, 0, totals.lacks)
    assert used(rig) == (24 + 2 * len(made)) * PAGE, "two parts of parity for each four"


def test_what_is_not_cold_yet_is_left_alone() -> None:
    rig = pool(4)
    keys = put_pages(rig.open_namespace(), 8)
    for _ in range(8):
        rig.pass_time(COLD_AFTER_S / 2)
        rig.open_namespace().match(keys[0], lease=False)
        for each in keys:
            rig.open_namespace().match(each, lease=False)
    assert stripes(rig) == []
    assert status(rig.master.core).stripes.lacks == "nothing more on drives is cold enough"


def test_a_pool_without_stripes_never_looks() -> None:
    rig = pool(4, tunables(erasure="off", erasure_parameters={}))
    striped(rig)
    assert stripes(rig) == []
    assert rig.master.core.stripes.look_at_s == float("inf")


def test_with_too_few_hosts_none_are_made_and_both_numbers_are_told() -> None:
    rig = pool(5, tunables(4, 2))
    striped(rig, 24)
    assert stripes(rig) == []
    totals = status(rig.master.core).stripes
    assert totals == StripeTotals(
        0, 0, 0, "k + m: got 6, want at most 5: so many hosts lend drives"
    )


def test_replicas_that_parity_stands_for_go() -> None:
    rig = pool(6, tunables(2, 2, replicas=2))
    keys = striped(rig, 8, wait_s=20.0)
    core = rig.master.core
    assert len(stripes(rig)) == 4
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))
    assert core.counters["replicas_trimmed"] == 8
    run = core.tree(1).get(keys[0])
    assert run is not None
    assert replica_counts.got(core, run, 1) == b"\3", "as if there were three replicas"
    copied = core.counters["moves_copy"]
    rig.pass_time(30.0)
    assert core.counters["moves_copy"] == copied, "nobody repairs what has parity"
    assert used(rig) == 16 * PAGE, "not 24: half of what three replicas of each take"
    operator = rig.open("operator", "", "operator")
    found = rig.settled(operator, rig.ask(operator, GetReplicas()))
    assert isinstance(found, ReplicaReport)
    assert not found.waiting, "parity beside the last replica is not one too much"
    assert found.backlog_bytes == 0


def test_replicas_on_every_host_do_not_keep_parity_out() -> None:
    """Each host has a copy of some shard then, which is let go once parity needs the place."""
    rig = pool(6, tunables(4, 2, replicas=2))
    striped(rig, 24, wait_s=20.0)
    assert stripes(rig)
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))


def test_shards_get_hosts_of_their_own_as_far_as_can_be() -> None:
    assert apart([["a"], ["a", "b"], ["b", "c"]]) == ["a", "b", "c"]
    assert apart([["a", "b"], ["a"], ["b"]]).count("") == 1
    assert apart([["a", "b", "c"], ["a", "b"], ["a"]]) == ["c", "b", "a"]
    assert apart([[], ["a"]]) == ["", "a"]


def test_pages_that_want_more_replicas_than_parity_gives_are_left_alone() -> None:
    rig = pool(4, tunables(2, 1, replicas=3))
    striped(rig)
    assert stripes(rig) == []


@pytest.mark.parametrize(("k", "m"), [(2, 1), (3, 2), (2, 2)])
def test_a_page_is_found_whichever_m_hosts_are_lost_and_then_no_more(k: int, m: int) -> None:
    for gone in range(1, m + 2):
        for lost in combinations(range(k + m), gone):
            rig = pool(k + m, tunables(k, m, repair_after_s=1e6))
            striped(rig, k * 4)
            rig.checks = False
            stripe = next(each for each in stripes(rig) if each.spare == m)
            names = [holder(rig, stripe, number) for number in lost]
            for name in names:
                rig.workers[name].leave()
            rig.pass_time(4.0)
            rig.master.check_invariants()
            found = rig.open_namespace().probe(b"".join(data_of(stripe)))
            there = [number not in lost or gone <= m for number in range(k)]
            assert [bool(each) for each in found] == there, (lost, names)


def test_a_page_that_nobody_holds_is_located_by_its_stripe_under_a_lease() -> None:
    rig = pool(4, tunables(repair_after_s=1e6))
    striped(rig)
    stripe = stripes(rig)[0]
    key = data_of(stripe)[0]
    lose(rig, holder(rig, stripe, 0))
    located = rig.open_namespace().match(key)
    (copy,) = located.runs[0].copies
    (page,) = copy.stripes
    assert (page.k, page.m, page.number) == (2, 1, 0)
    assert {shard.number for shard in page.shards} == {1, 2}
    assert copy.generations == word(stripe.number)
    until_s = rig.master.core.lease_end_s()
    for number in (1, 2):
        standing = degraded.stand(rig.master.core, stripe.members[number])
        assert standing.run is not None
        assert standing.run.leased_until_s == until_s
        assert standing.copies[0].segment.leased_until_s == until_s
    rig.now += 5.0
    renewed = rig.ask(rig.engine, RenewLease(rig.open_namespace().id, key, word(stripe.number)))
    assert getattr(renewed, "renewed", None) == b"\1"
    standing = degraded.stand(rig.master.core, stripe.members[1])
    assert standing.run is not None
    assert standing.run.leased_until_s == rig.master.core.lease_end_s() > until_s


def test_what_was_lost_is_rebuilt_on_a_host_that_has_no_other_shard() -> None:
    rig = pool(5)
    keys = striped(rig, 12)
    rig.pass_time(2.0)
    gone = holder(rig, stripes(rig)[0], 0)
    lose(rig, gone)
    rig.pass_time(6.0)
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))
    assert probe(rig, keys) == b"\1" * 12
    assert not any(gone in each for stripe in stripes(rig) for each in hosts(rig, stripe))
    for key in keys:
        (copy,) = rig.open_namespace().match(key, lease=False).runs[0].copies
        assert not copy.stripes


def test_where_every_other_host_has_a_shard_data_is_rebuilt_and_parity_waits() -> None:
    rig = pool(6, tunables(4, 2))
    keys = striped(rig, 24)
    whole = [stripe for stripe in stripes(rig) if is_whole(rig, stripe)]
    gone = holder(rig, whole[0], 4)
    lose(rig, gone)
    rig.pass_time(6.0)
    for stripe in whole:
        found = hosts(rig, stripe)
        assert all(found[:4]), "data that would be read from four others"
        assert sum(map(bool, found[4:])) >= 1
    assert probe(rig, keys) == b"\1" * 24
    assert rig.master.core.counters["rebuilds_without_place"] > 0
    rig.workers[gone].join()
    rig.pass_time(10.0)
    assert all(all(hosts(rig, stripe)) for stripe in stripes(rig))


def test_a_worker_that_returns_in_time_costs_no_rebuilding() -> None:
    rig = pool(5, tunables(repair_after_s=60.0))
    keys = striped(rig, 8)
    rebuilt = rig.master.core.counters["shards_rebuilt"]
    gone = holder(rig, stripes(rig)[0], 0)
    lose(rig, gone)
    assert rig.master.core.counters["pages_degraded"] > 0
    rig.workers[gone].join()
    rig.pass_time(70.0)
    assert rig.master.core.counters["shards_rebuilt"] == rebuilt
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))
    assert probe(rig, keys) == b"\1" * 8


def test_a_page_that_proves_damaged_is_decoded_from_then_on() -> None:
    rig = pool(4, tunables(repair_after_s=1e6))
    striped(rig)
    stripe = stripes(rig)[0]
    standing = degraded.stand(rig.master.core, stripe.members[0])
    (copy,) = standing.copies
    worker = rig.worker_of(copy.segment.id)
    offset, generation = copy.offset(standing.page), copy.generation(standing.page)
    worker.ask(ReportDamage(copy.segment.id, 1, word(offset), word(generation)))
    (located,) = rig.open_namespace().match(data_of(stripe)[0]).runs[0].copies
    assert len(located.stripes) == 1


def test_the_next_master_knows_stripes_and_rebuilds_what_is_lost_then() -> None:
    rig = pool(5)
    keys = striped(rig, 8)
    before = {stripe.number for stripe in stripes(rig)}
    parity = rig.master.core.stripes.parity
    rig.takeover(2)
    for worker in rig.workers.values():
        worker.join()
    rig.pass_time(15.0)
    assert {stripe.number for stripe in stripes(rig)} == before
    assert rig.master.core.stripes.parity == parity
    assert rig.master.core.counters["shards_rebuilt"] == 0
    lose(rig, holder(rig, stripes(rig)[0], 1))
    rig.pass_time(6.0)
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))
    assert probe(rig, keys) == b"\1" * 8


def test_a_new_master_does_not_take_pages_of_workers_it_waits_for_for_gone() -> None:
    rig = pool(4)
    striped(rig)
    before = {stripe.number for stripe in stripes(rig)}
    rig.takeover(2)
    for name in ("w0", "w1"):
        rig.workers[name].join()
    rig.pass_time(20.0)
    assert {stripe.number for stripe in stripes(rig)} == before
    assert rig.master.core.counters["shards_rebuilt"] == 0


def test_a_stripe_ends_when_parity_protects_nothing_more() -> None:
    rig = pool(4, tunables(2, 2))
    keys = striped(rig, 4)
    stripe = stripes(rig)[0]
    first, second = data_of(stripe)
    space = rig.open_namespace()
    space.remove(first)
    rig.pass_time(5.0)
    assert stripe in stripes(rig), "the other page may still lose a host"
    assert stripe.spare == 1
    before = used(rig)
    space.remove(second)
    rig.pass_time(12.0)
    assert stripe not in stripes(rig)
    assert before - used(rig) >= 3 * PAGE
    assert book.PREFIX + str(stripe.number) not in rig.store
    assert len(keys) == 4


def test_one_host_more_than_parity_stands_for_makes_misses_of_what_was_decoded() -> None:
    rig = pool(4, tunables(2, 1, repair_after_s=1e6))
    striped(rig)
    stripe = stripes(rig)[0]
    key = data_of(stripe)[0]
    lose(rig, holder(rig, stripe, 0))
    assert rig.open_namespace().probe(key) == b"\1"
    lose(rig, holder(rig, stripe, 2))
    rig.pass_time(1.0)
    assert rig.open_namespace().probe(key) == b"\0"
    assert stripe in stripes(rig), "they may come back with what they had"


def test_a_stripe_that_cannot_be_decoded_ends_once_everybody_is_there() -> None:
    rig = pool(4, tunables(2, 2, repair_after_s=1e6))
    striped(rig)
    stripe = stripes(rig)[0]
    rig.open_namespace().remove(data_of(stripe)[0])
    names = [holder(rig, stripe, number) for number in (2, 3)]
    for name in names:
        lose(rig, name)
        rig.workers[name].records.clear()
    rig.pass_time(2.0)
    assert stripe in stripes(rig)
    for name in names:
        rig.workers[name].restart()
        rig.workers[name].join()
    rig.pass_time(12.0)
    assert stripe not in stripes(rig)
    assert rig.open_namespace().probe(data_of(stripe)[1]) == b"\1"


def test_what_is_left_of_a_stripe_that_ended_may_be_striped_anew() -> None:
    rig = pool(4)
    keys = striped(rig, 8)
    stripe = stripes(rig)[0]
    gone, left = data_of(stripe)
    space = rig.open_namespace()
    space.remove(gone)
    others = put_pages(space, 6, seed=500)
    rig.pass_time(12.0)
    assert stripe not in stripes(rig)
    listed = [key for each in stripes(rig) for key in data_of(each)]
    hosts = (
        noted for each in rig.master.core.stripes.candidates.values() for noted in each.values()
    )
    waiting = [key for noted in hosts for _, _, key in noted]
    assert left in listed or left in waiting
    assert gone not in listed
    assert set(listed) <= {*keys, *others}


def test_a_page_that_was_removed_while_nobody_held_it_stays_removed() -> None:
    rig = pool(4, tunables(repair_after_s=1e6))
    striped(rig)
    stripe = stripes(rig)[0]
    key = data_of(stripe)[0]
    gone = holder(rig, stripe, 0)
    lose(rig, gone)
    space = rig.open_namespace()
    assert space.remove(key) == b"\1"
    assert space.probe(key) == b"\0"
    rig.workers[gone].join()
    rig.pass_time(15.0, step_s=1.0)
    assert space.probe(key) == b"\0"


def test_parity_lives_as_long_as_its_stripe() -> None:
    rig = pool(4, tunables(page_ttl_s=60.0))
    space = rig.open_namespace()
    keys = [b"".join(put_pages(space, 1, seed=700 + each)) for each in range(4)]
    rig.pass_time(8.0)
    for _ in range(6):
        rig.pass_time(30.0, step_s=1.0)
        for key in keys:
            space.match(key, lease=False)
    assert stripes(rig)
    assert all(is_whole(rig, stripe) for stripe in stripes(rig))


def test_what_rebuilds_a_shard_is_told_where_others_lie() -> None:
    rig = pool(5)
    striped(rig, 8)
    rig.holds_moves = True
    stripe = stripes(rig)[0]
    lose(rig, holder(rig, stripe, 0))
    rig.pass_time(4.0)
    assert rig.moves
    for command in rig.moves:
        assert isinstance(command.message, Ingest)
        source = command.message.source
        assert isinstance(source, StripeSource)
        holders = {ref.worker for ref in source.segments}
        assert rig.worker_of(command.message.segment).name not in holders
        assert len(source.pages) == len(command.message.keys) // KEY_BYTES


def test_parts_of_a_page_are_striped_each_for_itself() -> None:
    rig = pool(4)
    space: OpenedNamespace = rig.open_namespace(parts=2)
    for number in range(4):
        (key,) = [bytes([number + 1]) * KEY_BYTES]
        space.put(key, parts=(0, 1))
    rig.pass_time(10.0)
    parts = {member.part for each in stripes(rig) for member in each.members[: each.k]}
    assert parts == {0, 1}
    key = data_of(stripes(rig)[0])[0]
    lose(rig, holder(rig, stripes(rig)[0], 0))
    assert space.probe(key) == b"\1"
