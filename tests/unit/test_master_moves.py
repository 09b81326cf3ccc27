"""How a move is carried out, and what becomes of it when something goes wrong meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.lease import inherited_release_s
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import ReportSegment
from kvstore.wire.messages.puts import AbortPut, ExtentSource, Ingest, Ingested, Sealed
from master import lanes, moves
from master.events import Command, CommandAnswered
from master.moves import MoveKind
from master.tunables import Tunables
from tests.unit.master_pages import KEY, KEYS, bytes_in, key
from tests.unit.master_rig import OpenedNamespace, Rig, chain

PAGE = 4096
CALM = Tunables(nvme_admission="none")
"""Nothing moves but what a test starts."""


@pytest.fixture
def rig() -> Rig:
    """A master and a worker with memory and a drive, that obeys when it is told to."""
    made = Rig(CALM)
    made.add_worker(nvme_chunks=4)
    made.holds_commands = True
    return made


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace with eight pages in memory."""
    made = rig.open_namespace()
    made.put(KEYS)
    return made


def start(rig: Rig, pages: range = range(8), key: bytes = KEY, target: str = "w1-nvme") -> Command:
    """Start to move pages of a run to the drive; what the worker is told."""
    core = rig.master.core
    run = core.tree(1).get(key)
    assert run is not None
    (copy,) = (each for each in run.copies if each.segment.id == "w1-dram")
    moves.start(core, MoveKind.DEMOTE, run, copy, pages, core.segments[target])
    rig.tick()
    command = rig.commands.pop()
    assert isinstance(command.message, Ingest), command
    return command


def told(command: Command) -> Ingest:
    """What a worker was told to move."""
    assert isinstance(command.message, Ingest)
    return command.message


def answer(rig: Rig, command: Command, reply: Ingested | None) -> None:
    """A worker answers, whatever it did; then everybody obeys."""
    rig.send(CommandAnswered(command.command, reply))
    rig.obey_all()


def seal(rig: Rig, command: Command, **changed: object) -> bytes:
    """The worker copies all pages and reports them at once; the outcomes."""
    worker, ingest = rig.workers["w1"], told(command)
    report = Sealed(
        ingest.segment, ingest.incarnation, ingest.generation, ingest.namespace_ordinal,
        ingest.part, ingest.part_bytes, ingest.token_count,
        ingest.parent + ingest.keys[:-32], ingest.keys, ingest.offsets, ingest.checksums,
    )  # fmt: skip
    reply = worker.ask(msgspec.structs.replace(report, **changed))
    outcomes = getattr(reply, "outcomes", None)
    assert isinstance(outcomes, bytes), reply
    return outcomes


def tiers(space: OpenedNamespace) -> list[str]:
    """The tiers in which the pages of KEYS are found."""
    return [ref.tier for ref in space.match(KEYS, lease=False).segments]


def test_a_worker_is_told_where_pages_lie_and_where_they_shall_go(
    rig: Rig, space: OpenedNamespace
) -> None:
    ingest = told(start(rig, range(2, 6)))
    assert (ingest.segment, ingest.part_bytes, ingest.size_class) == ("w1-nvme", PAGE, PAGE)
    assert ingest.keys == KEYS[2 * 32 : 6 * 32]
    assert ingest.parent == key(1)
    run = rig.master.core.tree(1).get(KEY)
    assert run is not None
    (copy,) = run.copies
    at = slice(2 * 8, 6 * 8)
    assert ingest.checksums == copy.checksums[at]
    assert ingest.source == ExtentSource("w1-dram", 1, copy.offsets[at], copy.generations[at])


def test_what_was_sealed_is_found_in_both_tiers(rig: Rig, space: OpenedNamespace) -> None:
    rig.obey(start(rig))
    assert tiers(space) == ["dram", "nvme"]
    assert not rig.master.core.plans
    assert rig.master.core.counters["moved_pages_nvme"] == 8
    assert rig.master.core.counters["pages_sealed"] == 8, "of the put alone"
    assert space.match(KEYS, lease=False).runs[0].count == 8


def test_a_repeated_report_is_acknowledged_again(rig: Rig, space: OpenedNamespace) -> None:
    command = start(rig)
    assert seal(rig, command) == seal(rig, command) == bytes(8)
    answer(rig, command, Ingested(bytes(8)))
    assert tiers(space) == ["dram", "nvme"]


def test_bytes_of_another_checksum_are_not_taken(rig: Rig, space: OpenedNamespace) -> None:
    command = start(rig)
    assert seal(rig, command, checksums=bytes(64)) == bytes([Outcome.PLAN_CLOSED]) * 8
    assert rig.master.core.counters["seals_unlike_plan"] == 8
    assert tiers(space) == ["dram"]


