"""Puts that stop with many plans: whoever planned them, no event does much about it (I27)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.ids import ROOT_PARENT
from kvstore.replica import ExtentState
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import AbortPut, BeginPut, PutChain, PutPlans
from master import puts
from master.state import STEPS_PER_TICK
from tests.unit.master_pages import bytes_in, granted
from tests.unit.master_rig import TENANT, OpenedNamespace, Rig, chain

if TYPE_CHECKING:
    from master.core import Core
    from master.plans import Plan

PLANS = 60
AT_ONCE = 4
TOKEN = b"the writer's own"


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stretches each step has failed, with AT_ONCE of them in each at most."""
    counts = [0]
    fail_pages = puts.fail_pages

    def counted(core: Core, plan: Plan, first: int, count: int) -> None:
        counts[-1] += 1
        fail_pages(core, plan, first, count)

    monkeypatch.setattr(puts, "fail_pages", counted)
    monkeypatch.setattr(puts, "STRETCHES_PER_STEP", AT_ONCE)
    return counts


class Writer:
    """An engine with PLANS plans, of a put each or of one, a page each."""

    def __init__(self, *, one_put: bool = False) -> None:
        self.rig = Rig()
        self.rig.add_worker()
        self.space: OpenedNamespace = self.rig.open_namespace()
        self.session = self.rig.open("engine", TENANT, "writer", TOKEN)
        chains = [PutChain(ROOT_PARENT, chain(number, 1)) for number in range(PLANS)]
        for each in [chains] if one_put else [[single] for single in chains]:
            self.rig.puts += 1
            request = self.rig.puts.to_bytes(16, "little")
            message = BeginPut(request, self.space.id, tuple(each), (0,), (4096,), 5.0, False, None)
            reply = self.rig.settled(self.session, self.rig.ask(self.session, message))
            assert isinstance(reply, PutPlans)
        assert len(self.core.plans) == PLANS

    @property
    def core(self) -> Core:
        """The master's."""
        return self.rig.master.core

    def goes_on_in_steps(self, failed: list[int]) -> None:
        """Whatever happened last did a step; each tick does its few more, until nothing is left."""
        assert failed[0] <= AT_ONCE, "the event itself"
        while self.core.plans:
            failed.append(0)
            before = len(self.core.plans)
            self.rig.tick()
            assert before - len(self.core.plans) == failed[-1] <= AT_ONCE * STEPS_PER_TICK
            assert failed[-1], "it goes on at once"
        assert sum(failed) == PLANS
        assert not self.core.given_up.puts
        self.rig.settle()
        assert bytes_in(self.rig, ExtentState.RESERVED) == 0
        assert bytes_in(self.rig, ExtentState.QUARANTINED) == 0


def test_a_step_takes_less_than_five_milliseconds() -> None:
    us_per_stretch = 10
    assert puts.STRETCHES_PER_STEP * STEPS_PER_TICK * us_per_stretch < 5000


@pytest.mark.parametrize("one_put", [False, True])
def test_the_plans_of_a_dead_writer_fail_in_steps(failed: list[int], one_put: bool) -> None:
    writer = Writer(one_put=one_put)
    writer.rig.close(writer.session)
    assert len(writer.core.plans) == PLANS - AT_ONCE
    writer.goes_on_in_steps(failed)


@pytest.mark.parametrize("one_put", [False, True])
def test_silent_puts_fail_in_steps(failed: list[int], one_put: bool) -> None:
    writer = Writer(one_put=one_put)
    writer.rig.pass_time(limits.put_timeout_s(4096) - 0.2)
    writer.rig.now += 0.4
    puts_open = len(writer.core.sessions[writer.session].owner.puts)
    ticks = 0
    while writer.core.plans:
        failed.append(0)
        writer.rig.tick()
        ticks += 1
        assert failed[-1] <= AT_ONCE * (1 + STEPS_PER_TICK)
    assert ticks >= PLANS // (AT_ONCE * (1 + STEPS_PER_TICK))
    assert writer.core.counters["puts_timed_out"] == puts_open


