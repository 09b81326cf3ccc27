"""Moves: what the leader asks to be copied between extents, and what that keeps in place."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.record import RecordState
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    RetireExtents,
)
from kvstore.wire.messages.puts import ExtentSource, Ingest, PeerSource, Sealed
from tests.unit.worker_scripts import (
    CHUNK,
    EPOCH,
    GEOMETRY,
    INCARNATION,
    NVME,
    PAGE,
    SEGMENT,
    Script,
    generation,
    ingest,
    kinds,
    move,
    one,
    packed,
)
from workers import events
from workers.events import MOVER

THREE = (0, PAGE, 2 * PAGE)
ExtentCommand = FenceExtents | FreeExtents | RetireExtents | CheckExtents


def filled() -> Script:
    """A worker with three pages in DRAM, at generation 5."""
    script = Script(nvme=True).serve()
    script.seal(THREE, 5)
    return script


def order(
    kind: type[ExtentCommand], offsets: tuple[int, ...], counter: int, segment: str = SEGMENT
) -> ExtentCommand:
    generations = packed([generation(counter)] * len(offsets))
    return kind(EPOCH, segment, INCARNATION, PAGE, packed(offsets), generations)


def test_a_move_is_pulled_reported_and_only_then_answered() -> None:
    script = filled()
    message = move(THREE, 6, THREE)
    request, actions = script.ask(message, MOVER)
    pull = one(actions, events.StartPull)
    assert (pull.session, pull.message, pull.source_classes) == (MOVER, message, (PAGE,) * 3)
    assert pull.stretches == (events.Stretch(0, 3, 0, 0, 0),)
    report = one(script.finish(pull, stored_max=PAGE - 7), events.CallMaster)
    assert isinstance(report.message, Sealed)
    assert (report.message.segment, report.message.keys) == (NVME, message.keys)
    answer = one(script.note(report, bytes(3)), events.AnswerIngest)
    assert answer == events.AnswerIngest(request, MOVER, bytes(3), PAGE - 7)
    for segment in (SEGMENT, NVME):
        assert script.chunk(0, segment).states.count(RecordState.SEALED) == 3


def test_a_move_up_names_the_class_of_each_source() -> None:
    script = filled()
    script.put(move((0, PAGE), 6, (0, PAGE)), MOVER)
    script.put(move((CHUNK,), 6, (2 * PAGE,), first_key=3), MOVER)
    free = one(script.command(order(FreeExtents, THREE, 6))[1], events.WriteFree)
    script.feed(events.WorkEnded(free.work, bytes(3)))
    pull = script.start(move(THREE, 7, (0, PAGE, CHUNK), source_counter=6, up=True), MOVER)
    assert (pull.message.segment, pull.source_classes) == (SEGMENT, (PAGE,) * 3)


def test_pages_may_lie_in_a_smaller_class_where_they_are_encoded() -> None:
    script = Script(nvme=True).serve()
    script.put(ingest((0,), 5, size=3 * PAGE))
    down = msgspec.structs.replace(move((0,), 6, (0,)), part_bytes=3 * PAGE)
    for counter, size_class in enumerate((PAGE, 2 * PAGE, 3 * PAGE), 6):
        message = msgspec.structs.replace(
            down, size_class=size_class, generation=generation(counter)
        )
        pull = script.start(message, MOVER)
        assert (pull.size_class, pull.source_classes) == (size_class, (3 * PAGE,))
        script.finish(pull, bytes((Outcome.TOO_BIG,)), stored_max=3 * PAGE)
        answer = one(script.ask(message, MOVER)[1], events.AnswerIngest)
        assert answer.outcomes == bytes((Outcome.TOO_BIG,))  # so does a repeated one


@pytest.mark.parametrize(
    ("segment", "size_class", "part_bytes"),
    [
        (SEGMENT, PAGE, 2 * PAGE),  # in memory parts lie as they are
        (SEGMENT, 2 * PAGE, PAGE),
        (NVME, 2 * PAGE, PAGE),  # no form is larger than the part
        (NVME, PAGE + 8, 2 * PAGE),
        (NVME, 0, PAGE),
        (NVME, PAGE, 0),
        (NVME, PAGE, CHUNK + 1),
    ],
)
def test_a_class_that_parts_cannot_have_is_refused(
    segment: str, size_class: int, part_bytes: int
) -> None:
    script = Script(nvme=True).serve()
    message = msgspec.structs.replace(
        ingest((0,), 5), segment=segment, size_class=size_class, part_bytes=part_bytes
    )
    refusal = one(script.ask(message)[1], events.RefuseIngest)
    assert refusal.code == "bad_value"
    assert "size_class" in refusal.text or "part_bytes" in refusal.text


# What lies at the source -> outcome of its page.
SOURCES = {
    "nothing": Outcome.SOURCE_LOST,
    "another generation": Outcome.SOURCE_LOST,
    "another page": Outcome.SOURCE_LOST,
    "another life": Outcome.SOURCE_LOST,
    "a stranger": Outcome.SOURCE_LOST,
    "between extents": Outcome.SOURCE_LOST,
    "beyond the segment": Outcome.SOURCE_LOST,
    "removed": Outcome.SOURCE_LOST,
    "freed": Outcome.SOURCE_LOST,
}


@pytest.mark.parametrize("what", SOURCES)
def test_a_source_that_is_not_there_costs_its_page_alone(what: str) -> None:
    script = filled()
    message = move((0, PAGE), 6, (0, PAGE))
    source = message.source
    assert isinstance(source, ExtentSource)
    match what:
        case "nothing":
            source = msgspec.structs.replace(source, offsets=packed((0, 9 * PAGE)))
        case "another generation":
            generations = packed((generation(5), generation(4)))
            source = msgspec.structs.replace(source, generations=generations)
        case "another page":
            source = msgspec.structs.replace(source, offsets=packed((0, 2 * PAGE)))
        case "another life":
            source = msgspec.structs.replace(source, incarnation=INCARNATION + 1)
        case "a stranger":
            source = msgspec.structs.replace(source, segment="elsewhere")
        case "between extents":
            source = msgspec.structs.replace(source, offsets=packed((0, PAGE + 8)))
        case "beyond the segment":
            source = msgspec.structs.replace(source, offsets=packed((0, 1 << 40)))
        case "removed" | "freed":
            kind = RetireExtents if what == "removed" else FreeExtents
            work = script.command(order(kind, (PAGE,), 5))[1][0]
            assert isinstance(work, events.WriteFree | events.WriteRemoved)
            script.feed(events.WorkEnded(work.work, bytes(1)))
    message = msgspec.structs.replace(message, source=source)
    if what in {"another life", "a stranger"}:
        answer = one(script.ask(message, MOVER)[1], events.AnswerIngest)
        assert answer.outcomes == bytes((SOURCES[what],)) * 2
        return
    pull = script.start(message, MOVER)
    assert (pull.stretches, pull.source_classes) == ((events.Stretch(0, 1, 0, 0, 0),), (PAGE, 0))
    report = one(script.finish(pull), events.CallMaster)
    answer = one(script.note(report, bytes(1)), events.AnswerIngest)
    assert answer.outcomes == bytes((Outcome.OK, SOURCES[what]))


def test_what_has_arrived_needs_its_source_no_more() -> None:
    script = filled()
    message = move(THREE, 6, THREE)
    script.put(message, MOVER)
    free = one(script.command(order(FreeExtents, THREE, 5))[1], events.WriteFree)
    script.feed(events.WorkEnded(free.work, bytes(3)))
    again = one(script.ask(message, MOVER)[1], events.CallMaster)
    assert one(script.note(again, bytes(3)), events.AnswerIngest).outcomes == bytes(3)


@pytest.mark.parametrize("kind", [FenceExtents, FreeExtents, RetireExtents, CheckExtents])
def test_a_command_on_a_source_waits_for_the_end_of_the_move(kind: type[ExtentCommand]) -> None:
    script = filled()
    pull = script.start(move((0,), 6, (PAGE,), first_key=2), MOVER)
    number, actions = script.command(order(kind, (PAGE,), 5))
    assert actions == []
    assert script.chunk(PAGE).states[1] == RecordState.SEALED
    actions = script.finish(pull)
    (work,) = (a for a in actions if not isinstance(a, events.CallMaster))
    assert isinstance(work, events.WriteFree | events.WriteRemoved | events.VerifyPayloads)
    answer = one(script.feed(events.WorkEnded(work.work, bytes(1))), events.AnswerCommand)
    assert answer == events.AnswerCommand(number, ExtentsConfirmed(EPOCH, bytes(1)))


def test_a_fence_of_the_target_ends_the_move_and_leaves_the_source() -> None:
    script = filled()
    pull = script.start(move((0,), 6, (0,)), MOVER)
    _, actions = script.command(order(FenceExtents, (0,), 6, NVME))
    assert one(actions, events.CancelPull).pull == pull.pull
    actions = script.finish(pull, bytes((Outcome.FENCED,)))
    assert kinds(actions) == ["AnswerIngest", "WriteFree"]
    assert script.chunk().states[0] == RecordState.SEALED
    assert not any(script.chunk().works)


def test_two_moves_of_one_source_take_turns() -> None:
    script = filled()
    first = script.start(move((0,), 6, (0,)), MOVER)
    second, actions = script.ask(move((PAGE,), 7, (0,)), MOVER)
    assert actions == []
    assert one(script.finish(first), events.StartPull).request == second


def test_the_end_of_the_link_ends_moves_and_forgets_those_that_wait() -> None:
    script = filled()
    pull = script.start(move((0,), 6, (0,)), MOVER)
    script.ask(move((0,), 7, (0,)), MOVER)
    client = script.start(ingest((9 * PAGE,), 6))
    assert script.feed(events.LinkClosed()) == [events.CancelPull(pull.pull)]
    assert not script.state.pulls.waiting
    script.finish(pull, bytes((Outcome.FENCED,)))
    assert list(script.state.pulls.running) == [client.pull]


def test_a_move_waits_while_the_inventory_is_offered() -> None:
    script = filled()
    script.state.membership.unanswered.add(NVME)
    assert script.ask(move((0,), 6, (0,)), MOVER)[1] == []


def copy(
    offsets: tuple[int, ...], counter: int, source: tuple[int, ...], segment: str = "elsewhere"
) -> Ingest:
    """The leader's request to copy pages from another worker."""
    address = Address("tcp", "127.0.0.1:2", 10)
    ref = SegmentRef(segment, INCARNATION, "dram", GEOMETRY, "v", "host", (address,))
    generations = packed([generation(5)] * len(source))
    peer = PeerSource(ref, packed(source), generations)
    return msgspec.structs.replace(ingest(offsets, counter), source=peer)


