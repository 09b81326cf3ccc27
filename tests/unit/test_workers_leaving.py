"""How a worker takes its leave: nothing comes in, readers are waited for, and not for ever."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import (
    FenceExtents,
    Heartbeat,
    HeartbeatNoted,
    LeaveWorker,
    RegisterWorker,
    WorkerAccepted,
)
from tests.unit.worker_scripts import (
    BEAT_S,
    EPOCH,
    INCARNATION,
    LOST_AFTER_S,
    PAGE,
    SEGMENT,
    Script,
    generation,
    ingest,
    one,
    packed,
)
from workers import events

GONE = [events.EndProcess()]
LEASE_S = limits.LEASE_TTL_MAX_S + limits.LEASE_MARGIN_S
FENCED = bytes((Outcome.FENCED,))


def leaving(script: Script) -> events.CallMaster:
    """The worker is to end: what it tells the leader."""
    call = one(script.feed(events.LeaveWanted()), events.CallMaster)
    assert call.message == LeaveWorker("w")
    return call


def test_it_ends_when_the_leader_says_that_no_reader_needs_it() -> None:
    script = Script().serve()
    call = leaving(script)
    assert script.feed(events.MasterAnswered(call.call, Done())) == GONE


def test_nothing_is_pulled_any_more_and_what_is_under_way_ends() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    actions = script.feed(events.LeaveWanted())
    assert events.CancelPull(pull.pull) in actions
    script.finish(pull, FENCED)
    refused = one(script.ask(ingest((PAGE,), 6))[1], events.AnswerIngest)
    assert refused.outcomes == FENCED


def test_commands_and_heartbeats_go_on() -> None:
    script = Script().serve()
    script.seal((0,), 5)
    leaving(script)
    fence = FenceExtents(EPOCH, SEGMENT, INCARNATION, PAGE, packed((0,)), packed((generation(5),)))
    one(script.command(fence)[1], events.WriteFree)
    script.now += BEAT_S
    beat = one(script.feed(events.Tick()), events.CallMaster)
    assert isinstance(beat.message, Heartbeat)
    # The leader has given it up: that is no reason to register again.
    assert script.feed(events.MasterAnswered(beat.call, HeartbeatNoted(EPOCH, False))) == []


def test_a_call_without_an_answer_is_made_again() -> None:
    script = Script().serve()
    call = leaving(script)
    again = one(script.feed(events.MasterAnswered(call.call, None)), events.CallMaster)
    assert again.message == LeaveWorker("w")


@pytest.mark.parametrize("epoch", [EPOCH, EPOCH + 1])
def test_it_takes_leave_of_the_next_leader_instead_of_offering_anything(epoch: int) -> None:
    script = Script().serve()
    leaving(script)
    script.feed(events.LinkClosed())
    call = one(script.feed(events.LinkOpened()), events.CallMaster)
    assert isinstance(call.message, RegisterWorker)
    accepted = WorkerAccepted(epoch, BEAT_S, LOST_AFTER_S)
    actions = script.feed(events.MasterAnswered(call.call, accepted))
    assert one(actions, events.CallMaster).message == LeaveWorker("w")
    call = one(actions, events.CallMaster)
    assert script.feed(events.MasterAnswered(call.call, Done())) == GONE


def test_a_leave_in_mid_registration_is_told_once_it_is_accepted() -> None:
    script = Script()
    call = one(script.feed(events.LinkOpened()), events.CallMaster)
    assert script.feed(events.LeaveWanted()) == []
    accepted = WorkerAccepted(EPOCH, BEAT_S, LOST_AFTER_S)
    actions = script.feed(events.MasterAnswered(call.call, accepted))
    assert one(actions, events.CallMaster).message == LeaveWorker("w")


def test_a_leader_that_refuses_is_left_and_asked_anew() -> None:
    script = Script().serve()
    call = leaving(script)
    actions = script.feed(events.MasterAnswered(call.call, Failure("unavailable", "in doubt")))
    assert isinstance(one(actions, events.CloseLink), events.CloseLink)


def test_it_ends_after_a_bound_whatever_the_leader_says() -> None:
    script = Script().serve()
    leaving(script)
    script.now += limits.LEAVE_TIMEOUT_S - 0.01
    assert events.EndProcess() not in script.feed(events.Tick())
    script.now += 0.02
    assert script.state.next_wakeup() <= script.now
    assert events.EndProcess() in script.feed(events.Tick())
    assert script.state.next_wakeup() > script.now
    assert script.feed(events.Tick()) == []


def test_without_a_leader_it_waits_for_leases_that_an_old_one_may_have_granted() -> None:
    script = Script().serve()
    script.feed(events.LinkClosed())
    script.now += 2.0
    script.feed(events.LeaveWanted())
    ends_s = script.now - 2.0 + LOST_AFTER_S + LEASE_S
    ends_s = min(ends_s, script.now + limits.LEAVE_TIMEOUT_S)
    script.now = ends_s - 0.01
    assert script.feed(events.Tick()) == []
    script.now = ends_s
    assert script.feed(events.Tick()) == GONE


def test_who_never_met_a_leader_ends_at_once() -> None:
    script = Script()
    script.feed(events.LeaveWanted())
    assert script.feed(events.Tick()) == GONE


def test_a_second_wish_changes_nothing() -> None:
    script = Script().serve()
    leaving(script)
    script.now += 5.0
    assert script.feed(events.LeaveWanted()) == []
    script.now += limits.LEAVE_TIMEOUT_S - 5.0
    assert script.feed(events.Tick()) == GONE
