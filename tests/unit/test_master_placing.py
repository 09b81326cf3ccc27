"""Where one more replica goes: to hosts that have none, far from those that have one."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.replica import Tier
from master import placing
from master.losses import lose_segment
from master.run import Copy, Run
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig

if TYPE_CHECKING:
    from master.segments import Segment

PAGES = 8
HALF = range(4)
REST = range(4, 8)


@pytest.fixture
def rig() -> Rig:
    """Three workers, each of a host of its own, with memory and a drive, and a namespace."""
    return rig_of("w1", "w2", "w3")


def rig_of(*workers: str, tunables: Tunables | None = None) -> Rig:
    """Workers of hosts that are called like them."""
    made = Rig(tunables)
    for name in workers:
        made.add_worker(name, nvme_chunks=4)
    made.open_namespace()
    return made


def lying_in(rig: Rig, *segments: str, pages: range = range(PAGES)) -> Run:
    """A run of the first namespace that lies there."""
    return run_of([copy(rig.master.core.segments[name], pages) for name in segments])


def run_of(copies: list[Copy]) -> Run:
    """Eight pages of the first namespace."""
    return Run(1, bytes(32), KEYS, 60.0, 0.0, 60.0, copies=tuple(copies))


def copy(segment: Segment, pages: range) -> Copy:
    """These pages of part 0, somewhere in a segment."""
    generations = array("Q", [int(page in pages) for page in range(PAGES)]).tobytes()
    return Copy(0, segment, 4096, generations, generations, generations, PAGES - len(pages))


def names(segments: list[Segment]) -> list[str]:
    """What they are called."""
    return [segment.id for segment in segments]


def apart(
    rig: Rig, run: Run, tier: Tier = Tier.DRAM, *, part: int = 0, near: str = "", leaves: str = ""
) -> list[str]:
    """Where a replica of the whole run may go."""
    return names(placing.apart(rig.master.core, run, part, tier, near, leaves=leaves))


def label(rig: Rig, worker: str, zone: str, rack: str = "") -> None:
    """Say where a worker stands."""
    for segment in rig.master.core.workers[worker].segments.values():
        segment.zone, segment.rack = zone, rack


def test_a_replica_goes_to_hosts_that_have_none_and_below_when_there_is_no_room(rig: Rig) -> None:
    run = lying_in(rig, "w1-dram")
    assert apart(rig, run) == ["w2-dram", "w3-dram", "w2-nvme", "w3-nvme"]
    assert apart(rig, run, Tier.NVME) == ["w2-nvme", "w3-nvme", "w2-dram", "w3-dram"]
    assert apart(rig, run, part=1)[0] == "w1-dram"  # of another part nothing is there


def test_no_two_replicas_go_to_one_host(rig: Rig) -> None:
    for segment in rig.master.core.workers["w2"].segments.values():
        segment.host = "w1"
    assert apart(rig, lying_in(rig, "w1-nvme")) == ["w3-dram", "w3-nvme"]


def test_unless_workers_count() -> None:
    rig = rig_of("w1", "w2", tunables=Tunables(replicas_apart="worker"))
    for segment in rig.master.core.segments.values():
        segment.host = "one"
    assert apart(rig, lying_in(rig, "w1-nvme")) == ["w2-dram", "w2-nvme"]


def test_where_every_host_has_one_there_is_no_place(rig: Rig) -> None:
    assert not apart(rig, lying_in(rig, "w1-dram", "w2-nvme", "w3-dram"))


def test_only_the_pages_in_question_count(rig: Rig) -> None:
    core = rig.master.core
    run = run_of([copy(core.segments["w1-dram"], HALF), copy(core.segments["w2-dram"], REST)])
    assert apart(rig, run) == ["w3-dram", "w3-nvme"]
    rest = placing.apart(core, run, 0, Tier.DRAM, pages=REST)
    assert names(rest)[:2] == ["w1-dram", "w3-dram"]


def test_what_is_being_written_counts_as_there(rig: Rig) -> None:
    space = rig.open_namespace()
    plans = space.plans(KEYS)
    run = rig.master.core.tree(space.ordinal).get(KEYS[:32])
    assert run is not None
    (segment,) = plans.segments
    assert segment.segment not in apart(rig, run)
    assert len(apart(rig, run)) == 4


def test_what_was_lost_does_not_count_and_takes_nothing(rig: Rig) -> None:
    run = lying_in(rig, "w1-dram", "w2-dram")
    lose_segment(rig.master.core, rig.master.core.segments["w2-dram"])
    assert apart(rig, run) == ["w3-dram", "w2-nvme", "w3-nvme"]


def test_what_is_about_to_go_does_not_count_and_takes_nothing(rig: Rig) -> None:
    for segment in rig.master.core.workers["w2"].segments.values():
        segment.host = "w1"
    run = lying_in(rig, "w1-dram")
    assert apart(rig, run, leaves="w1") == ["w2-dram", "w3-dram", "w2-nvme", "w3-nvme"]


def test_zones_and_racks_that_have_none_come_first() -> None:
    rig = rig_of("w1", "w2", "w3", "w4")
    label(rig, "w1", "z1", "r1")
    label(rig, "w2", "z1", "r1")
    label(rig, "w3", "z1", "r2")
    label(rig, "w4", "z2", "r1")
    run = lying_in(rig, "w1-dram")
    assert apart(rig, run)[:3] == ["w4-dram", "w3-dram", "w2-dram"]
    both = lying_in(rig, "w1-dram", "w4-dram")
    assert apart(rig, both)[:2] == ["w3-dram", "w2-dram"]
    assert apart(rig, run, near="w2")[:3] == ["w2-dram", "w4-dram", "w3-dram"]


def test_racks_tell_apart_without_zones_and_what_is_unknown_is_far(rig: Rig) -> None:
    label(rig, "w1", "", "r1")
    label(rig, "w2", "", "r1")
    assert apart(rig, lying_in(rig, "w1-dram"))[:2] == ["w3-dram", "w2-dram"]
