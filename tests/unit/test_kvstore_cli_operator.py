"""Which master answers an operator's commands, where several are named or none leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.cli import operator as operator_module
from kvstore.cli.operator import Operator
from kvstore.errors import DeadlineExceeded, MalformedMessage, NotLeader, Unavailable
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.operator import ResetPolicy
from kvstore.wire.messages.pins import ListPins
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from kvstore.rpc.identity import Identity
    from kvstore.wire.messages.base import Message


class Masters:
    """By address: what each says of the leader; None for one that cannot be reached."""

    def __init__(self, **leaders: tuple[str, ...] | None) -> None:
        self.leaders = leaders
        self.open_ones: list[str] = []
        self.dialled: list[str] = []
        self.stores = True
        self.hangs = False

    def open(self, address: str, identity: Identity, timeout_s: float) -> FakeConnection:
        assert timeout_s > 0
        del identity
        name = address.partition(":")[0]
        self.dialled.append(name)
        leader = self.leaders[name]
        if leader is None:
            raise Unavailable(f"cannot reach {address}: refused")
        self.open_ones.append(name)
        return FakeConnection(self, name, leader)


class FakeConnection:
    """Of a master that leads if it names itself."""

    def __init__(self, masters: Masters, name: str, leader: tuple[str, ...]) -> None:
        self._masters = masters
        self._name = name
        self._leader = leader
        self._leads = leader == (f"{name}:1",)

    def call(self, message: Message, timeout_s: float) -> Message:
        del timeout_s
        if self._masters.hangs or (isinstance(message, ResetPolicy) and not self._masters.stores):
            raise DeadlineExceeded("no answer within the deadline")
        if isinstance(message, GetStatus):
            return status(self._name, self._leader, "leading" if self._leads else "standby")
        if not self._leads:
            raise NotLeader(self._leader)
        return Done()

    def close(self) -> None:
        if self._name in self._masters.open_ones:
            self._masters.open_ones.remove(self._name)


def status(name: str, leader: tuple[str, ...], standing: str) -> Status:
    return Status(
        "c", 1, 0.0, 0, 0, 0, 0, 0, (), (), (), {},
        master=name, standing=standing, leader=leader,
    )  # fmt: skip


def asked(monkeypatch: pytest.MonkeyPatch, masters: Masters, named: str) -> Operator:
    monkeypatch.setattr(operator_module, "Connection", masters)
    return Operator(named, None)


@pytest.mark.parametrize("named", ["b:1", "a:1,b:1", "a:1,c:1", "d:1,a:1"])
def test_commands_are_carried_out_by_the_leader(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    masters = Masters(a=("b:1",), b=("b:1",), c=("b:1",), d=None)
    with asked(monkeypatch, masters, named) as operator:
        assert operator.ask(ListPins(), Done) == Done()
        assert masters.open_ones == ["b"]
    assert masters.open_ones == []


def test_where_nobody_leads_the_refusal_is_raised_once_all_were_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masters = Masters(a=("b:1",), b=("a:1",))
    with asked(monkeypatch, masters, "a:1,b:1") as operator, pytest.raises(NotLeader):
        operator.ask(ListPins(), Done)
    assert masters.dialled == ["a", "b"]
    assert masters.open_ones == []


def test_an_error_tells_of_every_master_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = Masters(a=None, b=None)
    with pytest.raises(Unavailable, match=r"a:1: refused; cannot reach b:1: refused \(2 tries\)"):
        asked(monkeypatch, masters, "a:1,b:1")
    with pytest.raises(Unavailable, match=r"^cannot reach a:1: refused$"):
        asked(monkeypatch, masters, "a:1")


def test_the_status_of_several_is_the_leaders_and_of_one_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masters = Masters(a=("b:1",), b=("b:1",), c=(), d=None)
    for named, answers in (("a:1", "a"), ("a:1,c:1", "b"), ("c:1,d:1,b:1", "b"), ("c:1,d:1", "c")):
        with asked(monkeypatch, masters, named) as operator:
            assert operator.status().master == answers


def test_an_answer_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = Masters(b=("b:1",))
    with (
        asked(monkeypatch, masters, "b:1") as operator,
        pytest.raises(MalformedMessage, match="b:1"),
    ):
        operator.ask(ListPins(), Status)


def test_a_change_that_is_in_force_and_not_stored_is_told_from_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masters = Masters(a=("a:1",), b=("a:1",))
    with asked(monkeypatch, masters, "b:1,a:1") as operator:
        assert operator.change(ResetPolicy("eviction"), Done) == Done()
        masters.stores = False
        with pytest.raises(DeadlineExceeded, match=r"^a:1: this is in force, but not durable yet"):
            operator.change(ResetPolicy("eviction"), Done)
        masters.hangs = True
        with pytest.raises(DeadlineExceeded, match=r"^no answer within the deadline$"):
            operator.change(ResetPolicy("eviction"), Done)


def test_a_master_that_leads_no_more_has_nothing_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = Masters(a=("b:1",))
    masters.stores = False
    with (
        asked(monkeypatch, masters, "a:1") as operator,
        pytest.raises(DeadlineExceeded, match=r"^no answer within the deadline$"),
    ):
        operator.change(ResetPolicy("eviction"), Done)
