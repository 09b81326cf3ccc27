"""Orders to workers: bounded in flight, repeated until confirmed, void with the registration."""

from __future__ import annotations

import pytest

from kvstore.lease import inherited_release_s
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import ExtentsConfirmed, FenceExtents, ReportSegment
from kvstore.wire.messages.puts import AbortPut
from master import confirmations, orders
from master.events import CommandAnswered, CommandId
from tests.unit.master_rig import OpenedNamespace, Rig, chain


@pytest.fixture
def rig() -> Rig:
    """A master with a large worker whose commands wait."""
    made = Rig()
    made.add_worker(chunks=4, chunk_bytes=128 * 64 * 1024)
    return made


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part."""
    made = rig.open_namespace()
    rig.holds_commands = True
    return made


def abort(space: OpenedNamespace, pages: int, seed: int = 1) -> None:
    """Plan so many pages and give them up."""
    plans = space.plans(chain(seed, pages))
    space.rig.ask(space.rig.engine, AbortPut(tuple(s.generation for s in plans.spans)))


def quarantined(rig: Rig) -> int:
    """Extents that wait for their fence."""
    allocator = rig.master.core.segments["w1-dram"].allocator
    return allocator.bytes_in[ExtentState.QUARANTINED] // 4096


def test_large_orders_are_cut(rig: Rig, space: OpenedNamespace) -> None:
    abort(space, 2500)
    counts = [len(command.message.offsets) // 8 for command in fences(rig)]
    assert counts == [1024, 1024, 452]


def fences(rig: Rig) -> list[Fence]:
    """The fences under way."""
    return [Fence(command.command, command.message) for command in rig.commands]


class Fence:
    """One fence under way."""

    def __init__(self, command: CommandId, message: object) -> None:
        assert isinstance(message, FenceExtents)
        self.command = command
        self.message = message


def test_orders_in_flight_are_bounded(rig: Rig, space: OpenedNamespace) -> None:
    rig.checks = False
    for number in range(orders.ORDERS_IN_FLIGHT_MAX + 4):
        abort(space, 1, seed=number)
    assert len(rig.commands) == orders.ORDERS_IN_FLIGHT_MAX
    first = rig.commands.pop(0)
    rig.send(CommandAnswered(first.command, ExtentsConfirmed(1, b"\0")))
    assert len(rig.commands) == orders.ORDERS_IN_FLIGHT_MAX
    assert len(fences(rig)[-1].message.offsets) == 4 * 8, "what had to wait goes together"


@pytest.mark.parametrize(
    "reply",
    [
        None,
        Failure("unavailable", "busy"),
        Done(),
        ExtentsConfirmed(1, b""),
        ExtentsConfirmed(1, b"\0" * 9),
        ExtentsConfirmed(1, bytes([Outcome.FENCED]) * 4),
        ExtentsConfirmed(1, bytes([Outcome.STALE]) * 4),
    ],
)
def test_what_is_not_confirmed_is_asked_again(
    rig: Rig, space: OpenedNamespace, reply: ExtentsConfirmed | Done | Failure | None
) -> None:
    abort(space, 4)
    (command,) = rig.commands
    rig.commands.clear()
    rig.send(CommandAnswered(command.command, reply))
    assert quarantined(rig) == 4
    rig.tick(confirmations.RETRY_UNANSWERED_S + 2 * orders.GRAIN_S)
    (again,) = rig.commands
    assert again.message == command.message


def test_a_medium_that_takes_no_writes_is_rarely_asked_again(
    rig: Rig, space: OpenedNamespace
) -> None:
    abort(space, 4)
    rig.workers["w1"].ask(ReportSegment("w1-dram", 1, "read_only", "EROFS"))
    (command,) = rig.commands
    rig.commands.clear()
    refused = ExtentsConfirmed(1, bytes([Outcome.TRANSPORT]) * 4)
    rig.send(CommandAnswered(command.command, refused))
    rig.pass_time(confirmations.RETRY_READ_ONLY_S - 1.0)
    assert not rig.commands
    rig.pass_time(1.0 + 2 * orders.GRAIN_S)
    (again,) = rig.commands
    assert again.message == command.message


def test_a_mixed_answer_settles_each_extent(rig: Rig, space: OpenedNamespace) -> None:
    abort(space, 4)
    (command,) = rig.commands
    rig.commands.clear()
    mixed = bytes([Outcome.OK, Outcome.BUSY, Outcome.OK, Outcome.FENCED])
    rig.send(CommandAnswered(command.command, ExtentsConfirmed(1, mixed)))
    assert quarantined(rig) == 2
    segment = rig.master.core.segments["w1-dram"]
    assert list(segment.held.values()) == [4096]
    rig.holds_commands = False
    rig.pass_time(1.0)
    assert quarantined(rig) == 0
    assert not segment.held


def test_answers_of_an_earlier_registration_count_no_more(rig: Rig, space: OpenedNamespace) -> None:
    abort(space, 4)
    (command,) = rig.commands
    rig.commands.clear()
    rig.workers["w1"].join()
    rig.send(CommandAnswered(command.command, ExtentsConfirmed(1, bytes(4))))
    assert quarantined(rig) == 4
    rig.holds_commands = False
    rig.obey_all()
    rig.pass_time(inherited_release_s(1.0))  # leases of a master before this one may run
    assert quarantined(rig) == 0


def test_strange_answers_are_ignored(rig: Rig) -> None:
    rig.send(CommandAnswered(CommandId(4711), ExtentsConfirmed(1, b"\0")))
    rig.send(CommandAnswered(CommandId(4711), None))
