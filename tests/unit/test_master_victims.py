"""Which runs are found, and what of them goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.replica import ExtentState
from kvstore.wire.messages.pins import PinPages
from kvstore.wire.messages.puts import AbortPut, Sealed
from master import victims
from master.tunables import Tunables
from policies.eviction.protocol import SAME_USE_S
from tests.unit.master_rig import OpenedNamespace, Rig, chain
from tests.unit.pools import PAGE, evict

if TYPE_CHECKING:
    from master.run import Run
    from tests.unit.master_worker import FakeWorker


def rig_with_pages(chains: int, eviction: str = "lrfu") -> tuple[Rig, OpenedNamespace]:
    """A pool with some chains of 8 pages, put one second after the other."""
    rig = Rig(Tunables(cluster="test", eviction=eviction, replicas=1))
    rig.add_worker()
    space = rig.open_namespace()
    for number in range(chains):
        space.put(chain(number, 8))
        rig.pass_time(1.0)
    return rig, space


def test_the_coldest_go_first() -> None:
    rig, space = rig_with_pages(4)
    assert evict(rig, 8 * PAGE) == (8 * PAGE, 99)
    assert space.probe(chain(0, 8)) == bytes(8)
    assert all(space.probe(chain(number, 8)) == b"\1" * 8 for number in (1, 2, 3))


def test_no_more_goes_than_is_asked_for() -> None:
    rig, space = rig_with_pages(1)
    assert evict(rig, 3 * PAGE - 1)[0] == 3 * PAGE
    assert space.probe(chain(0, 8)) == b"\1" * 5 + bytes(3)


def test_pages_that_a_hole_hides_go_first() -> None:
    rig, space = rig_with_pages(2)
    space.remove(chain(1, 8)[32:64])
    evict(rig, 6 * PAGE)
    assert space.probe(chain(0, 8)) == b"\1" * 8
    assert space.probe(chain(1, 8)) == b"\1" + bytes(7)


def test_pages_of_an_open_put_stay() -> None:
    rig, space = rig_with_pages(1)
    space.plans(chain(7, 2), parent=chain(0, 8)[-32:])
    freed, searches = evict(rig, 8 * PAGE)
    assert freed == 0
    assert searches == 100 - victims.FRUITLESS_MAX


def test_a_copy_that_is_not_the_last_goes_alone() -> None:
    rig, space = rig_with_pages(1)
    rig.workers["w1"].leave()
    rig.pass_time(4.0)
    rig.add_worker("w2")
    space.put(chain(0, 8))
    rig.workers["w1"].join()
    rig.settle()
    space.put(chain(5, 2), parent=chain(0, 8)[-32:])
    segment = rig.master.core.segments["w1-dram"]
    before = segment.allocator.bytes_in[ExtentState.SEALED]
    assert before >= 8 * PAGE
    run = rig.master.core.tree(1).get(chain(0, 1))
    assert run is not None
    assert victims.evict_tail(rig.master.core, segment, run, 3 * PAGE) == 3 * PAGE
    assert victims.evict_tail(rig.master.core, segment, run, 8 * PAGE) == 5 * PAGE
    assert rig.master.core.counters["copies_evicted_dram"] == 8
    rig.settle()
    assert space.probe(chain(0, 8)) == b"\1" * 8
    assert victims.evict_tail(rig.master.core, segment, run, 1) == 0, "it has a child"


def test_what_lies_elsewhere_goes_from_here_though_pages_hang_below_it() -> None:
    rig, space = rig_with_pages(1)
    rig.workers["w1"].leave()
    rig.pass_time(4.0)
    rig.add_worker("w2")
    space.put(chain(0, 8))
    space.put(chain(5, 2), parent=chain(0, 8)[-32:])
    rig.workers["w1"].join()
    rig.pass_time(12.0)  # so that no lease of old runs
    assert evict(rig, 3 * PAGE)[0] == 3 * PAGE
    assert evict(rig, 8 * PAGE)[0] == 5 * PAGE
    assert space.probe(chain(0, 8) + chain(5, 2)) == b"\1" * 10
    assert rig.master.core.counters["pages_evicted"] == 0


def test_pages_in_part_elsewhere_are_not_taken_for_pages_with_a_hole() -> None:
    rig, space = rig_with_pages(1)
    rig.workers["w1"].leave()
    rig.pass_time(4.0)
    rig.add_worker("w2")
    space.put(chain(0, 8))
    rig.workers["w1"].join()
    rig.pass_time(12.0)  # so that no lease of old runs
    evict(rig, 3 * PAGE)
    run = rig.master.core.tree(1).get(chain(0, 1))
    assert run is not None
    assert any(copy.absent for copy in run.copies)
    assert not run.has_gaps()
    space.remove(chain(0, 8)[3 * 32 : 4 * 32])
    assert run.has_gaps()


def test_scores_of_victims_are_remembered() -> None:
    rig, space = rig_with_pages(1)
    for _ in range(3):
        rig.pass_time(SAME_USE_S)
        space.match(chain(0, 8), lease=False)
    run = rig.master.core.tree(1).get(chain(0, 1))
    assert run is not None
    heat = run.heat
    evict(rig, 8 * PAGE)
    rig.pass_time(SAME_USE_S)
    rig.settle()
    space.put(chain(0, 8))
    again = rig.master.core.tree(1).get(chain(0, 1))
    assert again is not None
    assert again.heat > heat > rig.now
    assert (run.touches, again.touches) == (4, 5)


def test_the_policy_may_spare_a_victim() -> None:
    rig, space = rig_with_pages(2, "s3-fifo")
    for _ in range(2):
        rig.pass_time(SAME_USE_S)
        space.match(chain(0, 8), lease=False)
    evict(rig, 8 * PAGE)
    assert space.probe(chain(0, 8)) == b"\1" * 8
    assert space.probe(chain(1, 8)) == bytes(8)


def test_nothing_is_spared_that_cannot_be_hit() -> None:
    rig, space = rig_with_pages(2, "s3-fifo")
    for _ in range(2):
        rig.pass_time(SAME_USE_S)
        space.match(chain(1, 8), lease=False)
    space.remove(chain(1, 8)[32:64])
    evict(rig, 6 * PAGE)
    assert space.probe(chain(0, 8)) == b"\1" * 8
    assert space.probe(chain(1, 8)) == b"\1" + bytes(7)


def test_deep_chains_of_single_pages_are_evicted_from_the_end() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace()
    keys = chain(0, 40)
    for page in range(40):
        parent = keys[(page - 1) * 32 : page * 32] if page else bytes(32)
        space.put(keys[page * 32 : (page + 1) * 32], parent=parent)
    evict(rig, 10 * PAGE)
    assert space.probe(keys) == b"\1" * 30 + bytes(10)


def test_a_copy_without_some_pages_replaces_no_other() -> None:
    rig, space = rig_with_pages(1)
    keys = chain(0, 8)
    rig.workers["w1"].leave()
    rig.pass_time(5.0)
    other = rig.add_worker("w2")
    plans = space.plans(keys)
    reports = space.write(plans, keys)
    (report,) = reports
    first = Sealed(
        report.segment, report.incarnation, report.generation, report.namespace_ordinal,
        report.part, report.part_bytes, report.token_count, report.parents[:64], report.keys[:64],
        report.offsets[:16], report.checksums[:16],
    )  # fmt: skip
    space.report([first])
    rig.workers["w1"].join()
    rig.ask(rig.engine, AbortPut((report.generation,)))
    run = rig.master.core.tree(space.ordinal).get(keys[:32])
    assert run is not None
    assert sorted(copy.absent for copy in run.copies) == [0, 6]
    segment = rig.master.core.segments["w1-dram"]
    victims.evict_tail(rig.master.core, segment, run, 2 * PAGE)
    rig.master.check_invariants()
    assert space.probe(keys) == b"\1" * 6 + bytes(2)
    assert other.records


def test_a_page_whose_other_part_may_be_on_its_way_stays() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace(parts=2)
    space.put(chain(0, 2), parts=(0, 1))
    rig.pass_time(1.0)
    space.match(chain(0, 2), lease=False)  # so that it is the hotter one
    space.put(chain(1, 2), parts=(0,))
    assert evict(rig, 2 * PAGE)[0] == 2 * PAGE
    assert space.probe(chain(0, 2)) == b"\1\0"
    rig.pass_time(rig.tunables.put_timeout_base_s - 1.0)
    run = rig.master.core.tree(space.ordinal).get(chain(1, 1))
    assert run is not None
    assert run.part_present(0) == b"\1\1"


def test_what_nobody_reads_is_made_safe_before_what_is_leased() -> None:
    rig, space = rig_with_pages(16)
    core = rig.master.core
    for number in range(12):
        run = core.tree(space.ordinal).get(chain(number, 1))
        assert run is not None
        run.lease(core.now + 10.0)
    found = victims.find_unsafe(core, core.segments["w1-dram"])
    assert [run.keys[:32] for run in found[:5]] == [chain(n, 1) for n in (12, 13, 14, 15, 0)]


def test_replicas_that_are_not_the_last_go_before_the_last_ones_of_colder_pages() -> None:
    rig = Rig(Tunables(cluster="test", replicas=2))
    rig.add_worker("w1")
    space = rig.open_namespace()
    cold, warm = chain(0, 4), chain(1, 4)
    space.put(cold)
    rig.pass_time(20.0)
    known = rig.master.core.namespaces.get(space.id)
    known.replicas = 1
    rig.add_worker("w2")
    rig.pass_time(3.0)
    known.replicas = 2
    space.put(warm)
    rig.pass_time(12.0)
    core = rig.master.core
    run = core.tree(1).get(warm[:32])
    assert run is not None
    assert len(run.copies) == 2
    segment = core.segments["w1-dram"]
    found = victims.find_victims(core, segment, segment.allocator.chunk_list)
    assert next(victim.keys for victim in found) == warm
    victims.evict_tail(core, segment, run, 4 * PAGE)
    assert run.thinned
    assert space.probe(cold + warm) == b"\1" * 8


def silence(worker: FakeWorker) -> None:
    """It misses some heartbeats, and is not lost yet."""
    worker.beat = lambda: None  # type: ignore[method-assign]  # as if it were stopped
    worker.rig.pass_time(1.5)


def run_of(rig: Rig, keys: bytes) -> Run:
    """The one run that these pages are, with two replicas."""
    run = rig.master.core.tree(1).get(keys[:32])
    assert run is not None
    assert run.keys == keys
    assert len(run.copies) == 2
    return run


def test_what_a_silent_worker_has_too_is_worth_as_much_as_a_last_one() -> None:
    rig = Rig(Tunables(cluster="test", replicas=2))
    rig.add_worker("w1")
    silent = rig.add_worker("w2")
    space = rig.open_namespace()
    cold, warm = chain(0, 4), chain(1, 4)
    space.put(cold)
    rig.pass_time(2.0)
    silent.leave()
    rig.add_worker("w3")
    space.put(warm)
    rig.pass_time(1.0)
    silent.join()
    rig.pass_time(12.0)
    assert {c.segment.worker for c in run_of(rig, cold).copies} == {"w1", "w2"}
    assert {c.segment.worker for c in run_of(rig, warm).copies} == {"w1", "w3"}
    segment = rig.master.core.segments["w1-dram"]
    for want in (cold, warm):
        found = victims.find_victims(rig.master.core, segment, segment.allocator.chunk_list)
        assert found[0].keys == want
        silence(silent)


def test_a_hard_pin_keeps_the_last_copy_whose_worker_is_heard() -> None:
    rig = Rig(Tunables(cluster="test", replicas=2))
    rig.add_worker("w1")
    silent = rig.add_worker("w2")
    space = rig.open_namespace()
    keys = chain(0, 4)
    space.put(keys)
    rig.pass_time(12.0)
    rig.ask(rig.engine, PinPages(space.id, keys[: 3 * 32], "o", True, 60.0))
    silence(silent)
    core, run = rig.master.core, run_of(rig, keys)
    segment = core.segments["w1-dram"]
    assert victims.evict_tail(core, segment, run, 4 * PAGE) == PAGE, "behind the pinned ones"
    assert [victims.evict_copy(core, segment, run, page) for page in range(3)] == [False] * 3
    rig.pass_time(3.0)
    assert rig.master.core.counters["workers_lost"] == 1
    assert space.probe(keys) == b"\1" * 3 + bytes(1)


@pytest.mark.parametrize(
    ("branches", "pinned", "stays"),
    [
        pytest.param(1, True, True, id="one of what hangs below is pinned"),
        pytest.param(1, False, False, id="nothing is"),
        pytest.param(3, False, True, id="more hangs below than is looked through"),
    ],
)
def test_what_is_above_a_hard_pin_keeps_the_copy_whose_worker_is_heard(
    monkeypatch: pytest.MonkeyPatch, branches: int, pinned: bool, stays: bool
) -> None:
    monkeypatch.setattr(victims, "BELOW_RUNS_MAX", 2)
    rig = Rig(Tunables(cluster="test", replicas=2))
    rig.add_worker("w1")
    silent = rig.add_worker("w2")
    space = rig.open_namespace()
    keys, other = chain(0, 4), chain(100, 1)
    space.put(keys)
    space.put(other)
    below = [chain(number, 2) for number in range(1, branches + 1)]
    for each in below:
        space.put(each, keys[-32:])
    rig.pass_time(12.0)
    rig.ask(rig.engine, PinPages(space.id, below[0][32:] if pinned else other, "o", True, 60.0))
    silence(silent)
    core, run = rig.master.core, run_of(rig, keys)
    freed = victims.evict_tail(core, core.segments["w1-dram"], run, 4 * PAGE)
    assert freed == (0 if stays else 4 * PAGE)
    rig.pass_time(3.0)
    assert core.counters["workers_lost"] == 1
    assert space.probe(keys) == (b"\1" if stays else b"\0") * 4
