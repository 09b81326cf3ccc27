"""How many replicas pages have and are to have, counted by host or by worker."""

from __future__ import annotations

from array import array

import pytest

from master import replica_counts
from master.run import Copy, Run
from master.segments import Segment, SegmentState
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig

PAGES = 8
HALF = range(4)


@pytest.fixture
def rig() -> Rig:
    """Three workers, each of a host of its own, and a namespace."""
    made = Rig(Tunables(cluster="test"))
    for name in ("w1", "w2", "w3"):
        made.add_worker(name, nvme_chunks=4)
    made.open_namespace()
    return made


def run_of(*copies: Copy) -> Run:
    """Eight pages of the first namespace that lie there."""
    return Run(1, bytes(32), KEYS, 60.0, 0.0, 60.0, copies=copies)


def copy(segment: Segment, pages: range = range(PAGES), part: int = 0) -> Copy:
    """These pages of a part, somewhere in a segment."""
    generations = array("Q", [int(page in pages) for page in range(PAGES)]).tobytes()
    return Copy(part, segment, 4096, generations, generations, generations, PAGES - len(pages))


def test_each_host_that_has_a_page_counts_once(rig: Rig) -> None:
    core = rig.master.core
    places = [core.segments[name] for name in ("w1-dram", "w2-dram", "w1-nvme")]
    run = run_of(copy(places[0]), copy(places[1], HALF), copy(places[2]))
    assert replica_counts.got(core, run, 1) == bytes([2, 2, 2, 2, 1, 1, 1, 1])
    for segment in core.segments.values():
        segment.host = "one"
    assert replica_counts.got(core, run, 1) == bytes([1] * PAGES)


def test_what_cannot_be_read_does_not_count(rig: Rig) -> None:
    core = rig.master.core
    run = run_of(copy(core.segments["w1-dram"]), copy(core.segments["w2-dram"]))
    core.segments["w2-dram"].readable = False
    assert replica_counts.got(core, run, 1) == bytes([1] * PAGES)


def test_the_scarcest_part_counts(rig: Rig) -> None:
    core = rig.master.core
    places = [core.segments[f"w{number}-dram"] for number in (1, 2, 3)]
    run = run_of(copy(places[0]), copy(places[1]), copy(places[2], HALF, part=1))
    assert replica_counts.got(core, run, 2) == bytes([1, 1, 1, 1, 0, 0, 0, 0])


def test_by_worker_where_that_is_asked_for() -> None:
    rig = Rig(Tunables(replicas_apart="worker"))
    for name in ("w1", "w2"):
        rig.add_worker(name)
    rig.open_namespace()
    core = rig.master.core
    for segment in core.segments.values():
        segment.host = "one"
    run = run_of(copy(core.segments["w1-dram"]), copy(core.segments["w2-dram"]))
    assert replica_counts.got(core, run, 1) == bytes([2] * PAGES)
    assert replica_counts.lending(core) == {"w1", "w2"}


def test_what_nobody_asked_for_is_bounded_by_the_hosts(rig: Rig) -> None:
    core, run = rig.master.core, run_of()
    known = core.namespaces.by_ordinal(1)
    assert known is not None
    assert (core.domains, replica_counts.wanted(core, run)) == (3, 2)
    for name in ("w2-dram", "w2-nvme", "w3-dram", "w3-nvme"):
        core.segments[name].state = SegmentState.LOST
    core.domains = len(replica_counts.lending(core))
    assert (core.domains, replica_counts.wanted(core, run)) == (1, 1)
    known.replicas = 3
    assert replica_counts.wanted(core, run) == 3
    run.replicas, run.extra = 2, 1
    assert replica_counts.wanted(core, run) == 3
