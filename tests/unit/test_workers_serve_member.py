"""An inference worker's place in its fleet, while masters come and go."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvstore.client.steps import drive
from kvstore.errors import Fenced, Unavailable
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import (
    FleetBeat,
    FleetJoined,
    FleetNoted,
    JoinFleet,
    LeaveFleet,
    Running,
)
from tests.unit.client_scripts import Script
from workers.serve_member import Membership

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.steps import Steps
    from kvstore.client.tickets import Member

WISH = JoinFleet(b"n" * 32, "d1", "decode", "host:1", "host", "", "", 100, 8)
WAIT_S = 30.0
RUNNING = (Running(7, 70, 20), Running(8, 80, 30))


class Store(Script):
    """Runs plans by a script of answers."""

    def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        return drive(plan, self)


def report(member: Member, running: tuple[Running, ...] = RUNNING) -> FleetBeat:
    """Of a worker that runs two tickets."""
    return FleetBeat(member.namespace, member.worker, member.life, 0, 0.0, 0.0, 0.0, 0.0, running)


class Case:
    """A worker that has joined."""

    def __init__(self) -> None:
        self.store = Store()
        self.dropped: list[tuple[Running, ...]] = []
        self.running: tuple[Running, ...] = RUNNING
        store: Any = self.store.will(FleetJoined(1, 0.5, 3.0))
        self.membership = Membership(store, WISH, self.report, self.dropped.append)
        self.store.asked.clear()

    def report(self, member: Member) -> FleetBeat:
        return report(member, self.running)

    def beat(self) -> None:
        asyncio.run(self.membership.beat_if_heard())


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.membership.close()


def test_what_is_somebody_elses_is_dropped(case: Case) -> None:
    case.store.will(FleetNoted((8,)))
    case.beat()
    assert case.dropped == [RUNNING[1:]]


def test_of_two_claims_of_a_ticket_the_later_one_goes_on(case: Case) -> None:
    """As when its gateway has lost the stream, and is sent here again."""
    running = (Running(7, 70, 20), Running(8, 80, 30), Running(7, 71, 20))
    case.running = running
    case.store.will(FleetNoted((7,)), FleetNoted((7, 7)))
    case.beat()
    case.beat()
    assert case.dropped == [running[:1], (running[0], running[2])]


def test_a_master_that_has_not_met_it_stops_nothing_but_what_it_says(case: Case) -> None:
    case.store.will(Fenced("join again"), FleetJoined(2, 0.5, 3.0), FleetNoted((7,)))
    case.beat()
    assert case.dropped == [RUNNING[:1]]
    asked = [type(each) for each in case.store.asked]
    assert asked == [FleetBeat, JoinFleet, FleetBeat]
    assert case.store.asked[-1] == report(case.membership.member)
    assert case.membership.member.life == 2


def test_a_master_that_is_away_stops_nothing(case: Case) -> None:
    case.store.will(Unavailable("away"))
    case.beat()
    assert case.dropped == []
    case.store.asked.clear()
    case.store.will(Unavailable("away"))
    asyncio.run(case.membership.leave())
    assert case.store.asked == [LeaveFleet(WISH.namespace, "d1", 1)]
    case.store.will(Done())
    asyncio.run(case.membership.leave())


def test_beats_wait_for_no_pull_and_no_put(case: Case) -> None:
    pull = Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        pulling = asyncio.ensure_future(asyncio.to_thread(pull.wait))
        try:
            async with asyncio.timeout(WAIT_S):
                await case.membership.beat_if_heard()
        finally:
            pull.set()
            await pulling

    case.store.will(FleetNoted((8,)))
    asyncio.run(run())
    assert case.dropped == [RUNNING[1:]]


def test_the_role_that_is_asked_for_is_told(case: Case) -> None:
    case.store.will(FleetNoted((), "prefill"), FleetNoted(()))

    async def beats() -> str:
        asked = asyncio.ensure_future(case.membership.asked())
        for _ in range(2):
            await case.membership.beat_if_heard()
        return await asked

    assert asyncio.run(beats()) == "prefill"


def test_who_changes_leaves_and_joins_as_another(case: Case) -> None:
    other = msgspec.structs.replace(WISH, role="prefill")
    case.store.will(Done(), FleetJoined(2, 0.5, 3.0), FleetNoted(()))
    asyncio.run(case.membership.change(other))
    leave = LeaveFleet(WISH.namespace, "d1", 1)
    assert case.store.asked == [leave, other, report(case.membership.member)]
    assert case.membership.member.life == 2


def test_who_cannot_join_again_does_so_with_a_later_beat(case: Case) -> None:
    other = msgspec.structs.replace(WISH, role="prefill")
    case.store.will(Unavailable("away"), Unavailable("away"))
    asyncio.run(case.membership.change(other))
    case.store.asked.clear()
    case.store.will(FleetJoined(1, 0.5, 3.0), FleetNoted(()))
    case.beat()
    assert case.store.asked == [other, report(case.membership.member)]
