"""Which pages are copied to a drive ahead of eviction, and what eviction makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import ReportSegment
from kvstore.wire.messages.reads import Prefetch
from master import moves, tiering, victims
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure
from tests.unit.pools import PAGE, TIERED, held, put_chains, rig_with

if TYPE_CHECKING:
    from policies.admission.protocol import Candidate


def test_nothing_is_copied_while_memory_has_room() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(6))
    assert not held(rig, "w1-nvme")
    assert not rig.master.core.moves.demoting


def test_the_coldest_pages_are_copied_ahead_and_stay_in_memory() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(9))
    copied = held(rig, "w1-nvme")
    assert copied
    assert copied < held(rig, "w1-dram")
    assert chain(0, 1) in copied
    assert chain(8, 1) not in copied
    assert rig.master.core.counters["pages_evicted"] == 0
    assert rig.master.core.counters["moved_bytes_nvme"] == len(copied) * PAGE
    assert not rig.master.core.moves.demoting, "it rests once the coldest are safe"
    assert rig.master.core.moves.look_at_s == float("inf")


def test_what_lies_below_goes_from_memory_alone() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(40))
    counters = rig.master.core.counters
    assert counters["pages_evicted"] == 0
    assert counters["copies_evicted_dram"] > 80
    assert all(space.probe(chain(number, 4)) == b"\1" * 4 for number in range(40))
    located = space.match(chain(0, 4))
    assert {ref.tier for ref in located.segments} == {"nvme"}


def test_lookups_list_the_faster_tier_first() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(9))
    assert tiers(space, chain(0, 4)) == ["dram", "nvme"]


def test_a_page_that_was_copied_is_not_put_again() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(40))
    plans = space.plans(chain(0, 4))
    assert not plans.spans
    assert [each.count for each in plans.present] == [4]


def test_tails_are_copied_first() -> None:
    rig, space = rig_with()
    long = chain(0, 16)
    space.put(long)
    space.put(chain(1, 4), parent=long[-32:])
    rig.pass_time(1.0)
    rig.holds_commands = True
    space.put(chain(2, 8))
    rig.tick()
    plans = list(rig.master.core.plans.values())
    assert plans
    assert chain(1, 4) in {plan.keys for plan in plans}
    assert long not in {plan.keys for plan in plans}


def test_a_parent_may_leave_memory_before_what_hangs_below_it_leaves_the_pool() -> None:
    rig, space = rig_with()
    parent, child = chain(0, 4), chain(1, 4)
    space.put(parent)
    space.put(child, parent=parent[-32:])
    put_chains(rig, space, range(2, 40))
    assert space.probe(parent + child) == b"\1" * 8
    assert not (held(rig, "w1-dram") & {parent[:32], child[:32]})


def test_what_a_drive_refuses_leaves_the_pool() -> None:
    rig, space = rig_with(tunables=replace(TIERED, nvme_admission="none"))
    put_chains(rig, space, range(20))
    counters = rig.master.core.counters
    assert counters["demotions_refused_none"]
    assert counters["pages_evicted_dram"] == counters["pages_evicted"] > 0
    assert not held(rig, "w1-nvme")


def test_the_admission_policy_hears_of_sizes_and_uses() -> None:
    rig, space = rig_with()
    heard: list[Candidate] = []
    policy = rig.master.core.admission.policy

    def admits(candidate: Candidate, now_s: float) -> bool:
        assert now_s == rig.now
        heard.append(candidate)
        return False

    policy.admits = admits  # type: ignore[method-assign]  # to listen in
    put_chains(rig, space, range(10))
    assert {(each.size_bytes, each.touches) for each in heard} == {(4 * PAGE, 1)}


def test_a_drive_that_is_full_makes_room_by_its_own_rules() -> None:
    rig, space = rig_with(nvme_chunks=4)
    put_chains(rig, space, range(60))
    counters = rig.master.core.counters
    assert counters["pages_evicted_nvme"] == counters["pages_evicted"] > 0
    used = rig.master.core.segments["w1-nvme"].allocator.used_bytes
    assert used <= 0.8 * 64 * PAGE
    assert space.probe(chain(59, 4)) == b"\1" * 4
    assert 0 in space.probe(chain(0, 4)), "the coldest left the pool"


def test_a_drive_full_of_another_class_is_emptied_chunk_by_chunk() -> None:
    rig, space = rig_with(chunks=8, nvme_chunks=1)
    put_chains(rig, space, range(17))
    assert held(rig, "w1-nvme")
    large = rig.open_namespace(heads=4)
    for number in range(100, 108):
        large.put(chain(number, 2))
        rig.pass_time(1.0)
    assert rig.master.core.counters["moves_without_room"]


def test_pages_that_a_hole_hides_are_not_worth_a_write() -> None:
    rig, space = rig_with()
    space.put(KEYS)
    rig.pass_time(1.0)
    space.remove(KEYS[:32])
    put_chains(rig, space, range(2, 12))
    assert not (held(rig, "w1-nvme") & {KEYS[at : at + 32] for at in range(0, len(KEYS), 32)})


def test_the_other_parts_of_a_page_move_too() -> None:
    rig = Rig(TIERED)
    rig.add_worker(chunks=4, nvme_chunks=16)
    space = rig.open_namespace(parts=2)
    for number in range(9):
        space.put(chain(number, 2), parts=(0, 1))
        rig.pass_time(1.0)
    records = rig.segment("w1-nvme").records.values()
    parts = {(bytes(record.key), record.part) for record in records}
    assert parts
    assert parts == {(key, part) for key, _ in parts for part in (0, 1)}


def test_without_a_drive_nobody_looks() -> None:
    rig, space = rig_with(nvme_chunks=0)
    put_chains(rig, space, range(9))
    assert not rig.master.core.moves.demoting
    assert rig.master.core.moves.look_at_s == float("inf")


@pytest.mark.parametrize("state", ["read_only", "failed"])
def test_nothing_is_copied_to_a_drive_that_does_not_serve(state: str) -> None:
    rig, space = rig_with()
    rig.workers["w1"].ask(ReportSegment("w1-nvme", 1, state, "EIO"))
    put_chains(rig, space, range(20))
    assert not held(rig, "w1-nvme")
    assert rig.master.core.counters["pages_evicted"] > 0


def test_a_drive_that_fails_takes_with_it_what_lay_there_alone() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(20))
    in_memory = held(rig, "w1-dram")
    rig.workers["w1"].ask(ReportSegment("w1-nvme", 1, "failed", "EIO"))
    rig.settle()
    for number in range(20):
        here = bytes(chain(number, 4)[at : at + 32] in in_memory for at in range(0, 128, 32))
        assert space.probe(chain(number, 4)) == here


def test_both_copies_are_found_again_by_another_master() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(9))
    copied = held(rig, "w1-nvme")
    rig.takeover(2)
    space = rig.open_namespace()
    rig.workers["w1"].join()
    rig.pass_time(12.0)
    assert space.probe(chain(0, 4)) == b"\1" * 4
    assert held(rig, "w1-nvme") >= copied
    assert {ref.tier for ref in space.match(chain(0, 4)).segments} == {"dram", "nvme"}


def test_a_page_leaves_every_tier_when_it_is_removed_or_expires() -> None:
    rig, space = rig_with()
    put_chains(rig, space, range(9))
    assert space.remove(chain(0, 4)) == b"\1" * 4
    rig.pass_time(1.0)
    keys = {chain(0, 4)[at : at + 32] for at in range(0, 128, 32)}
    assert not keys & (held(rig, "w1-nvme") | held(rig, "w1-dram"))
    rig.pass_time(rig.tunables.page_ttl_s, step_s=60.0)
    rig.pass_time(2.0)
    assert not held(rig, "w1-nvme") | held(rig, "w1-dram")


def cold_chain(rig: Rig, space: OpenedNamespace) -> bytes:
    """A chain that lies on the drive only; memory is full of others."""
    put_chains(rig, space, range(40))
    keys = chain(0, 4)
    assert tiers(space, keys) == ["nvme"]
    return keys


def tiers(space: OpenedNamespace, keys: bytes) -> list[str]:
    """Where pages are found."""
    return [ref.tier for ref in space.match(keys, lease=False).segments]


def test_pages_are_brought_up_when_they_are_leased_a_second_time() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    space.match(keys)
    rig.settle()
    assert tiers(space, keys) == ["nvme"]
    space.match(keys)
    rig.pass_time(0.2, step_s=0.05)
    assert tiers(space, keys) == ["dram", "nvme"]
    assert rig.master.core.counters["moved_pages_dram"] == 4
    run = rig.master.core.tree(1).get(keys[:32])
    assert run is not None
    assert run.cold_hits == 0
    rig.pass_time(1.0)
    assert tiers(space, keys) == ["dram", "nvme"], "what was wanted stays"


def test_looking_without_a_lease_brings_nothing_up() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    for _ in range(5):
        space.match(keys, lease=False)
    rig.settle()
    assert tiers(space, keys) == ["nvme"]


def test_both_halves_of_a_run_know_how_often_it_was_read() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    space.match(keys)
    space.match(keys[:64])
    rig.pass_time(0.2, step_s=0.05)
    assert tiers(space, keys[:64]) == ["dram", "nvme"]
    assert [len(run.copies) for run in space.match(keys, lease=False).runs] == [2, 1]


def test_pages_that_will_be_read_soon_are_brought_up_at_once() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    assert rig.ask(rig.engine, Prefetch(space.id, keys[:96] + chain(99, 3))) == Done()
    rig.pass_time(0.2, step_s=0.05)
    assert [len(run.copies) for run in space.match(keys, lease=False).runs] == [2, 1]
    assert rig.master.core.counters["moved_pages_dram"] == 3
    assert rig.ask(rig.engine, Prefetch(space.id, keys[:96])) == Done()
    assert not rig.master.core.moves.wishes, "they are there"


def test_only_a_tenants_own_pages_are_brought_up_for_it() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    other = rig.open("engine", "another tenant", "engine")
    assert failure(rig.ask(other, Prefetch(space.id, keys))).code == "access_denied"
    assert failure(rig.ask(rig.engine, Prefetch(space.id, keys[:-1]))).code == "bad_value"


def test_every_part_of_a_page_is_brought_up() -> None:
    rig = Rig(TIERED)
    rig.add_worker(chunks=4, nvme_chunks=64)
    space = rig.open_namespace(parts=2)
    for number in range(30):
        space.put(chain(number, 2), parts=(0, 1))
        rig.pass_time(1.0)
    keys = chain(0, 2)
    rig.ask(rig.engine, Prefetch(space.id, keys))
    rig.settle()
    (run,) = space.match(keys, lease=False).runs
    assert [copy.part for copy in run.copies] in ([0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 1, 0])


def test_memory_makes_room_for_what_is_wanted_again() -> None:
    rig, space = rig_with(tunables=replace(TIERED, watermark_low=0.99, watermark_high=1.0))
    put_chains(rig, space, range(16))
    keys = chain(0, 4)
    assert tiers(space, keys) == ["dram", "nvme"]
    run = rig.master.core.tree(1).get(keys[:32])
    assert run is not None
    segment = rig.master.core.segments["w1-dram"]
    assert victims.evict_tail(rig.master.core, segment, run, 4 * PAGE) == 4 * PAGE
    rig.tick()
    put_chains(rig, space, range(16, 17))
    assert segment.allocator.free_bytes == 0
    rig.ask(rig.engine, Prefetch(space.id, keys))
    rig.pass_time(1.0)
    assert tiers(space, keys) == ["dram", "nvme"]
    assert not rig.master.core.moves.wishes


def test_the_last_of_memory_is_left_to_puts() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    segment = rig.master.core.segments["w1-dram"]
    rig.ask(rig.engine, Prefetch(space.id, keys))
    for _ in range(10):
        rig.pass_time(0.05)
        assert segment.allocator.used_bytes <= 0.8 * segment.geometry.payload_bytes
    assert tiers(space, keys) == ["dram", "nvme"]


def test_a_wish_that_finds_no_room_is_given_up() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    large = chain(100, 48)
    space.put(large)
    for each in (*(chain(number, 4) for number in range(20, 40)), large):
        space.match(each)  # so that nothing in memory may go
    rig.ask(rig.engine, Prefetch(space.id, keys))
    assert rig.master.core.moves.wishes
    rig.pass_time(1.0)
    assert not rig.master.core.moves.wishes
    assert rig.master.core.counters["moves_without_room"] >= tiering.TRIES_MAX
    assert tiers(space, keys) == ["nvme"]


def test_a_wish_waits_until_its_worker_is_free() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    lane = rig.master.core.workers["w1"].lane
    lane.rests_until_s = rig.now + 2.0
    rig.ask(rig.engine, Prefetch(space.id, keys))
    rig.pass_time(1.5)
    assert tiers(space, keys) == ["nvme"]
    rig.pass_time(1.0)
    assert tiers(space, keys) == ["dram", "nvme"]


def test_wishes_are_bounded_and_end_with_the_drive() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    core = rig.master.core
    others = [chain(number, 1) for number in range(1000, 1000 + tiering.WISHES_MAX)]
    core.moves.wishes = {key: moves.Wish(1, key) for key in others}
    rig.ask(rig.engine, Prefetch(space.id, keys))
    assert core.counters["promotions_dropped"] == 1
    rig.workers["w1"].leave()
    core.moves.look(rig.now)
    rig.settle()
    assert not core.moves.wishes


def test_hits_are_counted_by_the_slowest_tier_that_they_need() -> None:
    rig, space = rig_with()
    keys = cold_chain(rig, space)
    counters = rig.master.core.counters
    counters.clear()
    space.match(chain(39, 4), lease=False)
    space.match(keys, lease=False)
    assert (counters["hits_dram"], counters["hits_nvme"]) == (4, 4)
    rig.ask(rig.engine, Prefetch(space.id, keys[:32]))
    rig.settle()
    space.match(keys, lease=False)
    assert (counters["hits_dram"], counters["hits_nvme"]) == (5, 7)


def test_hits_of_pages_in_parts_are_counted_alike() -> None:
    rig = Rig(TIERED)
    rig.add_worker(chunks=4, nvme_chunks=64)
    space = rig.open_namespace(parts=2)
    for number in range(30):
        space.put(chain(number, 2), parts=(0, 1))
        rig.pass_time(1.0)
    keys, counters = chain(0, 2), rig.master.core.counters
    counters.clear()
    space.match(chain(29, 2), lease=False)
    space.match(keys, lease=False)
    assert (counters["hits_dram"], counters["hits_nvme"]) == (2, 2)
    rig.ask(rig.engine, Prefetch(space.id, keys[:32]))
    rig.settle()
    space.match(keys, lease=False)
    assert (counters["hits_dram"], counters["hits_nvme"]) == (3, 3)
