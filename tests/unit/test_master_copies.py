"""Copies to another worker: what is asked of whom, and what becomes of it in case of trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore import limits
from kvstore.lease import granter_release_s, inherited_release_s
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import CheckExtents, FreeExtents
from kvstore.wire.messages.puts import Ingest, Ingested, PeerSource
from master import lanes, moves
from master.events import Command, CommandAnswered
from master.moves import MoveKind
from master.tunables import Tunables
from tests.unit.master_pages import KEY, KEYS, bytes_in, key
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain

if TYPE_CHECKING:
    from master.run import Run

PAGE = 4096
CALM = Tunables(nvme_admission="none", replicas=1)
"""Nothing is copied but what a test starts."""


@pytest.fixture
def rig() -> Rig:
    """Eight pages on worker w1, and workers w2 and w3; all obey when they are told to."""
    return rig_of(CALM)


def rig_of(tunables: Tunables) -> Rig:
    """The same, with other settings."""
    made = Rig(tunables)
    made.add_worker("w1")
    made.open_namespace().put(KEYS)
    for name in ("w2", "w3"):
        made.add_worker(name, nvme_chunks=4)
    made.holds_commands = True
    return made


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """The namespace of the pages."""
    return rig.open_namespace()


def the_run(rig: Rig, key: bytes = KEY) -> Run:
    run = rig.master.core.tree(1).get(key)
    assert run is not None
    return run


def start(rig: Rig, target: str = "w2-dram", pages: range = range(8)) -> int:
    """Start to copy pages of the run from w1; how many."""
    core, run = rig.master.core, the_run(rig)
    copy = next(each for each in run.copies if each.segment.worker == "w1")
    started = moves.start(core, MoveKind.COPY, run, copy, pages, core.segments[target])
    rig.tick()
    return started


def ordered(rig: Rig) -> Command:
    """The one copy that was asked for; it waits for `obey`."""
    (command,) = (each for each in rig.commands if isinstance(each.message, Ingest))
    rig.commands.remove(command)
    return command


def told(command: Command) -> Ingest:
    assert isinstance(command.message, Ingest)
    return command.message


def workers(space: OpenedNamespace) -> set[str]:
    """Where the pages of KEYS are found."""
    return {ref.worker for ref in space.match(KEYS, lease=False).segments}


def test_the_target_is_told_where_pages_lie_at_another_worker(
    rig: Rig, space: OpenedNamespace
) -> None:
    assert start(rig, pages=range(2, 6)) == 4
    command = ordered(rig)
    ingest, (copy,) = told(command), the_run(rig).copies
    assert command.session == rig.workers["w2"].session
    at = slice(2 * 8, 6 * 8)
    assert ingest.segment == "w2-dram"
    assert (ingest.keys, ingest.parent) == (KEYS[2 * 32 : 6 * 32], key(1))
    assert ingest.checksums == copy.checksums[at]
    assert ingest.source == PeerSource(copy.segment.ref, copy.offsets[at], copy.generations[at])
    rig.obey(command)
    assert workers(space) == {"w1", "w2"}
    core = rig.master.core
    assert not core.plans
    assert core.counters["copied_pages_dram"] == 4
    assert core.counters["copied_bytes_dram"] == 4 * PAGE
    assert core.counters["moved_pages_dram"] == 0
    assert core.counters["pages_sealed"] == 8, "of the put alone"


def test_a_drive_takes_copies_as_well(rig: Rig, space: OpenedNamespace) -> None:
    start(rig, "w2-nvme")
    rig.obey(ordered(rig))
    assert [ref.tier for ref in space.match(KEYS, lease=False).segments] == ["dram", "nvme"]


def test_what_is_read_is_leased_which_is_no_use_of_it(rig: Rig, space: OpenedNamespace) -> None:
    run = the_run(rig)
    used = run.touches, run.expires_s, run.reads
    start(rig)
    until_s = granter_release_s(rig.now, rig.tunables.put_timeout_s(8 * PAGE))
    assert run.read_until_s == run.copies[0].segment.leased_until_s == until_s
    assert (run.touches, run.expires_s, run.reads) == used


def test_what_was_read_may_go_once_every_copy_of_it_has_ended(
    rig: Rig, space: OpenedNamespace
) -> None:
    run = the_run(rig)
    start(rig, "w2-dram", range(4))
    first = ordered(rig)
    rig.tick(0.5)
    start(rig, "w3-dram", range(2, 8))
    second = ordered(rig)
    until_s = granter_release_s(rig.now, rig.tunables.put_timeout_s(6 * PAGE))
    assert run.read_until_s == until_s
    rig.obey(first)
    assert the_run(rig, key(3)).read_until_s == until_s, "the other one reads on"
    rig.obey(second)
    for page in range(8):
        assert the_run(rig, key(page)).free_from_s == 0.0


def test_what_a_copy_reads_of_which_nobody_knows_whether_it_is_over_stays(
    rig: Rig, space: OpenedNamespace
) -> None:
    run = the_run(rig)
    start(rig)
    until_s = run.read_until_s
    rig.send(CommandAnswered(ordered(rig).command, None))
    assert (run.free_from_s, run.read_until_s) == (until_s, 0.0)


def test_no_copy_takes_longer_than_leases_may_last() -> None:
    made = Rig(msgspec.structs.replace(CALM, put_timeout_base_s=60.0))
    made.add_worker("w1")
    made.open_namespace().put(KEYS)
    made.add_worker("w2")
    made.holds_commands = True
    start(made)
    (put,) = made.master.core.moves.owner.puts.values()
    assert put.timeout_s == limits.LEASE_TTL_MAX_S
    assert the_run(made).read_until_s == granter_release_s(made.now, limits.LEASE_TTL_MAX_S)


def test_pages_that_are_removed_meanwhile_stay_away_and_their_memory_is_kept(
    rig: Rig, space: OpenedNamespace
) -> None:
    start(rig)
    command, until_s = ordered(rig), the_run(rig).read_until_s
    assert space.remove(KEYS[3 * 32 : 5 * 32]) is None
    rig.obey_all()
    assert not any(isinstance(each.message, FreeExtents) for each in rig.commands)
    rig.obey(command)
    rig.holds_commands = False
    rig.obey_all()
    held = {bytes(record.key) for record in rig.workers["w1"].records.values()}
    assert {key(3), key(4)} <= held, "the copy may still read them"
    rig.pass_time(until_s - rig.now + 0.5)
    for worker in ("w1", "w2"):
        found = {bytes(record.key) for record in rig.workers[worker].records.values()}
        assert found == {key(page) for page in (0, 1, 2, 5, 6, 7)}
    assert space.probe(KEYS) == b"\1\1\1\0\0\1\1\1"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_copy_goes_on_while_the_worker_that_it_reads_is_away(
    rig: Rig, space: OpenedNamespace, *, is_lost: bool
) -> None:
    start(rig)
    rig.workers["w1"].leave()
    if is_lost:
        rig.pass_time(4.0)
        assert space.probe(KEYS) == bytes(8)
    rig.obey(ordered(rig))
    assert space.probe(KEYS) == b"\1" * 8
    assert not rig.master.core.plans
    assert not rig.master.core.moves.in_flight


def test_what_is_read_stays_though_it_is_removed_and_its_worker_comes_anew() -> None:
    rig = rig_of(msgspec.structs.replace(CALM, lease_ttl_s=1.0))
    space = rig.open_namespace()
    rig.pass_time(20.0)  # so that no lease of an earlier master may run
    start(rig)
    until_s = the_run(rig).read_until_s
    copy = ordered(rig)
    rig.holds_commands = False
    assert space.remove(KEYS) == b"\1" * 8
    rig.workers["w1"].leave()
    rig.workers["w1"].join()
    assert until_s > rig.master.core.lease_end_s(), "longer than any reader may have it"
    rig.pass_time(until_s - rig.now - 0.1)
    assert len(rig.workers["w1"].records) == 8
    rig.send(CommandAnswered(copy.command, None))
    rig.pass_time(1.0)
    assert not rig.workers["w1"].records


def test_another_life_of_the_source_ends_a_copy_and_costs_nothing_else(
    rig: Rig, space: OpenedNamespace
) -> None:
    start(rig)
    command, source = ordered(rig), rig.workers["w1"]
    source.leave()
    source.restart()
    source.join()
    rig.obey(command)
    assert rig.master.core.counters["copies_source_lost"] == 8
    assert workers(space) == {"w1"}
    assert not rig.master.core.suspects
    rig.obey_all()
    assert bytes_in(rig, ExtentState.QUARANTINED, "w2-dram") == 0


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_target_that_goes_takes_its_copies_along(
    rig: Rig, space: OpenedNamespace, *, is_lost: bool, is_new: bool
) -> None:
    start(rig)
    command, target = ordered(rig), rig.workers["w2"]
    target.leave()
    if is_lost:
        rig.pass_time(4.0)
        assert not rig.master.core.plans
    rig.send(CommandAnswered(command.command, None))
    assert not rig.master.core.plans
    if is_new:
        target.restart()
    target.join()
    rig.holds_commands = False
    rig.pass_time(inherited_release_s(1.0))
    assert workers(space) == {"w1"}
    assert bytes_in(rig, ExtentState.QUARANTINED, "w2-dram") == 0
    assert start(rig) == 8
    assert workers(space) == {"w1", "w2"}


def test_pages_whose_report_was_lost_with_the_connection_are_found_in_the_inventory(
    rig: Rig, space: OpenedNamespace
) -> None:
    start(rig)
    command, target = ordered(rig), rig.workers["w2"]
    target.leave()
    target.move(told(command), target)
    target.join()
    rig.send(CommandAnswered(command.command, None))
    assert workers(space) == {"w1", "w2"}


def test_a_copy_without_progress_times_out_and_is_counted_until_answered(
    rig: Rig, space: OpenedNamespace
) -> None:
    start(rig)
    command = ordered(rig)
    rig.pass_time(rig.tunables.put_timeout_s(8 * PAGE) + 0.2)
    assert not rig.master.core.plans
    busy = [rig.master.core.workers[name].copies.moves for name in ("w1", "w2", "w3")]
    assert busy == [1, 1, 0]
    rig.send(CommandAnswered(command.command, None))
    assert not any(each.copies.moves for each in rig.master.core.workers.values())


def test_what_a_segment_has_or_is_given_is_not_copied_there_again(
    rig: Rig, space: OpenedNamespace
) -> None:
    assert start(rig, pages=range(2, 6)) == 4
    assert start(rig) == 2, "up to what is on its way"
    assert start(rig) == 0
    assert start(rig, pages=range(3, 8)) == 0
    assert start(rig, "w3-dram") == 8, "elsewhere is another matter"
    rig.obey_all()
    assert start(rig, pages=range(3, 8)) == 0, "what is there"
    assert start(rig, pages=range(6, 8)) == 2
    rig.obey_all()
    assert workers(space) == {"w1", "w2", "w3"}
    assert [run.count for run in space.match(KEYS, lease=False).runs] == [8]


def test_pages_that_the_source_lacks_are_not_asked_for(rig: Rig, space: OpenedNamespace) -> None:
    start(rig)
    rig.obey(ordered(rig))
    run, core = the_run(rig), rig.master.core
    second = next(each for each in run.copies if each.segment.worker == "w2")
    second.clear(4, 1)
    started = moves.start(core, MoveKind.COPY, run, second, range(8), core.segments["w3-dram"])
    assert started == 4


@pytest.mark.parametrize("why", ["source away for good", "target away", "no room"])
def test_what_cannot_be_copied_is_not_begun(rig: Rig, space: OpenedNamespace, why: str) -> None:
    match why:
        case "source away for good":
            rig.workers["w1"].leave()
            rig.pass_time(4.0)
            run = the_run(rig) if rig.master.core.tree(1).get(KEY) else None
            assert run is None or not run.copies or start(rig) == 0
        case "target away":
            rig.workers["w2"].leave()
            assert start(rig) == 0
        case "no room":
            pages = 16 * CHUNK // PAGE
            rig.holds_commands = False
            for worker in ("w2", "w3"):
                segment = rig.master.core.segments[f"{worker}-dram"]
                segment.allocator.plan(PAGE, 1 << 32, 1, chain(9, pages))
            rig.master.core.plans.clear()
            rig.checks = False
            assert start(rig) == 0
    assert not rig.master.core.moves.in_flight
    assert not rig.master.core.plans


@pytest.mark.parametrize("outcome", [Outcome.CHECKSUM, Outcome.SOURCE_LOST])
def test_a_copy_that_reads_something_else_has_its_source_checked(
    rig: Rig, space: OpenedNamespace, outcome: Outcome
) -> None:
    start(rig)
    command = ordered(rig)
    rig.send(CommandAnswered(command.command, Ingested(bytes([0] * 7 + [outcome]))))
    (suspect,) = rig.master.core.suspects
    assert (suspect.segment.id, suspect.offset) == ("w1-dram", 7 * PAGE)
    (check,) = (each for each in rig.commands if isinstance(each.message, CheckExtents))
    assert check.session == rig.workers["w1"].session
    assert rig.master.core.counters[f"copies_{outcome.name.lower()}"] == 1


@pytest.mark.parametrize("outcome", [Outcome.TRANSPORT, Outcome.BUSY, Outcome.FENCED])
def test_a_copy_that_failed_lets_both_workers_rest(
    rig: Rig, space: OpenedNamespace, outcome: Outcome
) -> None:
    start(rig)
    command = ordered(rig)
    rig.send(CommandAnswered(command.command, Ingested(bytes([outcome]) * 8)))
    core = rig.master.core
    segments = [core.segments[f"{name}-dram"] for name in ("w1", "w2", "w3")]
    later = rig.now + lanes.REST_S
    assert moves.copy_free_at_s(core, segments[0], segments[1]) == later
    assert moves.copy_free_at_s(core, segments[2], segments[1]) == later
    assert core.workers["w2"].lane.rests_until_s <= rig.now, "moves are another matter"
    assert not core.suspects


def test_copies_take_a_lane_at_both_ends_and_are_bounded(rig: Rig, space: OpenedNamespace) -> None:
    core = rig.master.core
    one, two, three = (core.segments[f"{name}-dram"] for name in ("w1", "w2", "w3"))
    assert moves.copy_free_at_s(core, one, two) == rig.now
    for page in range(lanes.IN_FLIGHT_MAX):
        target = ("w2-dram", "w3-dram")[page % 2]
        assert start(rig, target, range(page, page + 1)) == 1
    assert moves.copy_free_at_s(core, one, two) == float("inf"), "the source serves enough"
    assert moves.copy_free_at_s(core, two, three) == rig.now
    assert core.workers["w2"].lane.moves == 0
    rig.obey_all()
    assert moves.copy_free_at_s(core, one, two) == rig.now


def test_copies_keep_to_their_budget() -> None:
    made = Rig(msgspec.structs.replace(CALM, copy_bytes_per_s=PAGE))
    made.add_worker("w1")
    made.open_namespace().put(KEYS)
    made.add_worker("w2")
    core = made.master.core
    one, two = core.segments["w1-dram"], core.segments["w2-dram"]
    assert moves.copy_free_at_s(core, one, two) == made.now
    start(made)
    free_at_s = moves.copy_free_at_s(core, one, two)
    assert made.now < free_at_s <= made.now + 8.0


def test_segments_of_one_worker_take_one_lane(rig: Rig, space: OpenedNamespace) -> None:
    start(rig)
    rig.obey(ordered(rig))
    core, run = rig.master.core, the_run(rig)
    second = next(each for each in run.copies if each.segment.worker == "w2")
    assert moves.start(core, MoveKind.COPY, run, second, range(8), core.segments["w2-nvme"]) == 8
    rig.tick()
    assert core.workers["w2"].copies.moves == 1
    rig.obey(ordered(rig))
    assert [ref.tier for ref in space.match(KEYS, lease=False).segments].count("nvme") == 1
