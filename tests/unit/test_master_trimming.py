"""Which replicas go where there are too many, and that the last ones never do."""

from __future__ import annotations

import pytest

from kvstore.replica import ExtentState
from master import moves, replica_counts, trimming
from master.moves import MoveKind
from master.retiring import retire_copy
from tests.unit.master_pages import KEY, KEYS
from tests.unit.master_rig import Rig, chain
from tests.unit.replicated_pools import got, rig_of, run_of

PAGES = 8


@pytest.fixture
def rig() -> Rig:
    """Eight pages on each of three hosts, that are to be on two from now on; no lease runs."""
    made = rig_of("w1", "w2", "w3")
    space = made.open_namespace()
    known = made.master.core.namespaces.get(space.id)
    known.replicas = 3
    space.put(KEYS)
    made.pass_time(12.0)
    assert got(made) == [3] * PAGES
    known.replicas = 2
    return made


def trim(rig: Rig, wanted: int = 2, key: bytes = KEY) -> None:
    """Trim a run as a look would; then the checks."""
    run = run_of(rig, key)
    parts = rig.master.core.tree(run.namespace).parts
    assert trimming.has_surplus(rig.master.core, run, parts, wanted)
    trimming.trim(rig.master.core, run, parts, wanted)
    assert not trimming.has_surplus(rig.master.core, run, parts, wanted)
    rig.tick()


def holders(rig: Rig, key: bytes = KEY) -> set[str]:
    return {copy.segment.worker for copy in run_of(rig, key).copies}


def test_the_fullest_segment_is_relieved(rig: Rig) -> None:
    other = rig.open_namespace(heads=2)
    rig.master.core.namespaces.get(other.id).replicas = 1
    (fullest,) = (segment.worker for segment in other.put(chain(9, 2)).segments)
    trim(rig)
    assert holders(rig) == {"w1", "w2", "w3"} - {fullest}


def test_what_goes_is_counted_and_freed(rig: Rig) -> None:
    trim(rig)
    assert rig.master.core.counters["replicas_trimmed"] == PAGES
    rig.pass_time(1.0)
    retired = [
        segment.allocator.bytes_in[ExtentState.RETIRED]
        for segment in rig.master.core.segments.values()
    ]
    assert not any(retired)


def test_leases_are_honoured(rig: Rig) -> None:
    rig.open_namespace().match(KEYS)
    before = holders(rig)
    trim(rig)
    (gone,) = before - holders(rig)
    segment = rig.master.core.segments[f"{gone}-dram"]
    assert segment.allocator.bytes_in[ExtentState.RETIRED] == PAGES * 4096
    assert len(rig.workers[gone].records) == PAGES
    rig.pass_time(12.0)
    assert not rig.workers[gone].records


def test_one_always_stays(rig: Rig) -> None:
    trim(rig, wanted=1)
    assert got(rig) == [1] * PAGES
    with pytest.raises(AssertionError):
        trimming.trim(rig.master.core, run_of(rig), 1, 0)


def test_of_pages_with_unequally_many_only_those_with_too_many_lose_some(rig: Rig) -> None:
    run = run_of(rig)
    core = rig.master.core
    lost = next(copy for copy in run.copies if copy.segment.worker == "w3")
    retire_copy(core, run, lost, 2, 3)
    assert got(rig) == [3, 3, 2, 2, 2, 3, 3, 3]
    trim(rig)
    assert got(rig) == [2] * PAGES


def test_the_slower_tier_goes_first() -> None:
    rig = Rig()
    rig.add_worker("w1", nvme_chunks=4)
    rig.add_worker("w2", nvme_chunks=4)
    space = rig.open_namespace()
    space.put(KEYS)
    core = rig.master.core
    run = run_of(rig)
    (first,) = run.copies
    other = "w2" if first.segment.worker == "w1" else "w1"
    moves.start(core, MoveKind.COPY, run, first, range(8), core.segments[f"{other}-nvme"])
    rig.tick()
    rig.pass_time(11.0)
    assert replica_counts.got(core, run, 1) == bytes([2] * 8)
    trimming.trim(core, run, 1, 1)
    assert [copy.segment.tier for copy in run.copies] == ["dram"]
    assert space.probe(KEYS) == b"\1" * 8


def test_all_that_a_host_has_goes_together(rig: Rig) -> None:
    core, run = rig.master.core, run_of(rig)
    for copy in run.copies:
        copy.segment.host = "one" if copy.segment.worker != "w1" else "w1"
    assert not trimming.has_surplus(core, run, 1, 2), "those of one host count once"
    core.segments["w1-dram"].host = "w1"
    trim(rig, wanted=1)
    assert holders(rig) in ({"w1"}, {"w2", "w3"})


def test_what_a_drained_worker_has_is_the_first_to_go(rig: Rig) -> None:
    core = rig.master.core
    rig.checks = False  # neither the drain nor what fills the others has been begun
    for segment in core.segments.values():
        segment.drained = segment.worker == "w1"
        if not segment.drained:
            segment.allocator.plan(4096, core.new_generation(), 1, chain(7, 8))
    trim(rig)
    assert holders(rig) == {"w2", "w3"}
