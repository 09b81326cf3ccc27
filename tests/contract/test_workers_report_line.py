"""The line on which seals are reported: where it goes, and what it does without a leader."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.puts import Sealed, SealedNoted
from tests.contract.scripted_leader import CLUSTER, Leader
from tests.contract.worker_rig import column
from workers.report_line import ReportLine

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT = Sealed("s", 1, 5, 1, 0, 9, 64, bytes(64), bytes(64), column([0, 4096]), column([1, 2]))


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.stop()


@pytest.fixture
def line() -> Iterator[ReportLine]:
    made = ReportLine(Identity(Role.WORKER, name="w", cluster=CLUSTER))
    yield made
    made.use(None)


def reported(line: ReportLine) -> object:
    """The answer to one report."""
    sent = line.start(REPORT)
    return None if sent is None else line.finish(sent)


def test_reports_go_to_the_leader(line: ReportLine, leader: Leader) -> None:
    line.use(leader.address)
    assert reported(line) == SealedNoted(bytes(2))
    assert leader.expect(Sealed) == REPORT


def test_several_reports_are_on_their_way_at_once(line: ReportLine, leader: Leader) -> None:
    line.use(leader.address)
    sent = [line.start(REPORT) for _ in range(3)]
    assert [line.finish(each) for each in reversed(sent) if each] == [SealedNoted(bytes(2))] * 3


def test_without_a_leader_nothing_is_sent(line: ReportLine) -> None:
    assert line.start(REPORT) is None


def test_a_leader_that_cannot_be_reached_is_no_answer(line: ReportLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    line.use(address)
    assert line.start(REPORT) is None


def test_a_leader_that_goes_leaves_the_report_without_an_answer(
    line: ReportLine, leader: Leader
) -> None:
    leader.on_sealed = lambda _: None
    line.use(leader.address)
    sent = line.start(REPORT)
    assert sent is not None
    leader.expect(Sealed)
    leader.stop()
    assert line.finish(sent) is None


def test_the_next_leader_is_dialled_anew(line: ReportLine, leader: Leader) -> None:
    line.use(leader.address)
    assert reported(line)
    other = Leader()
    try:
        line.use(other.address)
        assert reported(line)
        assert other.expect(Sealed) == REPORT
    finally:
        line.use(None)
        other.stop()


def test_a_dial_that_hangs_does_not_hold_up_who_says_where_to_go(line: ReportLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never greets
        line.use(f"127.0.0.1:{silent.getsockname()[1]}")
        results: list[object] = []
        dialling = threading.Thread(target=lambda: results.append(line.start(REPORT)))
        dialling.start()
        caller, _ = silent.accept()
        line.use(None)  # returns although the dial goes on
        assert dialling.is_alive()
        caller.close()
        dialling.join()
    assert results == [None]
