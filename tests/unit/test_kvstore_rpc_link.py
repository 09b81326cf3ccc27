"""The lasting link: back-off, changing masters, deadlines; all under virtual time."""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import (
    AccessDenied,
    BadValue,
    DeadlineExceeded,
    KVStoreError,
    OutOfSpace,
    StaleEpoch,
    Unavailable,
)
from kvstore.rpc.backoff import Backoff
from kvstore.rpc.link import MasterLink
from kvstore.wire.messages.hello import Done
from tests.unit.fake_masters import IDENTITY, FakeConnection, FakeMasters, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rpc.identity import Identity
    from kvstore.wire.messages.base import Message


def test_one_connection_serves_all_calls() -> None:
    masters = FakeMasters()
    link = masters.link("a")
    assert link.epoch == 0
    for _ in range(3):
        assert link.call(Done(), 5.0) == Done()
    assert masters.dialled == ["a"]
    assert masters.timeouts == [5.0] * 3
    assert masters.pauses == []
    assert link.epoch == 1


def test_a_lost_connection_is_replaced_and_the_call_made_again() -> None:
    masters = FakeMasters(a=[["lost"], []])
    link = masters.link("a")
    assert link.call(Done(), 5.0) == Done()
    assert masters.dialled == ["a", "a"]
    assert masters.closed == 1
    assert len(masters.pauses) == 1


def test_pauses_double_up_to_a_bound_and_differ_by_their_random_half() -> None:
    refused: list[KVStoreError | list[Step]] = [Unavailable("refused")] * 12
    masters = FakeMasters(a=refused)
    assert masters.link("a").call(Done(), 100.0) == Done()
    longest = limits.RECONNECT_DELAY_MIN_S
    for pause in masters.pauses:
        assert 0.5 * longest <= pause <= longest
        longest = min(2 * longest, limits.RECONNECT_DELAY_MAX_S)
    assert len({pause / max(masters.pauses) for pause in masters.pauses}) == 12


def test_a_master_that_starts_is_found_at_once_however_long_it_was_gone() -> None:
    refused: list[KVStoreError | list[Step]] = [Unavailable("refused")] * 500
    masters = FakeMasters(a=refused)
    assert masters.link("a").call(Done(), 100.0) == Done()
    assert sum(masters.pauses) > 60.0
    assert max(masters.pauses) <= 0.2


def test_success_starts_the_pauses_anew() -> None:
    masters = FakeMasters(a=[Unavailable("1"), Unavailable("2"), Unavailable("3"), ["lost"], []])
    link = masters.link("a")
    link.call(Done(), 50.0)
    link.call(Done(), 50.0)
    masters.pauses.clear()
    backoff = Backoff(Random(1))
    assert backoff.failed() <= limits.RECONNECT_DELAY_MIN_S
    assert backoff.failed() > limits.RECONNECT_DELAY_MIN_S / 2
    backoff.succeeded()
    assert backoff.failed() <= limits.RECONNECT_DELAY_MIN_S
    assert backoff.failures == 1


def test_what_the_peer_asks_for_is_waited_but_not_more_than_the_bound() -> None:
    backoff = Backoff(Random(1))
    assert backoff.failed(1.5) == 1.5
    assert backoff.failed(1e9) == limits.RETRY_AFTER_MAX_S


def test_an_unreachable_master_ends_at_the_deadline_with_the_reason() -> None:
    masters = FakeMasters(a=[Unavailable("nobody there")] * 100)
    with pytest.raises(DeadlineExceeded, match=r"nobody there \(\d+ tries\)"):
        masters.link("a").call(Done(), 3.0)
    assert masters.clock.now_s() <= 103.0
    assert sum(masters.pauses) > 3.0 - limits.RECONNECT_DELAY_MAX_S


def test_the_leader_is_followed() -> None:
    masters = FakeMasters(a=[[StaleEpoch("a higher epoch is known")]], b=[[]])
    link = masters.link("a", "b")
    link.call(Done(), 5.0)
    link.call(Done(), 5.0)
    assert masters.dialled == ["a", "b"]
    assert masters.closed == 1


