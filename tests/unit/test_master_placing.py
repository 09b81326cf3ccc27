"""Where puts go, and one more replica: to hosts that have none, far from those that have one."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvstore.ids import ROOT_PARENT
from kvstore.replica import Tier
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from master import placing
from master.losses import lose_segment
from master.run import Copy, Run
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import TENANT, Rig, chain

if TYPE_CHECKING:
    from master.segments import Segment

PAGES = 8
WORKERS = tuple(f"w{number}" for number in range(10))
HALF = range(4)
REST = range(4, 8)


@pytest.fixture
def rig() -> Rig:
    """Three workers, each of a host of its own, with memory and a drive, and a namespace."""
    return rig_of("w1", "w2", "w3")


def rig_of(*workers: str, apart: str = "host", placement: str = "most_free") -> Rig:
    """Workers of hosts that are called like them."""
    made = Rig(Tunables(replicas=1, replicas_apart=apart, placement=placement))
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
    rig = rig_of("w1", "w2", apart="worker")
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


@pytest.mark.parametrize("placement", ["two_choices", "local_first"])
def test_what_is_equally_good_is_drawn(placement: str) -> None:
    rig = rig_of(*WORKERS, placement=placement)
    run = lying_in(rig, "w0-dram")
    firsts = Counter(apart(rig, run)[0] for _ in range(300))
    assert set(firsts) <= {f"{name}-dram" for name in WORKERS[1:]}
    assert len(firsts) > 5
    assert {apart(rig, run, near="w4")[0] for _ in range(20)} == {"w4-dram"}


def firsts_of_puts(rig: Rig, host: str = "", puts: int = 640) -> Counter[str]:
    """Where puts from a host go first; time passes, and one in ten of them takes a page."""
    core, space = rig.master.core, rig.open_namespace()
    found: Counter[str] = Counter()
    for number in range(puts):
        found[placing.ranked(core, "", host)[0].id] += 1
        if number % 10 == 0:
            space.put(chain(1000 + number, 1))
            rig.tick(0.01)
    return found


def test_a_worker_that_comes_empty_gets_no_more_than_twice_its_share() -> None:
    rig = rig_of(*WORKERS)
    rig.checks = False  # of thousands of pages after each of thousands of events
    space = rig.open_namespace()
    for number in range(30):
        space.put(chain(number, 64))
        rig.tick(placing.RANKED_FOR_S)
    filled = [rig.master.core.segments[f"{name}-dram"].allocator for name in WORKERS]
    assert all(each.used_bytes > each.capacity_bytes // 2 for each in filled)
    rig.add_worker("w10")
    assert firsts_of_puts(rig) == {"w10-dram": 640}
    rig.master.core.policies["placement"].change("two_choices", {})
    rig.master.core.rankings.clear()
    assert 1 / 11 < firsts_of_puts(rig)["w10-dram"] / 640 < 2.2 / 11
    rig.master.check_invariants()


def test_puts_go_to_the_writers_host_and_those_of_others_anywhere() -> None:
    rig = rig_of(*WORKERS, placement="local_first")
    assert firsts_of_puts(rig, "w3") == {"w3-dram": 640}
    assert len(firsts_of_puts(rig, "elsewhere")) == len(WORKERS)
    session = rig.open("engine", TENANT, "e", host="w7")
    space = rig.open_namespace(session=session)
    plans = space.plans(KEYS, session=session)
    assert [each.segment for each in plans.segments] == ["w7-dram"]


def test_hosts_that_lend_nothing_have_no_ranking_of_their_own(rig: Rig) -> None:
    rankings = rig.master.core.rankings
    assert rankings.of("", "x") is rankings.of("", "y") is rankings.of("", "")
    assert rankings.of("", "w1") is not rankings.of("", "")


def test_what_is_put_in_one_step_lies_together() -> None:
    rig = rig_of(*WORKERS, placement="two_choices")
    space = rig.open_namespace(2)
    chains = tuple(PutChain(ROOT_PARENT, chain(number, 1)) for number in range(50))
    message = BeginPut(bytes(16), space.id, chains, (0, 1), (4096, 4096), 5.0)
    plans = rig.ask(rig.engine, message)
    assert isinstance(plans, PutPlans)
    assert len(plans.segments) == 1


def test_a_wished_tier_comes_before_the_usual_one(rig: Rig) -> None:
    wished = names(placing.ranked(rig.master.core, Tier.NVME))
    assert set(wished[:4]) == {"w1-nvme", "w2-nvme", "w3-nvme"}
    assert {"w1-dram", "w2-dram", "w3-dram"} < set(wished)
