"""Ingest decisions: who may pull, who joins, who waits, and when the client is answered."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import NO_PARENT, ROOT_PARENT
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import FenceExtents
from kvstore.wire.messages.puts import Sealed, SealedNoted
from tests.unit.worker_scripts import (
    BEAT_S,
    CHUNK,
    EPOCH,
    INCARNATION,
    PAGE,
    SEGMENT,
    Script,
    generation,
    ingest,
    key,
    kinds,
    one,
    packed,
    registration_reply,
)
from workers import events
from workers import pulls as pulls_module
from workers.pull_requests import UNDECIDED

THREE = (0, PAGE, 2 * PAGE)


def fence(offsets: tuple[int, ...], counter: int, epoch: int = EPOCH) -> FenceExtents:
    return FenceExtents(
        epoch, SEGMENT, INCARNATION, PAGE, packed(offsets),
        packed([generation(counter)] * len(offsets)),
    )  # fmt: skip


def test_a_put_is_pulled_reported_and_only_then_answered() -> None:
    script = Script().serve()
    message = ingest(THREE, 5)
    request, actions = script.ask(message)
    pull = one(actions, events.StartPull)
    assert (pull.request, pull.message, pull.size_class) == (request, message, PAGE)
    assert pull.stretches == (events.Stretch(0, 3, 0, 0, 0),)
    report = one(script.finish(pull), events.CallMaster)
    assert report.message == Sealed(
        SEGMENT, INCARNATION, generation(5), 1, 0, PAGE, 64, bytes(32) + message.keys[:-32],
        message.keys, message.offsets, message.checksums,
    )  # fmt: skip
    answer = one(script.note(report, bytes(3)), events.AnswerIngest)
    assert answer == events.AnswerIngest(request, 1, bytes(3))
    assert script.chunk().states.count(RecordState.SEALED) == 3


def test_named_objects_are_reported_without_parents() -> None:
    script = Script().serve()
    message = msgspec.structs.replace(ingest(THREE, 5), parent=NO_PARENT)
    _, actions = script.ask(message)
    report = one(script.finish(one(actions, events.StartPull)), events.CallMaster)
    assert isinstance(report.message, Sealed)
    assert (report.message.parents, report.message.keys) == (ROOT_PARENT * 3, message.keys)


def test_extents_apart_are_separate_stretches_in_page_order() -> None:
    offsets = (CHUNK - PAGE, CHUNK, 5 * PAGE)
    pull = Script().serve().start(ingest(offsets, 5))
    assert [(s.page, s.count, s.offset) for s in pull.stretches] == [
        (0, 1, CHUNK - PAGE), (1, 1, CHUNK), (2, 1, 5 * PAGE),
    ]  # fmt: skip


# What lies in an extent × the generation that asks for it -> outcome at once, or "pull".
FREE_AT_5, SEALED_AT_5, REMOVED_AT_5, FAILED_AT_5, FENCED_AT_5, CLOSED_AT_5 = range(6)
GRID = [
    (FREE_AT_5, 5, "pull"),
    (FREE_AT_5, 6, "pull"),
    (FREE_AT_5, 1, "pull"),
    (SEALED_AT_5, 4, Outcome.STALE),
    (SEALED_AT_5, 5, "report"),
    (SEALED_AT_5, 6, Outcome.STALE),
    (REMOVED_AT_5, 4, Outcome.STALE),
    (REMOVED_AT_5, 5, Outcome.STALE),
    (REMOVED_AT_5, 6, Outcome.STALE),
    (FAILED_AT_5, 4, Outcome.FENCED),
    (FAILED_AT_5, 5, Outcome.CHECKSUM),
    (FAILED_AT_5, 6, "pull"),
    (FENCED_AT_5, 4, Outcome.FENCED),
    (FENCED_AT_5, 5, Outcome.FENCED),
    (FENCED_AT_5, 6, "pull"),
    (CLOSED_AT_5, 4, Outcome.FENCED),
    (CLOSED_AT_5, 5, Outcome.PLAN_CLOSED),
    (CLOSED_AT_5, 6, "pull"),
]


def prepared(what: int) -> Script:
    script = Script().serve()
    if what == FREE_AT_5:
        return script
    if what == FENCED_AT_5:
        work = one(script.command(fence((0,), 5))[1], events.WriteFree)
        script.feed(events.WorkEnded(work.work, bytes(1)))
        return script
    pull = script.start(ingest((0,), 5))
    if what == FAILED_AT_5:
        script.finish(pull, bytes((Outcome.CHECKSUM,)))
        return script
    report = one(script.finish(pull), events.CallMaster)
    closed = what == CLOSED_AT_5
    actions = script.note(report, bytes((Outcome.PLAN_CLOSED if closed else Outcome.OK,)))
    if closed:
        script.feed(events.WorkEnded(one(actions, events.WriteFree).work, bytes(1)))
    if what == REMOVED_AT_5:
        script.chunk().states[0] = RecordState.REMOVED
    return script


@pytest.mark.parametrize(("what", "counter", "want"), GRID)
def test_what_lies_there_decides(what: int, counter: int, want: Outcome | str) -> None:
    script = prepared(what)
    before = bytes(script.chunk().states) if what != FREE_AT_5 else b""
    _, actions = script.ask(ingest((0,), counter))
    if want == "pull":
        assert one(actions, events.StartPull).stretches[0].count == 1
        return
    if want == "report":
        assert isinstance(one(actions, events.CallMaster).message, Sealed)
    else:
        assert isinstance(want, Outcome)
        assert one(actions, events.AnswerIngest).outcomes == bytes((want,))
    assert bytes(script.chunk().states) == before


def test_the_grid_covers_every_pair() -> None:
    assert {(what, counter) for what, counter, _ in GRID} >= {
        (what, counter) for what in range(1, 6) for counter in (4, 5, 6)
    }


def test_a_sealed_extent_is_never_another_pages_target() -> None:
    script = Script().serve()
    script.seal((0,), 5, first_key=1)
    _, actions = script.ask(ingest((0,), 5, first_key=2))
    assert one(actions, events.AnswerIngest).outcomes == bytes((Outcome.STALE,))


def test_a_repeated_ingest_joins_the_pull_that_runs() -> None:
    script = Script().serve()
    message = ingest(THREE, 5)
    first = script.start(message)
    second, actions = script.ask(message, session=2)
    assert actions == []
    actions = script.finish(first)
    reports = [each for each in actions if isinstance(each, events.CallMaster)]
    assert kinds(actions) == ["CallMaster", "CallMaster"]  # one pull, two who wait for its seal
    answers = [one(script.note(each, bytes(3)), events.AnswerIngest) for each in reports]
    assert [each.request for each in answers] == [first.request, second]


def test_a_repeated_ingest_gets_the_failure_of_the_first() -> None:
    script = Script().serve()
    message = ingest(THREE, 5)
    outcomes = bytes((Outcome.OK, Outcome.CHECKSUM, Outcome.SOURCE_LOST))
    pull = script.start(message)
    report = one(script.finish(pull, outcomes), events.CallMaster)
    assert isinstance(report.message, Sealed)
    assert report.message.keys == key(1)
    answer = one(script.note(report, bytes(1)), events.AnswerIngest)
    assert answer.outcomes == outcomes
    again = one(script.ask(message)[1], events.CallMaster)
    assert one(script.note(again, bytes(1)), events.AnswerIngest).outcomes == outcomes


def test_a_request_that_overlaps_a_pull_waits_and_then_pulls_the_rest() -> None:
    script = Script().serve()
    pull = script.start(ingest(THREE[:2], 5))
    _, actions = script.ask(ingest(THREE, 5), session=2)
    assert actions == []
    rest = one(script.finish(pull), events.StartPull)
    assert [(s.page, s.slot) for s in rest.stretches] == [(2, 2)]
    report = one(script.finish(rest), events.CallMaster)
    assert isinstance(report.message, Sealed)
    assert report.message.offsets == packed(THREE)


def test_a_higher_generation_waits_until_the_extent_is_not_busy() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    higher, actions = script.ask(ingest((0,), 6), session=2)
    assert actions == []
    actions = script.finish(pull, bytes((Outcome.SOURCE_LOST,)))
    assert one(actions, events.StartPull).request == higher


def test_a_higher_generation_gets_nothing_where_the_lower_was_sealed() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    higher, _ = script.ask(ingest((0,), 6), session=2)
    answer = one(script.finish(pull), events.AnswerIngest)
    assert answer == events.AnswerIngest(higher, 2, bytes((Outcome.STALE,)))


def test_a_closed_plan_frees_what_was_sealed_for_it() -> None:
    script = Script().serve()
    report = one(script.finish(script.start(ingest(THREE, 5))), events.CallMaster)
    outcomes = bytes((Outcome.OK, Outcome.PLAN_CLOSED, Outcome.OK))
    actions = script.note(report, outcomes)
    assert one(actions, events.AnswerIngest).outcomes == outcomes
    free = one(actions, events.WriteFree)
    assert [(s.slot, s.count) for s in free.extents.stretches] == [(1, 1)]
    script.feed(events.WorkEnded(free.work, bytes(1)))
    assert script.chunk().states[:3] == bytes((2, 0, 2))


@pytest.mark.parametrize(
    "reply", [None, Failure("unavailable", "not now"), SealedNoted(b""), Done()]
)
def test_a_seal_without_an_answer_is_told_to_the_next_leader(reply: Failure | None) -> None:
    script = Script().serve()
    report = one(script.finish(script.start(ingest(THREE, 5))), events.CallMaster)
    answer = one(script.feed(events.MasterAnswered(report.call, reply)), events.AnswerIngest)
    assert answer.outcomes == bytes((Outcome.TRANSPORT,)) * 3
    script.feed(events.LinkClosed())
    again = one(reregistered(script, EPOCH + 1), events.CallMaster)
    assert again.message == report.message
    assert script.note(again, bytes(3)) == []
    assert reregistered(script, EPOCH + 2) == []


def test_of_too_many_seals_without_an_answer_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls_module, "UNREPORTED_MAX", 2)
    script = Script().serve()
    for i in range(3):
        message = ingest((i * PAGE,), 5, first_key=i + 1)
        report = one(script.finish(script.start(message)), events.CallMaster)
        script.feed(events.MasterAnswered(report.call, None))
    script.now += BEAT_S
    calls = [a.message for a in script.feed(events.Tick()) if isinstance(a, events.CallMaster)]
    assert [call.keys for call in calls if isinstance(call, Sealed)] == [key(2), key(3)]


def test_only_what_still_lies_there_is_told_again() -> None:
    script = Script().serve()
    report = one(script.finish(script.start(ingest(THREE, 5))), events.CallMaster)
    script.feed(events.MasterAnswered(report.call, None))
    work = one(script.command(fence((0, 2 * PAGE), 5))[1], events.WriteFree)
    script.feed(events.WorkEnded(work.work, bytes(2)))
    again = one(reregistered(script, EPOCH), events.CallMaster)
    assert isinstance(again.message, Sealed)
    assert (again.message.keys, again.message.offsets) == (key(2), packed([PAGE]))
    assert again.message.parents == key(1)


def reregistered(script: Script, epoch: int) -> list[events.Action]:
    """What follows the end of a registration."""
    actions = script.feed(events.LinkOpened())
    while not script.state.is_serving:
        call = one(actions, events.CallMaster)
        reply = registration_reply(call.message, epoch)
        actions = script.feed(events.MasterAnswered(call.call, reply))
    return actions


def test_a_client_that_is_gone_is_not_waited_for() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5), session=1)
    assert script.ask(ingest((0,), 6), session=2)[1] == []
    assert script.feed(events.SessionClosed(2)) == []
    assert script.feed(events.SessionClosed(1)) == [events.CancelPull(pull.pull)]
    assert script.feed(events.SessionClosed(1)) == []  # told once
    actions = script.finish(pull, bytes((Outcome.SOURCE_LOST,)))
    assert kinds(actions) == ["AnswerIngest"]  # which nobody receives
    assert not script.state.pulls.waiting


def test_what_a_dead_client_had_sealed_is_reported_all_the_same() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    script.feed(events.SessionClosed(1))
    report = one(script.finish(pull), events.CallMaster)
    freed = one(script.note(report, bytes((Outcome.PLAN_CLOSED,))), events.WriteFree)
    script.feed(events.WorkEnded(freed.work, bytes(1)))
    assert script.chunk().states[0] == RecordState.FREE


def test_too_many_waiting_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITING_PUTS_MAX", 2)
    script = Script().serve()
    script.start(ingest((0,), 5))
    assert [script.ask(ingest((0,), 6))[1] for _ in range(2)] == [[], []]
    assert one(script.ask(ingest((0,), 6))[1], events.RefuseIngest).code == "out_of_space"


BAD = {
    "no page": {"keys": b"", "offsets": b"", "checksums": b""},
    "half a key": {"keys": bytes(33)},
    "an offset too few": {"offsets": packed(THREE[:2])},
    "a checksum too many": {"checksums": packed([1, 2, 3, 4])},
    "a parent that is none": {"parent": bytes(31)},
    "a part beyond the limit": {"part": limits.PARTS_MAX},
    "a token count beyond its field": {"token_count": 1 << 16},
    "a negative ordinal": {"namespace_ordinal": -1},
    "another epoch's generation": {"generation": generation(5, EPOCH + 1)},
    "the same extent twice": {"offsets": packed((0, PAGE, 0))},
    "an offset between extents": {"offsets": packed((0, PAGE, 2 * PAGE + 8))},
    "an offset beyond the segment": {"offsets": packed((0, PAGE, 1 << 40))},
    "an empty part": {"part_bytes": 0},
    "a part larger than a chunk": {"part_bytes": CHUNK + 1},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_request_that_contradicts_itself_is_refused(change: dict[str, bytes | int]) -> None:
    script = Script().serve()
    message = msgspec.structs.replace(ingest(THREE, 5), **change)
    assert one(script.ask(message)[1], events.RefuseIngest).code == "bad_value"
    assert script.start(ingest(THREE, 5)).stretches  # nothing was kept busy


def test_more_pages_than_a_batch_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_PAGES_MAX", 2)
    assert one(Script().serve().ask(ingest(THREE, 5))[1], events.RefuseIngest).code == "bad_value"


def test_another_life_of_the_segment_or_a_stranger_is_stale() -> None:
    script = Script().serve()
    other = ingest(THREE, 5, incarnation=INCARNATION + 1)
    stranger = msgspec.structs.replace(ingest(THREE, 5), segment="elsewhere")
    for message in (other, stranger):
        answer = one(script.ask(message)[1], events.AnswerIngest)
        assert answer.outcomes == bytes((Outcome.STALE,)) * 3


def test_extents_under_another_class_are_stale_until_they_are_free() -> None:
    script = Script().serve()
    script.seal((0,), 5)
    large = ingest((0,), 6, size=2 * PAGE)
    assert one(script.ask(large)[1], events.AnswerIngest).outcomes == bytes((Outcome.STALE,))
    work = one(script.command(fence((0,), 5))[1], events.WriteFree)
    script.feed(events.WorkEnded(work.work, bytes(1)))
    assert script.start(large).size_class == 2 * PAGE


def test_a_chunk_cut_anew_remembers_what_was_fenced() -> None:
    script = Script().serve()
    work = one(script.command(fence((0,), 5))[1], events.WriteFree)
    script.feed(events.WorkEnded(work.work, bytes(1)))
    late = ingest((0,), 5, size=2 * PAGE)
    assert one(script.ask(late)[1], events.AnswerIngest).outcomes == bytes((Outcome.FENCED,))
    script.finish(script.start(ingest((0,), 6, size=2 * PAGE)), bytes((Outcome.CHECKSUM,)))
    assert one(script.ask(ingest((0,), 5))[1], events.AnswerIngest).outcomes == bytes(
        (Outcome.FENCED,)
    )


def test_a_seal_that_nobody_answered_is_reported_again_with_the_next_heartbeat() -> None:
    script = Script().serve()
    message = ingest(THREE, 5)
    report = one(script.finish(script.start(message)), events.CallMaster)
    lost = one(script.feed(events.MasterAnswered(report.call, None)), events.AnswerIngest)
    assert lost.outcomes == bytes((Outcome.TRANSPORT,)) * 3
    script.now += BEAT_S
    calls = [a for a in script.feed(events.Tick()) if isinstance(a, events.CallMaster)]
    again = next(call for call in calls if isinstance(call.message, Sealed))
    assert again.message == report.message
    assert script.note(again, bytes(3)) == []
    assert not script.state.pulls.unreported
    script.now += BEAT_S
    one(script.feed(events.Tick()), events.CallMaster)  # the heartbeat alone


def test_a_seal_whose_chunk_was_cut_anew_is_not_reported_again() -> None:
    script = Script().serve()
    last = CHUNK - PAGE  # beyond the last extent of the next class
    report = one(script.finish(script.start(ingest((last,), 5))), events.CallMaster)
    script.feed(events.MasterAnswered(report.call, None))
    work = one(script.command(fence((last,), 5))[1], events.WriteFree)
    script.feed(events.WorkEnded(work.work, bytes(1)))
    script.start(ingest((0,), 6, size=3 * PAGE))
    script.now += BEAT_S
    assert kinds(script.feed(events.Tick())) == ["CallMaster"]  # the heartbeat


def test_undecided_is_no_outcome() -> None:
    assert UNDECIDED not in {int(outcome) for outcome in Outcome}