def test_unreachable_masters_are_asked_in_turn_and_a_good_one_is_kept() -> None:
    masters = FakeMasters(a=[Unavailable("down")], b=[DeadlineExceeded("no greeting")])
    link = masters.link("a", "b", "c")
    link.call(Done(), 50.0)
    assert masters.dialled == ["a", "b", "c"]
    link.call(Done(), 50.0)
    assert masters.dialled == ["a", "b", "c"]


def test_a_master_of_an_older_epoch_is_left_alone() -> None:
    masters = FakeMasters(a=[["lost"], [], []], b=[[]])
    masters.epochs = {"a": 7, "b": 6}
    link = masters.link("a", "b")
    link.call(Done(), 50.0)
    assert masters.dialled == ["a", "b", "a"]
    assert link.epoch == 7


def test_a_master_that_is_not_ready_is_asked_again_on_the_same_connection() -> None:
    busy = Unavailable("loading")
    busy.retry_after_s = 0.7
    masters = FakeMasters(a=[[busy]])
    masters.link("a").call(Done(), 5.0)
    assert masters.dialled == ["a"]
    assert masters.pauses == [0.7]


@pytest.mark.parametrize("error", [AccessDenied("wrong secret"), OutOfSpace("full")])
def test_what_another_try_cannot_mend_is_raised_at_once(error: KVStoreError) -> None:
    for masters in (FakeMasters(a=[error]), FakeMasters(a=[[error]])):
        with pytest.raises(type(error), match=str(error)):
            masters.link("a").call(Done(), 5.0)
        assert masters.pauses == []


def test_a_silent_master_ends_the_call_at_its_deadline() -> None:
    masters = FakeMasters(a=[["silent"]])
    link = masters.link("a")
    with pytest.raises(DeadlineExceeded, match="no answer"):
        link.call(Done(), 2.0)
    assert masters.clock.now_s() == 102.0
    link.call(Done(), 2.0)
    assert masters.dialled == ["a"]


def test_a_closed_link_makes_no_calls() -> None:
    masters = FakeMasters()
    link = masters.link("a")
    link.call(Done(), 5.0)
    link.close()
    link.close()
    assert masters.closed == 1
    with pytest.raises(Unavailable, match="closed"):
        link.call(Done(), 5.0)
    assert masters.dialled == ["a"]


def test_a_link_closed_while_it_dials_keeps_nothing() -> None:
    masters = FakeMasters()
    links: list[MasterLink] = []

    def dial(address: str, identity: Identity, timeout_s: float) -> FakeConnection:
        links[0].close()
        return masters.dial(address, identity, timeout_s)

    links.append(MasterLink(["a:1"], IDENTITY, masters.clock, pause=masters.pause, dial=dial))
    with pytest.raises(Unavailable, match="closed"):
        links[0].call(Done(), 5.0)
    assert masters.closed == 1


def test_threads_share_one_dial() -> None:
    masters = FakeMasters()
    inside, go_on = threading.Event(), threading.Event()

    def dial(address: str, identity: Identity, timeout_s: float) -> FakeConnection:
        inside.set()
        assert go_on.wait(10)
        return masters.dial(address, identity, timeout_s)

    link = MasterLink(["a:1"], IDENTITY, masters.clock, pause=masters.pause, dial=dial)
    replies: list[Message] = []
    threads = [
        threading.Thread(target=lambda: replies.append(link.call(Done(), 5.0))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert replies == [Done()] * 4
    assert masters.dialled == ["a"]


@pytest.mark.parametrize("addresses", [[], ["nonsense"], ["a:1", "unix:"]])
def test_bad_addresses_are_refused_before_anything_is_dialled(addresses: list[str]) -> None:
    with pytest.raises(BadValue):
        MasterLink(addresses, IDENTITY)


def test_the_system_clock_is_the_default() -> None:
    made: list[Callable[[], None]] = []
    masters = FakeMasters()
    link = MasterLink(["a:1"], IDENTITY, dial=masters.dial, pause=lambda _: made.clear())
    assert link.identity is IDENTITY
    assert link.call(Done(), 5.0) == Done()
