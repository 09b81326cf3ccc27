"""Repeated puts, and puts that wait for another's end, for room, for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.ids import ROOT_PARENT
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import (
    AbortPut,
    PageRange,
    PutChain,
    PutPlans,
)
from master import waiting
from tests.unit.master_pages import KEYS, granted, key, refused
from tests.unit.master_rig import (
    TENANT,
    OpenedNamespace,
    Rig,
    chain,
    failure,
)

if TYPE_CHECKING:
    import pytest


def test_a_repeated_request_gets_the_same_answer(space: OpenedNamespace) -> None:
    first = space.begin(KEYS, request=b"r" * 16)
    assert space.begin(KEYS, request=b"r" * 16) is first


def test_open_puts_are_bounded(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IDEMPOTENT_REPLIES_MAX", 2)
    first = space.plans(chain(1, 1))
    space.plans(chain(2, 1))
    assert failure(space.begin(chain(3, 1))).code == "out_of_space"
    rig.ask(rig.engine, AbortPut((first.spans[0].generation,)))
    assert granted(space.plans(chain(3, 1))) == [(0, 1, 0)]


def test_another_peer_shares_no_request_numbers(rig: Rig, space: OpenedNamespace) -> None:
    space.begin(KEYS, request=b"r" * 16)
    other = rig.open("engine", TENANT, "other")
    reply = space.begin(KEYS, request=b"r" * 16, session=other)
    assert isinstance(reply, PutPlans)
    assert refused(reply) == [(0, 8, Outcome.IN_PROGRESS)]


def test_a_reconnected_peer_gets_its_answer_again(rig: Rig, space: OpenedNamespace) -> None:
    old = rig.open("engine", TENANT, "e", token=b"token")
    first = space.begin(KEYS, request=b"r" * 16, session=old)
    new = rig.open("engine", TENANT, "e", token=b"token")
    rig.close(old)
    assert space.begin(KEYS, request=b"r" * 16, session=new) is first


def test_a_token_of_another_tenant_is_another_peer(rig: Rig, space: OpenedNamespace) -> None:
    mine = rig.open("engine", TENANT, "e", token=b"token")
    plans = space.plans(KEYS, session=mine)
    thief = rig.open("engine", "another", "e", token=b"token")
    generation = plans.spans[0].generation
    assert isinstance(rig.ask(thief, AbortPut((generation,))), Done)
    assert generation in rig.master.core.plans


def test_a_put_waits_for_the_seal_of_another(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, session=other) is None
    request = rig.last_request
    reports = space.write(plans, KEYS)
    space.report(reports)
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert reply.present == (PageRange(0, 8, 0),)


def test_a_put_waits_for_the_failure_of_another(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, session=other) is None
    request = rig.last_request
    rig.close(rig.engine)
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert granted(reply) == [(0, 8, 0)]


def test_a_put_waits_no_longer_than_it_said(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, timeout_s=2.0, session=other) is None
    request = rig.last_request
    rig.pass_time(1.9)
    assert rig.reply(other, request) is None
    rig.pass_time(0.2)
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert refused(reply) == [(0, 8, Outcome.IN_PROGRESS)]


def test_a_put_waits_for_room(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(chain(1, 256))
    other = rig.open("engine", TENANT, "other")
    assert space.begin(chain(2, 4), wait=True, session=other) is None
    request = rig.last_request
    rig.close(rig.engine)
    rig.settle()
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert granted(reply) == [(0, 4, 0)]


def test_a_put_waits_for_a_worker(space: OpenedNamespace) -> None:
    rig = space.rig
    rig.workers.pop("w1").leave()
    rig.pass_time(4.0)
    assert space.begin(KEYS, wait=True) is None
    request = rig.last_request
    rig.add_worker("w2")
    reply = rig.reply(rig.engine, request)
    assert isinstance(reply, PutPlans)
    assert granted(reply) == [(0, 8, 0)]


def test_a_put_that_cannot_be_right_any_more_is_refused_when_it_is_woken(rig: Rig) -> None:
    space = rig.open_namespace()
    rig.workers.pop("w1").leave()
    rig.pass_time(4.0)
    assert space.begin(KEYS, wait=True) is None
    request = rig.last_request
    # The chain's first page comes in by another way, below another parent.
    rig.add_worker("w2")
    assert isinstance(rig.reply(rig.engine, request), PutPlans)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, timeout_s=1.0, session=other) is None
    waits = rig.last_request
    waiting_message = next(iter(rig.master.core.sessions[other].owner.waits.values())).message
    assert waiting_message.chains[0].keys == KEYS
    (held,) = rig.master.core.sessions[other].owner.waits.values()
    held.message = msgspec.structs.replace(
        waiting_message, chains=(PutChain(ROOT_PARENT, key(0) + key(0)),)
    )
    rig.pass_time(1.2)
    assert failure(rig.reply(other, waits)).code == "bad_value"


def test_a_put_that_got_something_does_not_wait(space: OpenedNamespace) -> None:
    reply = space.begin(chain(1, 300), wait=True)
    assert isinstance(reply, PutPlans)


def test_a_repeated_waiting_request_is_answered_once(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    for _ in range(2):
        assert space.begin(KEYS, wait=True, request=b"r" * 16, session=other) is None
    request = rig.last_request
    assert len(rig.master.core.waiting) == 1
    space.report(space.write(plans, KEYS))
    assert isinstance(rig.reply(other, request), PutPlans)
    assert rig.reply(other, request - 1) is None


def test_a_closed_connection_waits_no_more(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other", token=b"t")
    rig.open("engine", TENANT, "other", token=b"t")
    assert space.begin(KEYS, wait=True, session=other) is None
    rig.close(other)
    assert len(rig.master.core.waiting) == 0


def test_too_many_waits_are_answered_at_once(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAITING_PUTS_MAX", 2)
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert [space.begin(KEYS, wait=True, session=other) for _ in range(2)] == [None, None]
    assert isinstance(space.begin(KEYS, wait=True, session=other), PutPlans)
    assert rig.master.core.counters["waiting_puts_refused"] == 1


def test_many_waits_are_woken_bit_by_bit(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    for _ in range(waiting.RETRIES_PER_EVENT + 5):
        assert space.begin(KEYS, wait=True, session=other) is None
    space.report(space.write(plans, KEYS))
    assert len(rig.master.core.waiting) == 5
    assert rig.master.wakeup_s <= rig.now
    rig.settle()
    assert len(rig.master.core.waiting) == 0
