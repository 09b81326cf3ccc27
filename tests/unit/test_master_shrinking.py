"""Segments of devices that give memory back: what becomes of their pages, and who is told."""

from __future__ import annotations

import pytest

from kvstore.segment import check_geometry
from kvstore.wire.messages.operator import SegmentShrinks, ShrinkSegment
from kvstore.wire.messages.pins import PagesPinned, PinPages, UnpinPages
from kvstore.wire.messages.puts import PutPlans
from master import shrinking
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain, failure
from tests.unit.master_worker import FakeSegment, FakeWorker

DEVICE, MEMORY = "w1-dram", "w1-memory"
PAGES_OF_CHUNK = 16


def made(chunks_below: int = 64, tunables: Tunables | None = None) -> Rig:
    """One worker with a device of four chunks above its memory, if it lends any."""
    rig = Rig(tunables)
    worker = rig.add_worker(chunks=4, join=False)
    worker.tier = "hbm"
    if chunks_below:
        worker.lower = FakeSegment(MEMORY, "dram", check_geometry(chunks_below * CHUNK, CHUNK))
    worker.join()
    return rig


@pytest.fixture
def rig() -> Rig:
    return made()


@pytest.fixture
def worker(rig: Rig) -> FakeWorker:
    return rig.workers["w1"]


def put(space: OpenedNamespace, keys: bytes) -> PutPlans:
    plans = space.begin(keys, tier="hbm")
    assert isinstance(plans, PutPlans), plans
    assert not any(map(any, space.report(space.write(plans, keys))))
    return plans


def shrink(rig: Rig, chunks: int) -> SegmentShrinks:
    operator = rig.open("operator", "", "kvharbor")
    reply = rig.ask(operator, ShrinkSegment(DEVICE, chunks * CHUNK + 5))
    assert isinstance(reply, SegmentShrinks), reply
    return reply


def released(rig: Rig) -> set[int]:
    return rig.segment(DEVICE).released


def capacity(rig: Rig) -> int:
    return rig.master.core.segments[DEVICE].allocator.capacity_bytes // CHUNK


def tiers(space: OpenedNamespace, keys: bytes) -> list[str]:
    return [ref.tier for ref in space.match(keys, lease=False).segments]


def test_an_empty_device_gives_its_memory_back_at_once(rig: Rig, space: OpenedNamespace) -> None:
    assert shrink(rig, 1) == SegmentShrinks(DEVICE, CHUNK, 3 * CHUNK)
    rig.pass_time(1.0)
    assert (released(rig), capacity(rig)) == ({1, 2, 3}, 1)
    assert not rig.master.core.shrinking.open
    assert rig.master.core.shrinking.look_at_s == float("inf")
    plans = space.begin(chain(1, 20), tier="hbm")
    assert isinstance(plans, PutPlans)
    found = [(plans.segments[span.segment].tier, span.count) for span in plans.spans]
    assert found == [("hbm", PAGES_OF_CHUNK), ("dram", 4)]
    assert shrink(rig, 1) == SegmentShrinks(DEVICE, CHUNK, 0)


def test_pages_are_copied_down_before_their_memory_goes(rig: Rig, space: OpenedNamespace) -> None:
    chains = [chain(number, 8) for number in range(7)]
    for keys in chains:
        put(space, keys)
    shrink(rig, 0)
    rig.pass_time(3.0)
    assert (released(rig), capacity(rig)) == ({0, 1, 2, 3}, 0)
    assert not rig.segment(DEVICE).records
    assert all(space.probe(keys) == b"\1" * 8 for keys in chains)
    assert {tier for keys in chains for tier in tiers(space, keys)} == {"dram"}


def test_the_chunks_in_which_least_lies_go(rig: Rig, space: OpenedNamespace) -> None:
    put(space, chain(1, PAGES_OF_CHUNK))
    put(space, chain(2, 2))
    shrink(rig, 1)
    rig.pass_time(2.0)
    assert capacity(rig) == 1
    assert tiers(space, chain(1, PAGES_OF_CHUNK)) == ["hbm"]
    assert tiers(space, chain(2, 2)) == ["dram"]


def test_where_there_is_nothing_below_pages_are_dropped() -> None:
    rig = made(chunks_below=0)
    space = rig.open_namespace()
    keys = chain(1, 24)
    put(space, keys)
    shrink(rig, 0)
    rig.pass_time(3.0)
    assert len(released(rig)) == 4
    assert space.probe(keys) == bytes(24)
    assert rig.master.core.tree(1).pages == 0


def test_what_finds_no_room_below_is_dropped_and_the_rest_is_kept() -> None:
    rig = made(chunks_below=1)
    space = rig.open_namespace()
    put(space, chain(1, 24))
    shrink(rig, 0)
    rig.pass_time(3.0)
    assert len(released(rig)) == 4
    left = space.probe(chain(1, 24)).count(1)
    assert 0 < left <= PAGES_OF_CHUNK