@pytest.mark.parametrize("outcome", [
    Outcome.BUSY, Outcome.STALE, Outcome.FENCED, Outcome.TRANSPORT, Outcome.TOO_BIG,
    Outcome.PLAN_CLOSED, Outcome.SOURCE_LOST, 99,
])  # fmt: skip
def test_what_a_worker_could_not_do_is_fenced_and_free_again(
    rig: Rig, space: OpenedNamespace, outcome: int
) -> None:
    command = start(rig)
    answer(rig, command, Ingested(bytes([outcome]) * 8))
    assert bytes_in(rig, ExtentState.RESERVED, "w1-nvme") == 0
    assert bytes_in(rig, ExtentState.QUARANTINED, "w1-nvme") == 0
    assert tiers(space) == ["dram"]
    known = outcome != 99
    name = Outcome(outcome).name.lower() if known else "unknown"
    assert rig.master.core.counters[f"moves_{name}"] == 8
    assert not rig.master.core.moves.in_flight
    lane = rig.master.core.workers["w1"].lane
    assert (lane.rests_until_s > rig.now) is (outcome != Outcome.TOO_BIG)


@pytest.mark.parametrize("reply", [None, Ingested(b"\0"), Ingested(b"")])
def test_no_answer_or_a_strange_one_ends_a_move(
    rig: Rig, space: OpenedNamespace, reply: Ingested | None
) -> None:
    answer(rig, start(rig), reply)
    assert not rig.master.core.plans
    assert bytes_in(rig, ExtentState.RESERVED, "w1-nvme") == 0
    assert tiers(space) == ["dram"]


def test_pages_that_were_sealed_count_whatever_is_answered(
    rig: Rig, space: OpenedNamespace
) -> None:
    command = start(rig)
    ingest = told(command)
    columns = {
        "parents": (ingest.parent + ingest.keys)[: 3 * 32], "keys": ingest.keys[: 3 * 32],
        "offsets": ingest.offsets[:24], "checksums": ingest.checksums[:24],
    }  # fmt: skip
    assert seal(rig, command, **columns) == bytes(3)
    answer(rig, command, None)
    assert rig.master.core.counters["moved_pages_nvme"] == 3
    assert bytes_in(rig, ExtentState.SEALED, "w1-nvme") == 3 * PAGE
    assert space.probe(KEYS) == b"\1" * 8


def test_a_move_without_progress_times_out_and_is_counted_until_answered(
    rig: Rig, space: OpenedNamespace
) -> None:
    command = start(rig)
    rig.pass_time(rig.tunables.put_timeout_s(8 * PAGE) + 0.2)
    assert rig.master.core.counters["moves_timed_out"] == 1
    assert not rig.master.core.plans
    assert rig.master.core.workers["w1"].lane.moves == 1
    rig.obey_all()
    assert seal(rig, command) == bytes([Outcome.PLAN_CLOSED]) * 8
    answer(rig, command, Ingested(bytes([Outcome.PLAN_CLOSED]) * 8))
    assert rig.master.core.workers["w1"].lane.moves == 0


