"""Callers that wait until pages have their replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.replicas import AwaitReplicas, ReplicasCounted
from master import awaited
from tests.unit.master_pages import KEY, KEYS
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure
from tests.unit.replicated_pools import PAGES, rig_of, run_of

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message


@pytest.fixture
def rig() -> Rig:
    """Two workers of two hosts, whose copies are held."""
    made = rig_of("w1", "w2")
    made.holds_moves = True
    return made


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace with eight pages, that are being copied."""
    made = rig.open_namespace()
    made.put(KEYS)
    rig.pass_time(0.1)
    return made


def wait(space: OpenedNamespace, timeout_s: float = 5.0, keys: bytes = KEYS) -> Message | None:
    """Ask; the answer, if there is one already."""
    return space.rig.ask(space.rig.engine, AwaitReplicas(space.id, keys, timeout_s))


def test_the_answer_comes_with_the_last_copy(rig: Rig, space: OpenedNamespace) -> None:
    assert wait(space) is None
    number = rig.last_request
    (move,) = rig.moves
    rig.obey(move)
    rig.tick()
    reply = rig.reply(rig.engine, number)
    assert reply == ReplicasCounted(bytes([2] * PAGES), bytes([2] * PAGES))
    assert not len(rig.master.core.replication.awaited)


def test_in_time_there_is_an_answer_in_any_case(rig: Rig, space: OpenedNamespace) -> None:
    assert wait(space, 1.0) is None
    number = rig.last_request
    rig.pass_time(0.9)
    assert rig.reply(rig.engine, number) is None
    rig.pass_time(0.2)
    assert rig.reply(rig.engine, number) == ReplicasCounted(bytes([2] * 8), bytes([1] * 8))


def test_nobody_waits_for_hosts_that_do_not_lend(rig: Rig, space: OpenedNamespace) -> None:
    rig.obey(rig.moves[0])
    rig.master.core.namespaces.get(space.id).replicas = 5
    assert wait(space) == ReplicasCounted(bytes([5] * 8), bytes([2] * 8))


def test_what_is_not_there_counts_as_nothing(rig: Rig, space: OpenedNamespace) -> None:
    strange = chain(7, 2)
    assert wait(space, keys=strange) == ReplicasCounted(bytes(2), bytes(2))
    assert wait(space, 0.0, KEYS + strange) == ReplicasCounted(
        bytes([2] * 8 + [0] * 2), bytes([1] * 8 + [0] * 2)
    )


def test_where_room_is_lacking_the_answer_comes_at_once(rig: Rig, space: OpenedNamespace) -> None:
    for move in rig.moves:
        rig.obey(move)
    rig.holds_moves = False
    rig.pass_time(11.0)
    run_of(rig).thinned = True
    assert wait(space) == ReplicasCounted(bytes([2] * 8), bytes([2] * 8))


def test_what_is_awaited_comes_before_what_is_as_scarce(rig: Rig, space: OpenedNamespace) -> None:
    rig.master.core.tunables = type(rig.tunables)(cluster="test", copy_bytes_per_s=1)
    first, second = chain(11, 2), chain(12, 2)
    space.put(first)
    space.put(second)
    assert wait(space, keys=second) is None
    rig.moves.clear()
    rig.tick(0.05)
    needs = list(rig.master.core.replication.queue)
    assert [need.is_awaited for need in needs if need.keys == second] == [True]
    assert [need.is_awaited for need in needs if need.keys == first] == [False]


def test_who_is_gone_is_not_answered(rig: Rig, space: OpenedNamespace) -> None:
    assert wait(space) is None
    rig.close(rig.engine)
    assert not len(rig.master.core.replication.awaited)
    assert not rig.master.core.replication.awaited
    rig.obey(rig.moves[0])
    rig.tick()


def test_waits_are_bounded(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "WAITS_MAX", 2)
    assert wait(space) is None
    assert wait(space) is None
    assert failure(wait(space)).code == "out_of_space"


def test_wrong_questions_are_refused(rig: Rig, space: OpenedNamespace) -> None:
    assert "timeout_s" in failure(wait(space, float("nan"))).text
    assert "keys" in failure(wait(space, keys=KEY[:5])).text
