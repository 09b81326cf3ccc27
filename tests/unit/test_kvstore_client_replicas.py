"""What a put tells of replicas: nothing asked, all there, fewer, or nobody could tell."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.client.outcomes import (
    AlreadyThere,
    PutOutcome,
    Refused,
    RefusedReason,
    Stored,
)
from kvstore.client.replicas import RETRY_AFTER_S, replica_steps
from kvstore.client.steps import drive
from kvstore.client.writes import PATIENCE, PAUSE_MIN_S, PutRequest
from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    KVStoreError,
    MalformedMessage,
    OutOfSpace,
    Unavailable,
)
from kvstore.ids import KEY_BYTES
from kvstore.page import PageChain
from kvstore.wire.messages.replicas import AwaitReplicas, ReplicasCounted
from tests.unit.client_scripts import Script, opened

SPACE = opened()
CHAIN = SPACE.chain(range(20))
NO_ROOM = Refused(RefusedReason.OUT_OF_SPACE, 0.1)
TOO_FEW = Refused(RefusedReason.TOO_FEW_REPLICAS, RETRY_AFTER_S)
OUTCOMES: list[PutOutcome] = [Stored(), AlreadyThere(), Stored(visible=False), Stored(), NO_ROOM]


def counted(
    script: Script,
    outcomes: list[PutOutcome] = OUTCOMES,
    chain: PageChain = CHAIN,
    *,
    replicas: int = 0,
    strict: bool = False,
    left_s: float = 5.0,
) -> list[PutOutcome]:
    """The outcomes with what is told of replicas."""
    deadline_s = script.clock.now_s() + left_s
    request = PutRequest(
        SPACE, chain, (), deadline_s, replicas=replicas, strict=strict, replicas_now=True
    )
    return drive(replica_steps(request, outcomes, script.clock), script)


def keys(*pages: int) -> bytes:
    """Of these pages of the chain."""
    return b"".join(CHAIN.key(page) for page in pages)


def test_what_can_be_read_is_counted() -> None:
    script = Script().will(ReplicasCounted(b"\2\2\3", b"\2\1\3"))
    assert counted(script) == [
        Stored(replicas_wanted=2, replicas=2),
        AlreadyThere(replicas_wanted=2, replicas=1),
        Stored(visible=False),
        Stored(replicas_wanted=3, replicas=3),
        NO_ROOM,
    ]
    assert script.asked == [AwaitReplicas(SPACE.namespace.id, keys(0, 1, 3), 5.0 * PATIENCE)]
    assert script.patience == [5.0]


def test_who_takes_no_fewer_is_refused_what_got_fewer() -> None:
    script = Script().will(ReplicasCounted(b"\2\2\1", b"\2\1\1"))
    assert counted(script, strict=True) == [
        Stored(replicas_wanted=2, replicas=2), TOO_FEW, Stored(visible=False),
        Stored(replicas_wanted=1, replicas=1), NO_ROOM,
    ]  # fmt: skip


def test_what_the_put_asked_for_counts_also_where_the_master_has_forgotten_it() -> None:
    script = Script().will(ReplicasCounted(b"\1\1\4", b"\1\2\2"))
    assert counted(script, replicas=2)[0] == Stored(replicas_wanted=2, replicas=1)
    script = Script().will(ReplicasCounted(b"\1\1\4", b"\1\2\2"))
    found = counted(script, replicas=2, strict=True)
    assert found[:2] == [TOO_FEW, AlreadyThere(replicas_wanted=2, replicas=2)]
    assert found[3] == TOO_FEW


def test_a_master_that_knows_nothing_yet_is_asked_again() -> None:
    none, some = ReplicasCounted(b"\0\2\0", b"\0\2\0"), ReplicasCounted(b"\2\2\2", b"\2\2\2")
    script = Script().will(none, none, some)
    found = counted(script)
    assert [each.replicas for each in found if isinstance(each, Stored)] == [2, None, 2]
    assert script.pauses == [PAUSE_MIN_S, 2 * PAUSE_MIN_S]
    assert script.patience == pytest.approx([5.0, 5.0 - PAUSE_MIN_S, 5.0 - 3 * PAUSE_MIN_S])


@pytest.mark.parametrize("strict", [False, True])
def test_what_has_gone_by_the_deadline_has_no_replica(strict: bool) -> None:
    script = Script()
    script.answers.extend([ReplicasCounted(b"\2\2\0", b"\2\2\0")] * 99)
    found = counted(script, strict=strict)
    assert found[3] == (TOO_FEW if strict else Stored(replicas_wanted=0, replicas=0))
    assert found[0] == Stored(replicas_wanted=2, replicas=2)
    assert sum(script.pauses) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), Unavailable("gone"), OutOfSpace("too many wait")]
)
def test_what_nobody_could_tell_is_stored_all_the_same(error: KVStoreError) -> None:
    assert counted(Script().will(error)) == OUTCOMES
    strict = counted(Script().will(error), strict=True)
    assert strict == [TOO_FEW, TOO_FEW, Stored(visible=False), TOO_FEW, NO_ROOM]


def test_after_the_deadline_nobody_is_asked() -> None:
    script = Script()
    assert counted(script, left_s=0.0) == OUTCOMES
    assert not script.asked


def test_where_nothing_was_put_nobody_is_asked() -> None:
    script = Script()
    assert counted(script, [NO_ROOM] * 5, strict=True) == [NO_ROOM] * 5
    assert not script.asked


def test_errors_of_other_kinds_are_the_callers() -> None:
    with pytest.raises(AccessDenied):
        counted(Script().will(AccessDenied("another tenant's")))


def test_an_answer_about_other_pages_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="ReplicasCounted: 1 pages"):
        counted(Script().will(ReplicasCounted(b"\1\1\1", b"\1")))


def test_a_long_chain_is_asked_for_batch_by_batch() -> None:
    full = limits.BATCH_PAGES_MAX
    chain = PageChain(bytes(range(1, 33)) * (full + 1))
    script = Script().will(
        ReplicasCounted(b"\2" * full, b"\2" * full), ReplicasCounted(b"\2", b"\1")
    )
    outcomes: list[PutOutcome] = [Stored()] * (full + 1)
    found = counted(script, outcomes, chain)
    assert found == [Stored(True, 2, 2)] * full + [Stored(True, 2, 1)]
    sizes = [len(m.keys) // KEY_BYTES for m in script.asked if isinstance(m, AwaitReplicas)]
    assert sizes == [full, 1]


@pytest.mark.parametrize(
    ("wishes", "awaits"),
    [
        ({}, False),
        ({"replicas": 3}, False),
        ({"strict": True}, True),
        ({"replicas_now": True}, True),
    ],
)
def test_only_who_asks_for_it_waits(wishes: dict[str, object], awaits: bool) -> None:
    request = PutRequest(SPACE, CHAIN, (), 0.0)
    assert msgspec.structs.replace(request, **wishes).awaits_replicas is awaits