def test_no_peer_can_abort_a_move(rig: Rig, space: OpenedNamespace) -> None:
    command = start(rig)
    rig.ask(rig.engine, AbortPut((told(command).generation,)))
    rig.obey(command)
    assert tiers(space) == ["dram", "nvme"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_that_goes_takes_its_moves_along(
    rig: Rig, space: OpenedNamespace, *, is_lost: bool
) -> None:
    command = start(rig)
    worker = rig.workers["w1"]
    worker.leave()
    if is_lost:
        rig.pass_time(4.0)
        assert not rig.master.core.plans
    rig.send(CommandAnswered(command.command, None))
    assert not rig.master.core.plans
    assert not rig.master.core.moves.in_flight
    worker.join()
    rig.holds_commands = False
    rig.pass_time(inherited_release_s(1.0))
    assert tiers(space) == ["dram"]
    assert bytes_in(rig, ExtentState.QUARANTINED, "w1-nvme") == 0


def test_pages_whose_report_was_lost_with_the_connection_are_found_in_the_inventory(
    rig: Rig, space: OpenedNamespace
) -> None:
    command = start(rig)
    worker = rig.workers["w1"]
    worker.leave()
    worker.move(told(command), rig.segment("w1-nvme"))
    worker.join()
    answer(rig, command, None)
    assert tiers(space) == ["dram", "nvme"]
    assert rig.master.core.counters["moved_pages_nvme"] == 8


def test_a_record_of_another_checksum_is_fenced_by_the_inventory(
    rig: Rig, space: OpenedNamespace
) -> None:
    command = start(rig)
    worker, drive = rig.workers["w1"], rig.segment("w1-nvme")
    worker.leave()
    worker.move(told(command), drive)
    drive.records = {
        offset: msgspec.structs.replace(record, checksum=1)
        for offset, record in drive.records.items()
    }
    worker.join()
    answer(rig, command, None)
    rig.holds_commands = False
    rig.pass_time(inherited_release_s(1.0))
    assert tiers(space) == ["dram"]
    assert not drive.records


def test_a_drive_that_fails_ends_its_moves(rig: Rig, space: OpenedNamespace) -> None:
    command = start(rig)
    rig.workers["w1"].ask(ReportSegment("w1-nvme", 1, "failed", "EIO"))
    assert not rig.master.core.plans
    answer(rig, command, Ingested(bytes([Outcome.TRANSPORT]) * 8))
    assert space.probe(KEYS) == b"\1" * 8


def test_a_run_that_is_split_meanwhile_gets_what_is_its_own(
    rig: Rig, space: OpenedNamespace
) -> None:
    command = start(rig)
    space.put(chain(5, 2), parent=key(2))
    rig.obey(command)
    assert rig.master.core.tree(1).runs == 3
    assert tiers(space) == ["dram", "nvme"]
    assert [len(run.copies) for run in space.match(KEYS, lease=False).runs] == [2, 2]


def test_pages_that_are_removed_meanwhile_stay_away(rig: Rig, space: OpenedNamespace) -> None:
    command = start(rig)
    assert space.remove(KEYS[3 * 32 : 5 * 32]) is None
    rig.obey_all()
    rig.obey(command)
    rig.pass_time(1.0)
    rig.obey_all()
    assert space.probe(KEYS) == b"\1\1\1\0\0\1\1\1"
    found = {bytes(record.key) for record in rig.segment("w1-nvme").records.values()}
    assert found == {key(page) for page in (0, 1, 2, 5, 6, 7)}


def test_a_run_whose_time_is_up_waits_for_its_move(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=1.0)
    command = start(rig)
    rig.pass_time(2.0)
    assert space.probe(KEYS) == b"\1" * 8
    rig.obey(command)
    rig.pass_time(1.0)
    assert space.probe(KEYS) == bytes(8)


def test_a_copy_whose_bytes_are_bad_is_checked_like_a_readers_suspect(
    rig: Rig, space: OpenedNamespace
) -> None:
    command = start(rig)
    outcomes = bytes([Outcome.OK] * 7 + [Outcome.CHECKSUM])
    rig.send(CommandAnswered(command.command, Ingested(outcomes)))
    (suspect,) = rig.master.core.suspects
    assert suspect.segment.id == "w1-dram"
    assert suspect.offset == 7 * PAGE


def test_a_source_that_is_gone_is_no_suspect(rig: Rig, space: OpenedNamespace) -> None:
    command = start(rig)
    space.remove(key(7))
    rig.obey_all()
    rig.pass_time(1.0)
    rig.obey_all()
    outcomes = bytes([Outcome.OK] * 7 + [Outcome.CHECKSUM])
    rig.send(CommandAnswered(command.command, Ingested(outcomes)))
    assert not rig.master.core.suspects


def test_a_drive_takes_as_many_leading_pages_as_it_has_room_for(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(chain(2, 60))
    start(rig, range(60), chain(2, 1))
    command = start(rig)
    assert told(command).keys == KEYS[: 4 * 32]


def test_encoded_pages_are_planned_in_the_class_that_lately_held_them(rig: Rig) -> None:
    space = rig.open_namespace(heads=4)  # parts of 16 KiB
    worker = rig.workers["w1"]
    first, second, third = chain(1, 2), chain(2, 2), chain(3, 2)
    for keys in (first, second, third):
        space.put(keys)
    worker.stored_bytes = {keys[at : at + 32]: 5000 for keys in (first, second) for at in (0, 32)}
    worker.stored_bytes |= {third[:32]: 7000, third[32:]: 9000}
    command = start(rig, range(2), first[:32])
    assert told(command).size_class == 4 * PAGE
    rig.obey(command)
    command = start(rig, range(2), second[:32])
    assert told(command).size_class == 2 * PAGE
    rig.obey(command)
    command = start(rig, range(2), third[:32])
    rig.obey(command)
    assert rig.master.core.counters["moves_too_big"] == 1
    rig.obey_all()
    command = start(rig, range(1, 2), third[:32])
    assert told(command).size_class == 3 * PAGE
    rig.obey(command)
    classes = [r.size_class for r in rig.segment("w1-nvme").records.values()]
    assert sorted(classes) == [2 * PAGE] * 3 + [3 * PAGE] + [4 * PAGE] * 2
    assert rig.master.core.counters["moved_bytes_nvme"] == 6 * 4 * PAGE
    assert rig.master.core.counters["stored_bytes_nvme"] == sum(classes)
    rig.holds_commands = False
    for keys in (first, second, third):
        assert space.remove(keys) == b"\1\1"
    rig.pass_time(1.0)
    assert not rig.segment("w1-nvme").records, "every order names the class"


def test_a_worker_moves_so_much_at_once_and_no_more(rig: Rig, space: OpenedNamespace) -> None:
    lane = rig.master.core.workers["w1"].lane
    started = [start(rig, range(page, page + 1)) for page in range(lanes.IN_FLIGHT_MAX)]
    assert lane.free_at_s(rig.now, 1e9) == float("inf")
    answer(rig, started[0], None)
    assert lane.free_at_s(rig.now + lanes.REST_S, 1e9) == rig.now + lanes.REST_S
    lane.size_bytes = lanes.BYTES_IN_FLIGHT_MAX
    assert lane.free_at_s(rig.now + 9.0, 1e9) == float("inf")
    lane.size_bytes = 3 * PAGE


def test_the_pages_of_one_move_are_bounded() -> None:
    assert moves.pages_at_once(PAGE) == moves.PAGES_MAX
    assert moves.pages_at_once(1 << 20) == 16
    assert moves.pages_at_once(64 << 20) == 1
