"""Reports of seals, and what is left when a put stops."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import FenceExtents
from kvstore.wire.messages.puts import (
    AbortPut,
    SealedNoted,
)
from master.packed import words
from master.tunables import Tunables
from tests.unit.master_pages import KEYS, bytes_in, granted, piece, refused
from tests.unit.master_rig import (
    TENANT,
    OpenedNamespace,
    Rig,
    chain,
    failure,
)
from tests.unit.master_worker import FakeWorker

TIMEOUT_S = limits.put_timeout_s(8 * 4096)
"""Of a put of all KEYS."""


# Sealed.


def test_a_plan_may_be_sealed_in_pieces(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (report,) = space.write(plans, KEYS)
    for page in (5, 0, 7, 1, 2, 3, 4):
        assert space.report([piece(report, page)]) == [b"\0"]
    assert space.probe(KEYS) == b"\1\1\1\1\1\1\0\1"
    assert space.report([report]) == [bytes(8)]
    assert space.probe(KEYS) == b"\1" * 8
    assert not rig.master.core.plans


def test_a_repeated_report_is_acknowledged_again(space: OpenedNamespace) -> None:
    reports = space.write(space.plans(KEYS), KEYS)
    assert space.report(reports) == space.report(reports) == [bytes(8)]


def test_a_repeated_report_of_a_page_that_was_removed_meanwhile_frees_nothing(
    rig: Rig, space: OpenedNamespace
) -> None:
    reports = space.write(space.plans(KEYS), KEYS)
    space.report(reports)
    space.match(KEYS)  # its extents stay until this lease has ended
    space.remove(KEYS)
    assert bytes_in(rig, ExtentState.RETIRED) == 8 * 4096
    assert space.report(reports) == [bytes(8)]


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 99},
        {"part": 1},
        {"namespace_ordinal": 7},
        {"keys": chain(8, 8)},
        {"offsets": bytes(64)},
        {"part_bytes": 4095},
        {"token_count": 64},
        {"parents": chain(8, 8)},
    ],
)
def test_a_report_that_fits_no_plan_is_closed(
    rig: Rig, space: OpenedNamespace, change: dict[str, object]
) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    changed = msgspec.structs.replace(report, **change)
    outcomes = space.report([changed])[0]
    assert Outcome.PLAN_CLOSED in outcomes
    assert bytes_in(rig, ExtentState.SEALED) <= 4096
    assert set(space.probe(KEYS[KEY_BYTES:])) == {0}


@pytest.mark.parametrize("change", [{"part_bytes": 4095}, {"token_count": 64}])
def test_records_that_say_something_else_than_was_planned_are_counted(
    rig: Rig, space: OpenedNamespace, change: dict[str, int]
) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    changed = msgspec.structs.replace(report, **change)
    assert space.report([changed]) == [bytes((Outcome.PLAN_CLOSED,)) * 8]
    assert rig.master.core.counters["seals_unlike_plan"] == 8
    assert space.report([report]) == [bytes(8)]  # nothing of the plan was given up


@pytest.mark.parametrize("page", [0, 1, 7])
def test_a_page_whose_record_names_another_parent_is_closed_alone(
    rig: Rig, space: OpenedNamespace, page: int
) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    parents = bytearray(report.parents)
    parents[page * KEY_BYTES] ^= 1
    (outcomes,) = space.report([msgspec.structs.replace(report, parents=bytes(parents))])
    assert [i for i, each in enumerate(outcomes) if each] == [page]
    assert outcomes[page] == Outcome.PLAN_CLOSED
    assert rig.master.core.counters["seals_unlike_plan"] == 1


def test_the_parent_of_a_plan_within_a_chain_is_the_page_before_it(space: OpenedNamespace) -> None:
    space.put(KEYS[: 3 * KEY_BYTES])
    (report,) = space.write(space.plans(KEYS), KEYS)
    assert report.parents == KEYS[2 * KEY_BYTES : -KEY_BYTES]
    assert space.report([report]) == [bytes(5)]


def test_a_report_of_another_life_is_stale(space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    stale = msgspec.structs.replace(report, incarnation=2)
    assert space.report([stale]) == [bytes([Outcome.STALE]) * 8]


def test_a_report_before_the_inventory_has_to_come_again(rig: Rig, space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    worker = rig.workers["w1"]
    worker.leave()
    worker.connect()
    assert worker.session is not None
    assert failure(rig.ask(worker.session, report)).code == "unavailable"


def test_reports_come_on_any_connection_of_the_worker(rig: Rig, space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    data = rig.open("worker", "", "w1")
    assert rig.ask(data, report) == SealedNoted(bytes(8))


def test_nobody_else_may_report(rig: Rig, space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    stranger = rig.open("worker", "", "w2")
    assert failure(rig.ask(stranger, report)).code == "access_denied"
    assert failure(rig.ask(rig.engine, report)).code == "access_denied"
    unknown = msgspec.structs.replace(report, segment="nowhere")
    assert failure(rig.ask(stranger, unknown)).code == "unavailable"
    for change in (
        {"keys": b""},
        {"offsets": b""},
        {"checksums": bytes(9)},
        {"parents": bytes(32)},
    ):
        bad = msgspec.structs.replace(report, **change)
        session = rig.workers["w1"].session
        assert session is not None
        assert failure(rig.ask(session, bad)).code == "bad_value"


# Puts that stop.


def test_an_aborted_put_is_fenced_and_forgotten(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (report,) = space.write(plans, KEYS)
    space.report([piece(report, 0, 3)])
    rig.holds_commands = True
    reply = rig.ask(rig.engine, AbortPut((plans.spans[0].generation, 12345)))
    assert isinstance(reply, Done)
    (command,) = rig.commands
    assert isinstance(command.message, FenceExtents)
    assert len(words(command.message.offsets)) == 5
    assert set(words(command.message.generations)) == {plans.spans[0].generation}
    assert bytes_in(rig, ExtentState.QUARANTINED) == 5 * 4096
    assert space.report([piece(report, 3, 5)]) == [bytes([Outcome.PLAN_CLOSED]) * 5]
    assert space.report([piece(report, 0, 3)]) == [bytes(3)]
    rig.obey_all()
    assert bytes_in(rig, ExtentState.QUARANTINED) == 0
    assert bytes_in(rig, ExtentState.SEALED) == 3 * 4096
    assert rig.master.core.namespaces.get(space.id).tree.pages == 3


def test_too_many_generations_are_refused(rig: Rig) -> None:
    reply = failure(rig.ask(rig.engine, AbortPut(tuple(range(limits.BATCH_PAGES_MAX + 1)))))
    assert "generations" in reply.text


def test_a_dead_writer_leaves_nothing(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    rig.close(rig.engine)
    assert not rig.master.core.plans
    assert not rig.master.core.owners.keys() & {("engine", TENANT, b"token 1")}
    assert bytes_in(rig, ExtentState.RESERVED) == bytes_in(rig, ExtentState.QUARANTINED) == 0
    assert rig.master.core.namespaces.get(space.id).tree.pages == 0


def test_a_put_without_progress_times_out(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    rig.pass_time(TIMEOUT_S - 0.1)
    assert rig.master.core.plans
    rig.pass_time(0.2)
    assert not rig.master.core.plans
    assert rig.master.core.counters["puts_timed_out"] == 1


def test_progress_keeps_a_put_alive(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (report,) = space.write(plans, KEYS)
    for page in range(7):
        rig.pass_time(TIMEOUT_S - 0.2)
        space.report([piece(report, page)])
    rig.pass_time(TIMEOUT_S - 0.2)
    assert rig.master.core.plans
    rig.pass_time(0.5)
    assert not rig.master.core.plans
    assert space.probe(KEYS) == b"\1" * 7 + b"\0"


def test_a_full_quarantine_stops_puts_into_that_segment_only() -> None:
    rig = Rig(Tunables(quarantine_fraction_max=0.1))
    first = rig.add_worker()
    space = rig.open_namespace()
    plans = space.plans(chain(1, 64))
    rig.holds_commands = True
    rig.ask(rig.engine, AbortPut((plans.spans[0].generation,)))
    assert refused(space.plans(KEYS)) == [(0, 8, Outcome.TOO_MANY_QUARANTINED)]
    assert not rig.master.core.wanted_bytes
    rig.holds_commands = False
    rig.add_worker("w2", chunks=1)
    rig.holds_commands = True
    assert granted(space.plans(KEYS)) == [(0, 8, 0)]
    rig.holds_commands = False
    rig.obey_all()
    assert granted(space.plans(chain(2, 100))) == [(0, 100, 0)]
    assert isinstance(first, FakeWorker)


def test_what_a_reader_holds_does_not_fill_the_quarantine() -> None:
    rig = Rig(Tunables(quarantine_fraction_max=0.1))
    worker = rig.add_worker()
    space = rig.open_namespace()
    plans = space.plans(chain(1, 64))
    space.write(plans, chain(1, 64))
    worker.locked.update(words(plans.spans[0].offsets))
    rig.ask(rig.engine, AbortPut((plans.spans[0].generation,)))
    segment = rig.master.core.segments["w1-dram"]
    assert sum(segment.held.values()) == bytes_in(rig, ExtentState.QUARANTINED) == 64 * 4096
    assert granted(space.plans(KEYS)) == [(0, 8, 0)]
    rig.pass_time(1.0)
    worker.locked.clear()
    rig.pass_time(1.0)
    assert not segment.held
    assert bytes_in(rig, ExtentState.QUARANTINED) == 0


def test_a_lost_workers_puts_fail(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    rig.workers["w1"].leave()
    # The end of the connection says what a missed heartbeat does.
    rig.pass_time(limits.WORKER_LOST_AFTER_S - limits.HEARTBEAT_INTERVAL_S - 0.1)
    assert rig.master.core.plans
    rig.pass_time(0.2)
    assert not rig.master.core.plans
    assert bytes_in(rig, ExtentState.QUARANTINED) == 8 * 4096


def test_parts_of_a_page_that_stays_incomplete_are_given_back(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0,))
    rig.pass_time(TIMEOUT_S - 0.5)
    assert bytes_in(rig, ExtentState.SEALED) == 8 * 4096
    rig.pass_time(1.0)
    assert bytes_in(rig, ExtentState.SEALED) == 0
    assert rig.master.core.counters["pages_incomplete"] == 8
    assert rig.master.core.namespaces.get(space.id).tree.pages == 0


def test_parts_wait_for_a_holder_that_is_away_but_not_lost(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0,))
    rig.pass_time(TIMEOUT_S - 0.5)
    rig.workers["w1"].connect()  # its inventory is not compared yet
    rig.pass_time(2.0)
    assert bytes_in(rig, ExtentState.SEALED) == 8 * 4096
    rig.workers["w1"].join()
    rig.pass_time(TIMEOUT_S + 0.5)
    assert bytes_in(rig, ExtentState.SEALED) == 0


def test_parts_wait_as_long_as_a_put_of_the_others_goes_on() -> None:
    rig = Rig(Tunables(put_bytes_per_s_min=4096))
    rig.add_worker()
    space = rig.open_namespace(parts=2)
    space.put(KEYS[:32], parts=(0,))
    space.plans(KEYS, parts=(1,))
    assert [put.timeout_s for put in rig.engine_owner().puts.values()] == [13.0]
    rig.pass_time(12.0)
    assert bytes_in(rig, ExtentState.SEALED) == 4096
    rig.pass_time(10.0)
    assert bytes_in(rig, ExtentState.SEALED) == 0


def test_later_parts_keep_earlier_ones(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0,))
    rig.pass_time(TIMEOUT_S - 0.5)
    second = space.plans(KEYS, parts=(1,))
    rig.pass_time(2.0)
    space.report(space.write(second, KEYS))
    rig.pass_time(20.0)
    assert space.probe(KEYS) == b"\1" * 8
