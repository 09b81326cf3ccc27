"""Which of several masters a link asks, how patiently, and when it leaves one for another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, NotLeader, Unavailable
from kvstore.rpc.link import MasterLink
from kvstore.rpc.search import SILENT_PATIENCE_S
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Located, Lookup
from tests.unit.fake_masters import IDENTITY, FakeConnection, FakeMasters, Step

if TYPE_CHECKING:
    from kvstore.rpc.identity import Identity


def test_a_leader_that_is_named_is_asked_at_once_listed_or_not() -> None:
    masters = FakeMasters(a=[[NotLeader(("no address", "z:1"))]])
    link = masters.link("a", "b")
    link.call(Done(), 5.0)
    assert masters.dialled == ["a", "z"]
    assert masters.pauses == []
    link.call(Done(), 5.0)
    assert masters.dialled == ["a", "z"]


def test_masters_that_name_each_other_are_not_asked_without_a_pause() -> None:
    a, b = NotLeader(("b:1",)), NotLeader(("a:1",))
    masters = FakeMasters(a=[[a] for _ in range(50)], b=[[b] for _ in range(50)])
    with pytest.raises(DeadlineExceeded, match=r"a:1: .*; b:1: .* \(\d+ tries\)"):
        masters.link("a", "b").call(Done(), 2.0)
    assert masters.dialled[:4] == ["a", "b", "a", "b"]
    assert len(masters.dialled) <= 2 * (len(masters.pauses) + 1)
    assert max(masters.pauses) <= limits.RECONNECT_DELAY_MAX_S
    assert len(masters.pauses) > 2.0 / limits.RECONNECT_DELAY_MAX_S


def test_the_error_names_every_address_and_why() -> None:
    refused: list[KVStoreError | list[Step]] = [Unavailable("refused")] * 50
    masters = FakeMasters(a=refused, b=[[NotLeader()] for _ in range(50)])
    with pytest.raises(DeadlineExceeded, match=r"a:1: refused; b:1: .*does not lead"):
        masters.link("a", "b").call(Done(), 1.0)


def test_a_master_that_does_not_greet_costs_little_and_then_less() -> None:
    hangs: list[KVStoreError | list[Step]] = [DeadlineExceeded("no greeting")] * 50
    masters = FakeMasters(a=hangs, b=[[NotLeader()], [NotLeader()], []])
    masters.link("a", "b").call(Done(), 10.0)
    assert masters.dialled == ["a", "b", "b", "a", "b"]
    assert masters.patience[0] == limits.DIAL_PATIENCE_S
    assert masters.patience[3] == SILENT_PATIENCE_S
    assert masters.clock.now_s() < 101.5


def test_a_short_deadline_is_shared_by_all_addresses() -> None:
    hangs: list[KVStoreError | list[Step]] = [DeadlineExceeded("no greeting")]
    masters = FakeMasters(a=hangs)
    masters.link("a", "b").call(Done(), 0.2)
    assert masters.dialled == ["a", "b"]
    assert masters.patience[0] == pytest.approx(0.1)


def test_a_leader_that_keeps_silent_is_left_for_one_of_a_higher_epoch() -> None:
    masters = FakeMasters(a=[["silent"]], b=[Unavailable("down"), [], []])
    masters.epochs = {"a": 4, "b": 4}
    link = masters.link("a", "b")
    elected_s = masters.clock.now_s() + 3 * limits.CALL_PATIENCE_S

    def dial(address: str, identity: Identity, timeout_s: float) -> FakeConnection:
        if masters.clock.now_s() >= elected_s:
            masters.epochs["b"] = 5
        return masters.dial(address, identity, timeout_s)

    link = MasterLink(["a:1", "b:1"], IDENTITY, masters.clock, pause=masters.pause, dial=dial)
    assert link.call(Done(), 10.0) == Done()
    assert masters.dialled == ["a", "b", "b", "b"]
    assert link.epoch == 5
    assert masters.clock.now_s() < elected_s + limits.CALL_PATIENCE_S


def test_a_leader_that_nothing_gets_to_is_asked_at_another_of_its_addresses() -> None:
    masters = FakeMasters(a=[["cut off"]])
    masters.epochs = {"a": 4, "b": 3, "c": 4}
    link, began_s = masters.link("a", "b", "c"), masters.clock.now_s()
    assert link.call(Done(), 10.0) == Done()
    assert masters.dialled == ["a", "b", "c"]
    assert masters.clock.now_s() - began_s == limits.CALL_PATIENCE_S


def test_a_silent_leader_is_kept_while_nobody_else_leads() -> None:
    masters = FakeMasters(a=[["silent"]])
    link = masters.link("a", "b")
    with pytest.raises(DeadlineExceeded, match="no answer"):
        link.call(Done(), 2.0)
    assert masters.clock.now_s() == 102.0
    link.call(Done(), 2.0)
    assert masters.dialled.count("a") == 1


def test_after_a_short_call_without_an_answer_the_next_one_looks_first() -> None:
    masters = FakeMasters(a=[["silent"]])
    masters.epochs = {"a": 4, "b": 5}
    link = masters.link("a", "b")
    with pytest.raises(DeadlineExceeded):
        link.call(Done(), 0.3)
    assert masters.dialled == ["a"]
    link.call(Done(), 0.3)
    assert masters.dialled == ["a", "b"]
    assert link.epoch == 5


def test_a_look_at_others_takes_its_time_from_the_call() -> None:
    hangs: list[KVStoreError | list[Step]] = [DeadlineExceeded("no greeting")]
    masters = FakeMasters(a=[["silent"] * 2], b=list(hangs), c=list(hangs))
    link = masters.link("a", "b", "c")
    for _ in range(2):
        began_s = masters.clock.now_s()
        with pytest.raises(DeadlineExceeded):
            link.call(Done(), 0.3)
        assert masters.clock.now_s() == pytest.approx(began_s + 0.3)
    assert masters.dialled == ["a", "b", "c"]
    assert masters.patience[1:] == pytest.approx([0.25, 0.05])


def test_a_leader_that_can_grant_no_lease_is_left_for_another() -> None:
    question = Lookup(bytes(32), bytes(32))
    doubtful, good = Located(4, 0.0, (), ()), Located(5, 10.0, (), ())
    masters = FakeMasters(a=[[doubtful] * 3], b=[[], [good]])
    masters.epochs = {"a": 4, "b": 4}
    link = masters.link("a", "b")
    assert link.call(question, 5.0) == doubtful  # b leads nothing yet
    assert link.call(question, 5.0) == doubtful  # and is not asked each time
    assert masters.dialled == ["a", "b"]
    masters.clock.advance(limits.CALL_PATIENCE_S)
    masters.epochs["b"] = 5
    assert link.call(question, 5.0) == good
    assert masters.dialled == ["a", "b", "b"]


def test_what_was_asked_for_without_a_lease_is_no_reason_to_look() -> None:
    masters = FakeMasters(a=[[Located(4, 0.0, (), ())]])
    masters.link("a", "b").call(Lookup(bytes(32), bytes(32), (), False), 5.0)
    assert masters.dialled == ["a"]


def test_a_leader_in_doubt_that_refuses_is_left_for_another() -> None:
    masters = FakeMasters(a=[[Unavailable("the lease is in doubt")]])
    masters.epochs = {"a": 4, "b": 5}
    link = masters.link("a", "b")
    link.call(Done(), 5.0)
    assert masters.dialled == ["a", "b"]
    assert masters.closed == 1


def test_a_link_that_is_closed_while_it_looks_keeps_nothing() -> None:
    masters = FakeMasters(a=[["silent"]])
    masters.epochs = {"a": 4, "b": 5}
    links: list[MasterLink] = []

    def dial(address: str, identity: Identity, timeout_s: float) -> FakeConnection:
        if address == "b:1":
            links[0].close()
        return masters.dial(address, identity, timeout_s)

    links.append(MasterLink(["a:1", "b:1"], IDENTITY, masters.clock, dial=dial))
    with pytest.raises(Unavailable, match="closed"):
        links[0].call(Done(), 5.0)
    assert masters.closed >= 2