def test_the_plans_in_a_lost_segment_fail_in_steps(failed: list[int]) -> None:
    writer = Writer()
    rig = writer.rig
    rig.workers["w1"].leave()
    rig.now += rig.tunables.worker_lost_after_s + 0.1
    ticks = 0
    while writer.core.plans:
        failed.append(0)
        rig.tick()
        ticks += 1
        assert failed[-1] <= AT_ONCE * (1 + STEPS_PER_TICK)
        assert writer.space.probe(chain(0, 1)) == b"\0"
    assert ticks > PLANS // (AT_ONCE * (2 + STEPS_PER_TICK))
    assert sum(failed) == PLANS


def test_a_worker_that_is_back_at_once_has_no_plans_of_before(failed: list[int]) -> None:
    writer = Writer()
    rig = writer.rig
    worker = rig.workers["w1"]
    worker.leave()
    rig.tick(after_s=rig.tunables.worker_lost_after_s + 0.1)
    assert writer.core.plans
    worker.join()
    rig.settle()
    assert not writer.core.plans
    assert sum(failed) == PLANS
    rig.pass_time(30.0)  # of what was leased before
    assert bytes_in(rig, ExtentState.RESERVED) == bytes_in(rig, ExtentState.QUARANTINED) == 0
    assert granted(writer.space.plans(chain(0, 1))) == [(0, 1, 0)]


def test_an_abort_of_many_is_answered_when_all_have_failed(failed: list[int]) -> None:
    writer = Writer()
    message = AbortPut(tuple(writer.core.plans))
    assert writer.rig.ask(writer.session, message) is None
    request = writer.rig.last_request
    writer.goes_on_in_steps(failed)
    assert isinstance(writer.rig.reply(writer.session, request), Done)


def test_a_late_contradiction_fails_many_plans_in_steps(failed: list[int]) -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace()
    space.put(chain(1, 2))
    single = [PutChain(ROOT_PARENT, chain(number, 1)) for number in range(2, PLANS)]
    wrong = PutChain(chain(2, 1), chain(1, 1))  # it has another parent
    message = BeginPut(bytes(16), space.id, (*single, wrong), (0,), (4096,), 5.0, False, None)
    reply = rig.settled(rig.engine, rig.ask(rig.engine, message))
    assert not isinstance(reply, PutPlans)
    assert rig.master.core.plans, "the answer does not wait"
    while rig.master.core.plans:
        failed.append(0)
        rig.tick()
        assert failed[-1] <= AT_ONCE * STEPS_PER_TICK


def test_what_is_given_up_may_still_be_sealed(failed: list[int]) -> None:
    writer = Writer()
    rig, space = writer.rig, writer.space
    last = list(writer.core.plans.values())[-1]
    rig.close(writer.session)
    (run,) = {stretch.run for stretch in writer.core.tree(1).stretches(last.keys)}
    assert last in run.plans
    puts.seal_pages(writer.core, last, 0, 1, bytes(8))
    rig.settle()
    assert space.probe(last.keys) == b"\1"
    assert sum(failed) == PLANS - 1


def test_who_comes_back_with_its_token_does_not_have_the_old_puts(failed: list[int]) -> None:
    writer = Writer()
    rig, space = writer.rig, writer.space
    generations = tuple(writer.core.plans)
    rig.close(writer.session)
    again = rig.open("engine", TENANT, "writer", TOKEN)
    assert isinstance(rig.ask(again, AbortPut(generations)), Done)
    assert len(writer.core.plans) == PLANS - AT_ONCE, "they are not its own any more"
    waits = space.begin(chain(PLANS - 1, 1), session=again, wait=True)
    assert waits is None, "the page is still planned"
    plans = rig.settled(again, waits)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 1, 0)]
    assert sum(failed) == PLANS


def test_what_is_given_up_needs_a_job() -> None:
    writer = Writer()
    writer.rig.checks = False
    puts.give_up(writer.core, list(writer.core.sessions[writer.session].owner.puts.values())[:1])
    writer.rig.master.check_invariants()
    (put,) = {plan.put for plan in list(writer.core.plans.values())[:1]}
    writer.core.given_up.puts[put.request] = put
    put.owner.puts.pop(put.request)
    put.owner = writer.core.given_up
    with pytest.raises(InvariantBroken, match="I18: a put without an owner"):
        writer.rig.master.check_invariants()
