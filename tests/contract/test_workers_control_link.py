"""Which master a worker stays with: it follows whoever is named, and leaves one that hangs."""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.wire.messages.membership import RegisterWorker
from tests.contract.scripted_leader import PATIENCE_S, Leader
from tests.contract.worker_rig import Rig
from tests.unit.worker_scripts import EPOCH
from tests.unit.worker_segments import memory_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REFUSED = os.strerror(errno.ECONNREFUSED)


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made


@pytest.fixture
def masters() -> Iterator[list[Leader]]:
    made = [Leader(EPOCH), Leader(EPOCH)]
    made[0].leads = False
    yield made
    for each in made:
        each.stop()


@contextmanager
def worker(folder: Path, leader: Leader, *addresses: str) -> Iterator[Rig]:
    rig = Rig(folder, leader, masters=addresses)
    try:
        yield rig
    finally:
        rig.stop()


def test_a_standby_is_left_for_the_next_master(folder: Path, masters: list[Leader]) -> None:
    standby, leader = masters
    with worker(folder, leader, standby.address, leader.address):
        leader.await_served()
        assert isinstance(standby.seen.get(timeout=PATIENCE_S), RegisterWorker)
        assert standby.seen.empty()


def test_a_leader_that_is_named_is_followed_though_it_is_not_listed(
    folder: Path, masters: list[Leader]
) -> None:
    standby, leader = masters
    standby.where = ("no address", leader.address)
    with worker(folder, leader, standby.address):
        leader.await_served()


def test_a_standby_that_begins_to_lead_is_found_at_once(
    folder: Path, masters: list[Leader]
) -> None:
    standby, other = masters
    other.leads = False
    with worker(folder, standby, standby.address, other.address):
        for _ in range(10):  # so long that pauses are as long as they get
            standby.expect(RegisterWorker)
        began_s = time.monotonic()
        standby.leads = True
        standby.await_served()
        # A tenth of it, on a machine that is not busy.
        assert time.monotonic() - began_s < 10 * limits.RECONNECT_DELAY_MAX_S


def test_a_leader_that_answers_nothing_is_left_for_one_of_a_higher_epoch(
    folder: Path, masters: list[Leader]
) -> None:
    old = masters[1]
    new = Leader(EPOCH + 1)
    new.leads = False
    old.lost_after_s = 0.2
    try:
        with worker(folder, old, old.address, new.address) as rig:
            old.await_served()
            old.answers_beats = False
            while not rig.state.is_fenced(rig.service.clock.now_s()):
                old.beats.get(timeout=PATIENCE_S)
            new.leads = True
            new.await_served()
            assert rig.state.epoch == EPOCH + 1
    finally:
        new.stop()


def test_what_a_leader_in_doubt_refuses_is_logged_once(
    folder: Path, masters: list[Leader], caplog: pytest.LogCaptureFixture
) -> None:
    leader = masters[1]
    leader.doubts = 6
    with worker(folder, leader, leader.address):
        leader.await_served()
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert told == [
        f"master {leader.address}: RegisterWorker: in doubt, 5 times more",
        f"master {leader.address}: register: not answered",
    ]


def test_the_end_of_a_connection_is_logged_once(
    folder: Path, masters: list[Leader], caplog: pytest.LogCaptureFixture
) -> None:
    leader = masters[1]
    with worker(folder, leader, leader.address):
        leader.await_served()
        leader.answers_beats = False
        while not leader.beats.empty():
            leader.beats.get()
        leader.beats.get(timeout=PATIENCE_S)  # one that will have no answer
        leader.stop()
        again = Leader(EPOCH, leader.address)
        again.await_served()
    again.stop()
    told = {each.getMessage() for each in caplog.records if each.levelname == "WARNING"}
    closed = f"master {leader.address}: the peer closed the connection"
    assert closed in told
    # Nobody may have listened there for a moment.
    assert told <= {closed, f"master {leader.address}: cannot reach {leader.address}: {REFUSED}"}


def test_a_leader_of_a_lower_epoch_is_never_gone_back_to(
    folder: Path, masters: list[Leader]
) -> None:
    old = masters[1]
    new = Leader(EPOCH + 1)
    with worker(folder, new, new.address, old.address) as rig:
        new.await_served()
        new.stop()
        old.expect(RegisterWorker)  # it accepts, in vain
        old.expect(RegisterWorker)
        assert not rig.state.is_serving
        assert rig.state.epoch == EPOCH + 1


class Bug(Exception):
    """What nobody expects."""


def buggy(*_: object) -> None:
    raise Bug


async def buggy_call(*_: object) -> None:
    raise Bug


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("state.handle", buggy),
        ("service.disks.look_soon", buggy),
        ("control._search.failed", buggy),
        ("control._call", buggy_call),
    ],
)
def test_a_bug_in_the_control_thread_is_heard(
    folder: Path, masters: list[Leader], monkeypatch: pytest.MonkeyPatch,
    place: str, bug: Callable[..., object],
) -> None:  # fmt: skip
    """Or no heartbeat would follow, from a process that looks alive."""
    with worker(folder, masters[1], masters[1].address) as rig:
        masters[1].await_served()
        where: object = rig
        *path, name = place.split(".")
        for each in path:
            where = getattr(where, each)
        monkeypatch.setattr(where, name, bug)
        rig.control.drop("so that another connection is made")
        found = rig.bugs.get(timeout=PATIENCE_S)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        assert isinstance(found, Bug)
        monkeypatch.undo()
        rig.bugs = SimpleQueue()