def test_a_copy_from_another_worker_asks_nothing_of_what_lies_here() -> None:
    script = filled()
    message = copy((4 * PAGE, 5 * PAGE), 6, (0, PAGE))
    request, actions = script.ask(message, MOVER)
    pull = one(actions, events.StartPull)
    assert (pull.session, pull.message, pull.source_classes) == (MOVER, message, ())
    check = one(script.command(order(CheckExtents, (0,), 5))[1], events.VerifyPayloads)
    script.feed(events.WorkEnded(check.work, bytes(1)))
    report = one(script.finish(pull, bytes((0, Outcome.SOURCE_LOST))), events.CallMaster)
    answer = one(script.note(report, bytes(1)), events.AnswerIngest)
    assert answer == events.AnswerIngest(request, MOVER, bytes((0, Outcome.SOURCE_LOST)))


def test_a_fence_or_the_end_of_the_link_ends_a_copy() -> None:
    script = filled()
    fenced = script.start(copy((4 * PAGE,), 6, (0,)), MOVER)
    _, actions = script.command(order(FenceExtents, (4 * PAGE,), 6))
    assert one(actions, events.CancelPull).pull == fenced.pull
    script.finish(fenced, bytes((Outcome.FENCED,)))
    left = script.start(copy((5 * PAGE,), 6, (0,)), MOVER)
    assert script.feed(events.LinkClosed()) == [events.CancelPull(left.pull)]


BAD: dict[str, tuple[Ingest, int]] = {
    "a leader names a buffer": (ingest((0,), 6), MOVER),
    "a client names extents": (move((0,), 6, (0,)), 1),
    "an offset too few": (move(THREE, 6, THREE[:2]), MOVER),
    "a source twice": (move((0, PAGE), 6, (0, 0)), MOVER),
    "a client names another worker": (copy((4 * PAGE,), 6, (0,)), 1),
    "another worker's offset too few": (copy((4 * PAGE, 5 * PAGE), 6, (0,)), MOVER),
    "another worker's extent twice": (copy((4 * PAGE, 5 * PAGE), 6, (0, 0)), MOVER),
    "a copy of this worker": (copy((4 * PAGE,), 6, (0,), SEGMENT), MOVER),
}


@pytest.mark.parametrize("case", BAD)
def test_a_source_that_cannot_be_is_refused(case: str) -> None:
    message, session = BAD[case]
    script = filled()
    answer = one(script.ask(message, session)[1], events.RefuseIngest)
    assert (answer.code, answer.session) == ("bad_value", session)
    assert not script.state.holdings.works
