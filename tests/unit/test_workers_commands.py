"""The master's commands against everything that can lie in an extent: the record state table."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    RetireExtents,
)
from tests.unit.worker_scripts import (
    EPOCH,
    INCARNATION,
    PAGE,
    SEGMENT,
    Script,
    generation,
    ingest,
    kinds,
    one,
    packed,
)
from workers import events

ExtentCommand = FenceExtents | FreeExtents | RetireExtents | CheckExtents
COMMANDS: list[type[ExtentCommand]] = [FenceExtents, FreeExtents, RetireExtents, CheckExtents]
Work = events.WriteFree | events.WriteRemoved | events.VerifyPayloads


def order(
    kind: type[ExtentCommand], counters: dict[int, int], *, epoch: int = EPOCH,
    incarnation: int = INCARNATION,
) -> ExtentCommand:  # fmt: skip
    """A command on these slots, each with its generation."""
    offsets = packed(slot * PAGE for slot in counters)
    generations = packed(generation(counter) for counter in counters.values())
    return kind(epoch, SEGMENT, incarnation, PAGE, offsets, generations)


def holding(state: str) -> Script:
    """A worker with one extent, slot 0, in that state at generation 5."""
    script = Script().serve()
    if state == "unknown":
        return script
    if state == "free":
        script.finish(script.start(ingest((0,), 5)), bytes((Outcome.CHECKSUM,)))
        return script
    if state == "pulled":
        script.start(ingest((0,), 5))
        return script
    if state == "unreported":
        script.finish(script.start(ingest((0,), 5)))
        return script
    script.seal((0,), 5)
    if state == "removed":
        work = one(script.command(order(RetireExtents, {0: 5}))[1], events.WriteRemoved)
        script.feed(events.WorkEnded(work.work, bytes(1)))
    return script


STATES = ("unknown", "free", "pulled", "unreported", "sealed", "removed")

# (state of the record at generation 5, command, its generation) ->
#   "free" / "remove" / "check": the shell is asked to, and its answer confirms
#   "end": the pull is ended first, then "free"
#   Outcome: confirmed at once, nothing changes but the generations that are refused
TABLE: dict[tuple[str, type[ExtentCommand], int], str | Outcome] = {
    **{
        (state, kind, counter): "free"
        for state in ("unknown", "free", "unreported", "sealed", "removed")
        for kind in (FenceExtents, FreeExtents)
        for counter in (5, 6)
    },
    **{("unknown", kind, 4): "free" for kind in (FenceExtents, FreeExtents)},
    **{
        (state, kind, 4): Outcome.OK  # a higher one is left alone
        for state in ("free", "pulled", "unreported", "sealed", "removed")
        for kind in (FenceExtents, FreeExtents)
    },
    **{
        ("pulled", kind, counter): "end"
        for kind in (FenceExtents, FreeExtents)
        for counter in (5, 6)
    },
    **{("unknown", RetireExtents, counter): Outcome.OK for counter in (4, 5, 6)},
    **{("free", RetireExtents, counter): Outcome.OK for counter in (4, 5, 6)},
    ("pulled", RetireExtents, 4): Outcome.OK,
    ("pulled", RetireExtents, 5): Outcome.STALE,
    ("pulled", RetireExtents, 6): Outcome.STALE,
    **{
        (state, RetireExtents, counter): Outcome.OK if counter == 4 else "remove"
        for state in ("unreported", "sealed")
        for counter in (4, 5, 6)
    },
    **{("removed", RetireExtents, counter): Outcome.OK for counter in (4, 5, 6)},
    **{
        (state, CheckExtents, counter): Outcome.STALE
        for state in ("unknown", "free", "removed")
        for counter in (4, 5, 6)
    },
    ("pulled", CheckExtents, 4): Outcome.OK,
    ("pulled", CheckExtents, 5): Outcome.STALE,
    ("pulled", CheckExtents, 6): Outcome.STALE,
    **{
        (state, CheckExtents, counter): "check" if counter == 5 else Outcome.STALE
        for state in ("unreported", "sealed")
        for counter in (4, 5, 6)
    },
}
AFTER = {"free": RecordState.FREE, "remove": RecordState.REMOVED, "check": RecordState.SEALED}
WORK: dict[str, type[Work]] = {
    "free": events.WriteFree,
    "remove": events.WriteRemoved,
    "check": events.VerifyPayloads,
}


def test_the_table_has_every_cell() -> None:
    assert set(TABLE) == {(s, k, c) for s in STATES for k in COMMANDS for c in (4, 5, 6)}


@pytest.mark.parametrize(("state", "kind", "counter"), list(TABLE))
def test_each_cell(state: str, kind: type[ExtentCommand], counter: int) -> None:
    script, want = holding(state), TABLE[state, kind, counter]
    before = script.chunk().states[0] if state != "unknown" else RecordState.FREE
    number, actions = script.command(order(kind, {0: counter}))
    if want == "end":
        cancelled = one(actions, events.CancelPull)
        actions = script.feed(events.PullEnded(cancelled.pull, bytes((Outcome.FENCED,))))
        want = "free"
    if isinstance(want, str):
        work: Work = one(actions, WORK[want])
        assert work.extents == events.ExtentGroup(SEGMENT, PAGE, (events.Stretch(0, 1, 0, 0, 0),))
        actions = script.feed(events.WorkEnded(work.work, bytes(1)))
        assert script.chunk().states[0] == AFTER[want]
        want = Outcome.OK
    else:
        assert script.chunk().states[0] == before
    confirmed = ExtentsConfirmed(EPOCH, bytes((want,)))
    assert one(actions, events.AnswerCommand) == events.AnswerCommand(number, confirmed)


@pytest.mark.parametrize("kind", [FenceExtents, FreeExtents])
@pytest.mark.parametrize("state", STATES)
def test_that_or_a_lower_generation_is_refused_from_then_on(
    state: str, kind: type[ExtentCommand]
) -> None:
    script = holding(state)
    _, actions = script.command(order(kind, {0: 6}))
    for cancelled in [each for each in actions if isinstance(each, events.CancelPull)]:
        actions = script.feed(events.PullEnded(cancelled.pull, bytes(1)))
    script.feed(events.WorkEnded(one(actions, events.WriteFree).work, bytes(1)))
    for counter in (4, 5, 6):
        answer = one(script.ask(ingest((0,), counter))[1], events.AnswerIngest)
        assert answer.outcomes == bytes((Outcome.FENCED,))
    assert script.start(ingest((0,), 7)).stretches


@pytest.mark.parametrize("kind", [FenceExtents, FreeExtents, RetireExtents])
def test_what_a_disk_did_not_take_stays_what_it_was(kind: type[ExtentCommand]) -> None:
    """An inventory lists it, so that its page can be removed; repeated, it is tried again (I29)."""
    script = holding("sealed")
    listed = script.state.holdings.segments[SEGMENT].digests()
    for _ in range(2):
        _, actions = script.command(order(kind, {0: 5}))
        work = one(actions, WORK["remove" if kind is RetireExtents else "free"])
        actions = script.feed(events.WorkEnded(work.work, bytes((Outcome.TRANSPORT,))))
        answer = one(actions, events.AnswerCommand)
        assert answer.message == ExtentsConfirmed(EPOCH, bytes((Outcome.TRANSPORT,)))
        assert script.state.holdings.segments[SEGMENT].digests() == listed


def test_a_removed_generation_never_returns() -> None:
    script = Script().serve()
    script.command(order(RetireExtents, {0: 6}))
    answer = one(script.ask(ingest((0,), 6))[1], events.AnswerIngest)
    assert answer.outcomes == bytes((Outcome.FENCED,))


def test_a_fence_is_confirmed_only_after_the_pull_has_ended() -> None:
    script = Script().serve()
    pull = script.start(ingest((0, PAGE), 5))
    number, actions = script.command(order(FenceExtents, {0: 5, 3: 5}))
    free = one(actions, events.WriteFree)  # what nobody is at work on is done at once
    assert [(s.slot, s.count) for s in free.extents.stretches] == [(3, 1)]
    assert one(actions, events.CancelPull).pull == pull.pull
    assert kinds(script.feed(events.WorkEnded(free.work, bytes(1)))) == []
    actions = script.finish(pull)  # it had sealed both before it noticed
    rest = one(actions, events.WriteFree)
    assert [(s.slot, s.count) for s in rest.extents.stretches] == [(0, 1)]
    answer = one(script.feed(events.WorkEnded(rest.work, bytes(1))), events.AnswerCommand)
    assert answer == events.AnswerCommand(number, ExtentsConfirmed(EPOCH, bytes(2)))
    assert script.chunk().states[:2] == bytes((RecordState.FREE, RecordState.SEALED))


def test_a_fence_takes_hold_before_a_waiting_request_is_looked_at() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    assert script.ask(ingest((0,), 5), session=2)[1] == []
    _, actions = script.command(order(FenceExtents, {0: 5}))
    assert kinds(actions) == ["CancelPull"]
    actions = script.finish(pull, bytes((Outcome.FENCED,)))
    assert kinds(actions) == ["AnswerIngest", "WriteFree"]  # the second request waits on
    actions = script.feed(events.WorkEnded(one(actions, events.WriteFree).work, bytes(1)))
    assert one(actions, events.AnswerIngest).outcomes == bytes((Outcome.FENCED,))


def test_a_reader_that_holds_the_lock_makes_a_free_busy_and_held() -> None:
    script = Script().serve()
    script.seal((0, PAGE), 5)
    free = one(script.command(order(FreeExtents, {0: 5, 1: 5}))[1], events.WriteFree)
    answer = one(
        script.feed(events.WorkEnded(free.work, bytes((Outcome.BUSY, Outcome.OK)))),
        events.AnswerCommand,
    )
    assert answer.message == ExtentsConfirmed(EPOCH, bytes((Outcome.BUSY, Outcome.OK)))
    assert script.state.holdings.held == {(SEGMENT, 0)}
    free = one(script.command(order(FreeExtents, {0: 5}))[1], events.WriteFree)
    script.feed(events.WorkEnded(free.work, bytes(1)))
    assert not script.state.holdings.held


def test_two_commands_on_one_extent_take_turns() -> None:
    script = Script().serve()
    script.seal((0,), 5)
    retire = one(script.command(order(RetireExtents, {0: 5}))[1], events.WriteRemoved)
    second, actions = script.command(order(FreeExtents, {0: 5}))
    assert actions == []
    actions = script.feed(events.WorkEnded(retire.work, bytes(1)))
    assert kinds(actions) == ["AnswerCommand", "WriteFree"]
    actions = script.feed(events.WorkEnded(one(actions, events.WriteFree).work, bytes(1)))
    assert one(actions, events.AnswerCommand).command == second


def test_pages_of_one_command_get_their_own_outcomes_in_order() -> None:
    script = Script().serve()
    script.seal((0, PAGE, 2 * PAGE), 5)
    _, actions = script.command(order(CheckExtents, {2: 5, 1: 4, 0: 5}))
    check = one(actions, events.VerifyPayloads)
    assert [s.slot for s in check.extents.stretches] == [2, 0]
    outcomes = bytes((Outcome.CHECKSUM, Outcome.OK))
    answer = one(script.feed(events.WorkEnded(check.work, outcomes)), events.AnswerCommand)
    want = bytes((Outcome.CHECKSUM, Outcome.STALE, Outcome.OK))
    assert answer.message == ExtentsConfirmed(EPOCH, want)


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_older_epoch_or_another_life_is_refused_as_a_whole(kind: type[ExtentCommand]) -> None:
    script = Script().serve()
    script.seal((0, PAGE), 5)
    old = order(kind, {0: 9, 1: 9}, epoch=EPOCH - 1)
    other = order(kind, {0: 9, 1: 9}, incarnation=INCARNATION - 1)
    for message, outcome in ((old, Outcome.FENCED), (other, Outcome.STALE)):
        answer = one(script.command(message)[1], events.AnswerCommand)
        assert answer.message == ExtentsConfirmed(EPOCH, bytes((outcome,)) * 2)
    assert script.chunk().states[:2] == bytes((RecordState.SEALED,)) * 2


def test_a_command_of_a_higher_epoch_raises_it() -> None:
    script = Script().serve()
    script.command(order(FenceExtents, {0: 1}, epoch=EPOCH + 1))
    assert script.state.epoch == EPOCH + 1
    answer = one(script.command(order(FenceExtents, {0: 1}))[1], events.AnswerCommand)
    assert answer.message == ExtentsConfirmed(EPOCH + 1, bytes((Outcome.FENCED,)))


def test_a_class_that_does_not_lie_there_is_stale() -> None:
    script = Script().serve()
    script.seal((0,), 5)
    message = msgspec.structs.replace(order(FreeExtents, {0: 9}), size_class=2 * PAGE)
    answer = one(script.command(message)[1], events.AnswerCommand)
    assert answer.message == ExtentsConfirmed(EPOCH, bytes((Outcome.STALE,)))


def test_an_empty_command_is_confirmed() -> None:
    answer = one(Script().serve().command(order(FenceExtents, {}))[1], events.AnswerCommand)
    assert answer.message == ExtentsConfirmed(EPOCH, b"")


BAD = {
    "half an offset": {"offsets": bytes(9)},
    "generations that do not fit": {"generations": bytes(8)},
    "no size class": {"size_class": PAGE + 1},
    "an extent twice": {"offsets": packed((0, 0))},
    "an extent elsewhere": {"offsets": packed((0, 1 << 50))},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_command_that_contradicts_itself_is_refused(change: dict[str, bytes | int]) -> None:
    message = msgspec.structs.replace(order(FenceExtents, {0: 1, 1: 1}), **change)
    answer = one(Script().serve().command(message)[1], events.AnswerCommand)
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "bad_value"


def test_more_extents_than_a_batch_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_PAGES_MAX", 1)
    answer = one(Script().serve().command(order(FenceExtents, {0: 1, 1: 1}))[1],
                 events.AnswerCommand)  # fmt: skip
    assert isinstance(answer.message, Failure)


def test_what_is_no_command_is_refused() -> None:
    answer = one(Script().serve().command(Done())[1], events.AnswerCommand)
    assert isinstance(answer.message, Failure)


def test_a_lost_link_forgets_its_commands_but_ends_their_work() -> None:
    script = Script().serve()
    script.seal((0,), 5)
    free = one(script.command(order(FreeExtents, {0: 5}))[1], events.WriteFree)
    script.feed(events.LinkClosed())
    assert script.feed(events.WorkEnded(free.work, bytes(1))) == []
    assert not script.state.commands.open
