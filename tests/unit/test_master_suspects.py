"""Copies that a reader could not verify."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import CheckExtents, ExtentsConfirmed
from kvstore.wire.messages.reads import ReportSuspect
from master.events import CommandAnswered
from master.packed import words
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

KEYS = chain(1, 4)


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace with four pages."""
    made = rig.open_namespace()
    made.put(KEYS)
    rig.holds_commands = True
    return made


def suspect(space: OpenedNamespace, page: int = 1) -> ReportSuspect:
    """A report on one page."""
    found = space.match(KEYS)
    copy = found.runs[0].copies[0]
    return ReportSuspect(
        space.id,
        KEYS[page * 32 : page * 32 + 32],
        0,
        found.segments[0].segment,
        1,
        words(copy.offsets)[page],
        words(copy.generations)[page],
    )


def answer(rig: Rig, outcome: Outcome) -> None:
    """The worker's verdict on everything that is being checked."""
    pending, rig.commands = rig.commands, []
    rig.holds_commands = False
    for command in pending:
        assert isinstance(command.message, CheckExtents)
        count = len(command.message.offsets) // 8
        reply = ExtentsConfirmed(1, bytes([outcome]) * count)
        rig.send(CommandAnswered(command.command, reply))


def test_a_bad_copy_goes(rig: Rig, space: OpenedNamespace) -> None:
    assert isinstance(rig.ask(rig.engine, suspect(space)), Done)
    assert space.probe(KEYS) == b"\1" * 4
    answer(rig, Outcome.CHECKSUM)
    assert space.probe(KEYS) == b"\1\0\1\1"
    rig.pass_time(limits.LEASE_TTL_S + 1.0)
    assert len(rig.workers["w1"].records) == 3
    assert rig.master.core.counters["pages_corrupt"] == 1
    assert not rig.master.core.suspects


def test_a_good_copy_stays(rig: Rig, space: OpenedNamespace) -> None:
    rig.ask(rig.engine, suspect(space))
    answer(rig, Outcome.OK)
    assert space.probe(KEYS) == b"\1" * 4
    assert not rig.master.core.suspects


def test_one_copy_is_checked_once(rig: Rig, space: OpenedNamespace) -> None:
    for _ in range(3):
        rig.ask(rig.engine, suspect(space))
    assert len(rig.commands) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"key": chain(9, 1)},
        {"part": 3},
        {"segment": "nowhere"},
        {"incarnation": 2},
        {"generation": 12},
        {"generation": 0},
    ],
)
def test_what_is_not_there_any_more_is_not_checked(
    rig: Rig, space: OpenedNamespace, change: dict[str, object]
) -> None:
    assert isinstance(rig.ask(rig.engine, msgspec.structs.replace(suspect(space), **change)), Done)
    assert not rig.commands


def test_a_copy_that_was_replaced_meanwhile_stays(rig: Rig, space: OpenedNamespace) -> None:
    rig.ask(rig.engine, suspect(space))
    space.remove(KEYS[32:64])
    check = rig.commands.pop(0)
    rig.holds_commands = False
    rig.obey_all()
    rig.send(CommandAnswered(check.command, ExtentsConfirmed(1, bytes([Outcome.CHECKSUM]))))
    rig.pass_time(limits.LEASE_TTL_S + 1.0)
    assert space.probe(KEYS) == b"\1\0\1\1"
    assert rig.master.core.counters["pages_corrupt"] == 0


def test_another_page_in_the_same_place_stays(rig: Rig, space: OpenedNamespace) -> None:
    rig.ask(rig.engine, suspect(space))
    check = rig.commands.pop(0)
    rig.holds_commands = False
    space.remove(KEYS)
    rig.pass_time(limits.LEASE_TTL_S + 1.0)
    space.put(chain(5, 4))
    assert sorted(rig.workers["w1"].records) == [0, 4096, 2 * 4096, 3 * 4096]
    rig.send(CommandAnswered(check.command, ExtentsConfirmed(1, bytes([Outcome.CHECKSUM]))))
    assert space.probe(chain(5, 4)) == b"\1" * 4


def test_a_worker_that_goes_is_asked_no_more(rig: Rig, space: OpenedNamespace) -> None:
    rig.ask(rig.engine, suspect(space))
    check = rig.commands.pop(0)
    rig.workers["w1"].leave()
    assert not rig.master.core.suspects
    rig.holds_commands = False
    rig.workers["w1"].join()
    rig.send(CommandAnswered(check.command, ExtentsConfirmed(1, bytes([Outcome.CHECKSUM]))))
    assert space.probe(KEYS) == b"\1" * 4


def test_suspects_are_bounded(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SUSPECTS_MAX", 1)
    for page in range(3):
        rig.ask(rig.engine, suspect(space, page))
    assert len(rig.master.core.suspects) == 1
    assert rig.master.core.counters["suspects_dropped"] == 2


def test_bad_reports_are_refused(rig: Rig, space: OpenedNamespace) -> None:
    assert (
        failure(rig.ask(rig.engine, msgspec.structs.replace(suspect(space), key=b""))).code
        == "bad_value"
    )
    stranger = rig.open("engine", "another", "e")
    assert failure(rig.ask(stranger, suspect(space))).code == "access_denied"