def test_hard_pinned_pages_without_room_below_stay_until_the_pin_ends() -> None:
    rig = made(chunks_below=0)
    space = rig.open_namespace()
    put(space, KEYS)
    reply = rig.ask(rig.engine, PinPages(space.id, KEYS, "o", True, 600.0))
    assert isinstance(reply, PagesPinned)
    shrink(rig, 0)
    rig.pass_time(3.0)
    assert len(released(rig)) == 3
    assert tiers(space, KEYS) == ["hbm"]
    rig.ask(rig.engine, UnpinPages(space.id, KEYS, "o"))
    rig.pass_time(1.0)
    assert len(released(rig)) == 4


def test_memory_goes_when_the_last_lease_has_ended_and_none_is_given_meanwhile(
    rig: Rig, space: OpenedNamespace
) -> None:
    put(space, KEYS)
    lease_s = rig.tunables.lease_ttl_s
    assert [ref.tier for ref in space.match(KEYS).segments] == ["hbm"]
    shrink(rig, 0)
    rig.pass_time(lease_s - 1.0)
    assert [ref.tier for ref in space.match(KEYS).segments] == ["dram"]
    assert len(released(rig)) == 3
    assert len(rig.segment(DEVICE).records) == 8
    rig.pass_time(3.0)
    assert len(released(rig)) == 4


def test_a_put_that_is_under_way_is_waited_for(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.begin(KEYS, tier="hbm")
    assert isinstance(plans, PutPlans)
    shrink(rig, 0)
    rig.pass_time(1.0)
    assert len(released(rig)) == 3
    assert not any(map(any, space.report(space.write(plans, KEYS))))
    rig.pass_time(2.0)
    assert len(released(rig)) == 4
    assert tiers(space, KEYS) == ["dram"]


def test_what_is_left_fills_by_its_own_watermarks() -> None:
    tunables = Tunables(watermark_demote=0.4, watermark_low=0.6, watermark_high=0.8)
    rig = made(tunables=tunables)
    space = rig.open_namespace()
    shrink(rig, 2)
    rig.pass_time(1.0)
    for number in range(20):
        put(space, chain(number, 4))
        rig.pass_time(1.0)
    assert rig.master.core.counters["copies_evicted_hbm"] > 40
    assert all(space.probe(chain(number, 4)) == b"\1" * 4 for number in range(20))


def test_another_leader_hears_what_has_no_memory(rig: Rig) -> None:
    shrink(rig, 2)
    rig.pass_time(1.0)
    rig.takeover(2)
    rig.workers["w1"].join()
    space = rig.open_namespace()
    assert capacity(rig) == 2
    put(space, chain(1, 2 * PAGES_OF_CHUNK))
    assert tiers(space, chain(1, 2 * PAGES_OF_CHUNK)) == ["hbm"]


def test_a_worker_that_missed_it_is_told_again(rig: Rig, worker: FakeWorker) -> None:
    rig.holds_commands = True
    shrink(rig, 2)
    rig.pass_time(1.0)
    assert not released(rig)
    worker.leave()
    rig.commands.clear()
    rig.holds_commands = False
    worker.join()
    rig.settle()
    assert released(rig) == {2, 3}


def test_a_new_life_has_everything_again(rig: Rig, space: OpenedNamespace) -> None:
    shrink(rig, 1)
    rig.pass_time(1.0)
    worker = rig.workers["w1"]
    worker.leave()
    worker.restart()
    worker.join()
    assert (capacity(rig), released(rig)) == (4, set())
    put(space, chain(1, 60))


def test_a_lost_worker_ends_it(rig: Rig, space: OpenedNamespace) -> None:
    put(space, KEYS)
    space.match(KEYS)
    shrink(rig, 0)
    rig.workers["w1"].leave()
    rig.pass_time(10.0)
    assert not rig.master.core.shrinking.open


@pytest.mark.parametrize(
    ("segment", "size_bytes", "text"),
    [
        ("w1-dram", 5 * CHUNK, f"size_bytes: got {5 * CHUNK}, want 0 to {4 * CHUNK}"),
        ("w1-dram", -1, "size_bytes: got -1, want 0 to"),
        (MEMORY, CHUNK, f"segment: got '{MEMORY}', want one on a device: {DEVICE}"),
        ("nowhere", CHUNK, "segment: got 'nowhere', want one on a device"),
    ],
)
def test_bad_wishes_are_refused(rig: Rig, segment: str, size_bytes: int, text: str) -> None:
    operator = rig.open("operator", "", "kvharbor")
    assert text in failure(rig.ask(operator, ShrinkSegment(segment, size_bytes))).text
    assert not rig.master.core.shrinking.open


def test_memory_is_given_back_to_operators_and_never_taken_again(rig: Rig) -> None:
    message = ShrinkSegment(DEVICE, CHUNK)
    assert failure(rig.ask(rig.engine, message)).code == "access_denied"
    shrink(rig, 3)
    shrink(rig, 1)
    operator = rig.open("operator", "", "kvharbor")
    refused = failure(rig.ask(operator, ShrinkSegment(DEVICE, 2 * CHUNK)))
    assert "memory comes back when its worker starts anew" in refused.text
    rig.pass_time(1.0)
    assert capacity(rig) == 1


def test_one_look_does_a_bounded_part(rig: Rig, space: OpenedNamespace,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(shrinking, "SLOTS_PER_LOOK", 1)
    put(space, KEYS)
    shrink(rig, 0)
    rig.pass_time(5.0)
    assert len(released(rig)) == 4
