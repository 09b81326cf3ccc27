"""Rounds through sealed extents: what is verified when, what is a finding, and who hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import (
    CheckExtents,
    FreeExtents,
    HeartbeatNoted,
    ReportDamage,
    RetireExtents,
)
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
    move,
    one,
    packed,
)
from workers import events, rounds
from workers.events import CallMaster, Scrubbed, ScrubExtents, WriteFree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.wire.messages.base import Message
    from workers.events import Action
    from workers.rounds import Round

RATE = CHUNK
"""A chunk a second: four pages a look, 16 looks a round."""
LOOK_S = 0.25
LOOKS = GEOMETRY.payload_bytes // CHUNK * 4
BAD = Outcome.CHECKSUM
COUNTER = 5


def scrubbing(*, nvme: bool = False, rate: int = RATE) -> Script:
    """A worker that serves and verifies."""
    return Script(nvme=nvme, scrub_bytes_per_s=rate).serve()


def aged(*offsets: int) -> Script:
    """One with these pages, which the first of its rounds has left out as just sealed."""
    script = scrubbing()
    script.seal(offsets, COUNTER)
    through(script)
    return script


def places(look: ScrubExtents) -> list[int]:
    """The offsets that are looked at."""
    size_class = look.extents.size_class
    return [s.offset + i * size_class for s in look.extents.stretches for i in range(s.count)]


def looks(actions: Iterable[Action]) -> list[ScrubExtents]:
    """The looks among these actions."""
    return [each for each in actions if isinstance(each, ScrubExtents)]


def turn(script: Script, outcome: Outcome = Outcome.OK) -> list[tuple[str, int]]:
    """Let the time of a look pass, with heartbeats; what was verified, with this outcome."""
    found: list[tuple[str, int]] = []
    script.now += LOOK_S
    actions = script.feed(events.Tick())
    for beat in (each for each in actions if isinstance(each, CallMaster)):
        if not isinstance(beat.message, ReportDamage):
            script.feed(events.MasterAnswered(beat.call, HeartbeatNoted(EPOCH, True)))
    for look in looks(actions):
        found += [(look.extents.segment, place) for place in places(look)]
        script.feed(Scrubbed(look.look, bytes((outcome,)) * look.extents.count))
    return found


def through(script: Script) -> list[int]:
    """The time of one round; the places in SEGMENT that were verified, in order."""
    found = [place for _ in range(LOOKS) for place in turn(script)]
    return [offset for segment, offset in found if segment == SEGMENT]


def begun(script: Script) -> ScrubExtents:
    """The next look that finds something, not ended."""
    for _ in range(LOOKS):
        script.now += LOOK_S
        actions = script.feed(events.Tick())
        if looks(actions):
            return one(actions, ScrubExtents)
    raise AssertionError("nothing is looked at")


def reports(actions: Iterable[Action]) -> list[CallMaster]:
    """The reports of damage among these actions."""
    calls = (each for each in actions if isinstance(each, CallMaster))
    return [call for call in calls if isinstance(call.message, ReportDamage)]


def found_bad(script: Script) -> CallMaster:
    """All pages of the next look turn out to be bad: the report."""
    look = begun(script)
    (call,) = reports(script.feed(Scrubbed(look.look, bytes((BAD,)) * look.extents.count)))
    return call


def told(*offsets: int, counter: int = COUNTER) -> ReportDamage:
    """The report of these places."""
    generations = packed([generation(counter)] * len(offsets))
    return ReportDamage(SEGMENT, INCARNATION, packed(offsets), generations)


def progress(script: Script, segment: str = SEGMENT) -> Round:
    """How far the rounds have come."""
    return script.state.rounds.by_segment[segment]


# --- what is verified, and when -----------------------------------------------------------------


def test_every_page_has_its_turn_in_order_and_again_in_each_round() -> None:
    pages = (0, PAGE, 5 * PAGE, CHUNK, 3 * CHUNK + 15 * PAGE)
    script = aged(*pages)
    assert [through(script) for _ in range(3)] == [list(pages)] * 3
    assert progress(script).ended == 4
    assert (progress(script).extents, progress(script).bytes) == (15, 15 * PAGE)


def test_pages_of_every_class_have_their_turn() -> None:
    script = scrubbing()
    script.put(ingest((0, 3 * PAGE), COUNTER, size=3 * PAGE))
    script.put(ingest((CHUNK,), COUNTER, size=CHUNK, first_key=5))
    through(script)
    assert through(script) == [0, 3 * PAGE, CHUNK]


@pytest.mark.parametrize("looks_a_chunk", [1, 3, 4, 7, 8, 16, 40])
@pytest.mark.parametrize("pages_a_frame", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("size", [PAGE, 3 * PAGE, 5 * PAGE, 7 * PAGE, 9 * PAGE, 15 * PAGE])
def test_each_page_has_its_turn_wherever_chunks_and_looks_end(
    size: int, pages_a_frame: int, looks_a_chunk: int
) -> None:
    """Most sizes do not divide a chunk: looks may begin behind its last page, and end there."""
    script = scrubbing(rate=int(CHUNK / looks_a_chunk / LOOK_S))
    slots = [i * size for i in range(min(pages_a_frame, CHUNK // size))]
    pages = [chunk + slot for chunk in (0, 2 * CHUNK) for slot in slots]
    for counter, chunk in enumerate((0, 2 * CHUNK), COUNTER):
        message = ingest([chunk + slot for slot in slots], counter, size=size, first_key=counter)
        script.put(message)
    found: list[list[int]] = [[], [], []]
    while (ended := progress(script).ended) < 3:
        found[ended] += [place for _, place in turn(script)]
    assert found == [[], pages, pages]


def test_what_a_seal_or_a_check_has_verified_is_left_out_once() -> None:
    script = scrubbing()
    script.seal((0, PAGE), COUNTER)
    assert through(script) == []
    assert through(script) == [0, PAGE]
    row = packed((0,)), packed((generation(COUNTER),))
    check = one(
        script.command(CheckExtents(EPOCH, SEGMENT, INCARNATION, PAGE, *row))[1],
        events.VerifyPayloads,
    )
    script.feed(events.WorkEnded(check.work, bytes((Outcome.OK,))))
    assert through(script) == [PAGE]
    assert through(script) == [0, PAGE]


def test_a_check_that_found_nothing_out_leaves_the_page_to_the_round() -> None:
    script = aged(0)
    row = packed((0,)), packed((generation(COUNTER),))
    check = one(
        script.command(CheckExtents(EPOCH, SEGMENT, INCARNATION, PAGE, *row))[1],
        events.VerifyPayloads,
    )
    script.feed(events.WorkEnded(check.work, bytes((Outcome.TRANSPORT,))))
    assert through(script) == [0]


def test_the_pace_is_kept_whatever_lies_there() -> None:
    script = scrubbing()
    began_s = script.now
    for _ in range(5):
        assert through(script) == []
    assert progress(script).ended == 5
    assert script.now - began_s == 5 * GEOMETRY.payload_bytes / RATE


def test_one_look_a_segment_is_under_way_and_late_ones_are_not_made_up_for() -> None:
    script = aged(*(i * PAGE for i in range(8)))
    look = begun(script)
    assert places(look) == [0, PAGE, 2 * PAGE, 3 * PAGE]
    script.now += 60.0
    assert looks(script.feed(events.Tick())) == []
    script.feed(Scrubbed(look.look, bytes(4)))
    (late,) = looks(script.feed(events.Tick()))
    assert places(late) == [i * PAGE for i in range(4, 8)]
    script.feed(Scrubbed(late.look, bytes(4)))
    assert looks(script.feed(events.Tick())) == []


def test_a_look_is_small_however_high_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "LOOK_EXTENTS_MAX", 3)
    script = scrubbing(rate=1 << 40)
    script.seal([i * PAGE for i in range(8)], COUNTER)
    while not progress(script).ended:
        turn(script)
    found = [turn(script) for _ in range(3)]
    assert [len(each) for each in found] == [3, 3, 2]
    assert [place for each in found for _, place in each] == [i * PAGE for i in range(8)]


def test_segments_go_round_by_themselves_and_a_failed_one_not_at_all() -> None:
    script = scrubbing(nvme=True)
    script.seal((0,), COUNTER)
    down = script.start(move((0,), 6, (0,)), session=events.MOVER)
    script.note(one(script.finish(down), CallMaster), bytes(1))
    through(script)
    assert set(turn(script)) == {(SEGMENT, 0), (NVME, 0)}
    script.feed(events.MediumChanged(NVME, "failed", "EIO"))
    ended = progress(script, NVME).ended
    assert through(script) == [0]
    assert progress(script, NVME).ended == ended


def test_a_pace_of_zero_verifies_nothing() -> None:
    script = scrubbing(rate=0)
    script.seal((0,), COUNTER)
    assert [through(script) for _ in range(3)] == [[], [], []]
    assert progress(script).ended == 0
    assert script.state.rounds.next_wakeup() == float("inf")


def test_a_tick_is_wanted_when_a_look_is_due() -> None:
    script = aged(0)
    look = begun(script)
    assert script.state.rounds.next_wakeup() == float("inf")
    script.feed(Scrubbed(look.look, bytes(1)))
    assert script.state.rounds.next_wakeup() == script.now + LOOK_S
    assert script.state.next_wakeup() <= script.now + LOOK_S


def test_no_page_was_verified_before_the_oldest_of_three_rounds_began() -> None:
    script = Script(scrub_bytes_per_s=RATE)
    assert progress(script).unverified_s(script.now) == 0.0
    script.serve()
    turn(script)
    verified_s: dict[int, float] = {}
    for step in range(6 * LOOKS):
        if step % 7 == 0 and (offset := step // 7 * 4 * PAGE) < GEOMETRY.payload_bytes:
            script.seal((offset,), COUNTER)
            verified_s[offset] = script.now
        for _, place in turn(script):
            verified_s[place] = script.now
        oldest_s = script.now - min(verified_s.values())
        assert oldest_s <= progress(script).unverified_s(script.now)
    assert progress(script).unverified_s(script.now) <= 3 * GEOMETRY.payload_bytes / RATE


# --- what is a finding --------------------------------------------------------------------------


def test_damage_is_told_at_once() -> None:
    script = aged(0, PAGE, 2 * PAGE)
    look = begun(script)
    (call,) = reports(script.feed(Scrubbed(look.look, bytes((0, BAD, Outcome.TRANSPORT)))))
    assert call.message == told(PAGE)
    assert (progress(script).damaged, progress(script).extents) == (1, 2)


def freed(script: Script) -> None:
    """The page at 0 is freed."""
    row = packed((0,)), packed((generation(COUNTER),))
    message = FreeExtents(EPOCH, SEGMENT, INCARNATION, PAGE, *row)
    work = one(script.command(message)[1], WriteFree)
    script.feed(events.WorkEnded(work.work, bytes(1)))


def being_freed(script: Script) -> None:
    """The worker writes the record FREE; it was not waited for the look."""
    row = packed((0,)), packed((generation(COUNTER),))
    message = FreeExtents(EPOCH, SEGMENT, INCARNATION, PAGE, *row)
    one(script.command(message)[1], WriteFree)


def removed(script: Script) -> None:
    """The page at 0 is removed."""
    row = packed((0,)), packed((generation(COUNTER),))
    message = RetireExtents(EPOCH, SEGMENT, INCARNATION, PAGE, *row)
    work = one(script.command(message)[1], events.WriteRemoved)
    script.feed(events.WorkEnded(work.work, bytes(1)))


def filled_anew(script: Script) -> None:
    """Another page lies there by now."""
    freed(script)
    script.seal((0,), COUNTER + 1, first_key=9)


def cut_anew(script: Script) -> None:
    """Extents of another class lie there by now."""
    freed(script)
    script.put(ingest((0,), COUNTER + 1, size=3 * PAGE, first_key=9))


@pytest.mark.parametrize("change", [freed, being_freed, removed, filled_anew, cut_anew])
def test_what_changes_meanwhile_is_no_finding(change: object) -> None:
    script = aged(0)
    look = begun(script)
    assert callable(change)
    change(script)
    assert reports(script.feed(Scrubbed(look.look, bytes((BAD,))))) == []
    assert not script.state.rounds.damaged
    assert progress(script).damaged == 0


def test_what_is_found_again_is_counted_once() -> None:
    script = aged(0)
    found_bad(script)
    look = begun(script)
    assert reports(script.feed(Scrubbed(look.look, bytes((BAD,))))) == []
    assert progress(script).damaged == 1


def test_findings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "DAMAGED_MAX", 2)
    script = aged(0, PAGE, 2 * PAGE)
    assert found_bad(script).message == told(0, PAGE)  # I7
    assert progress(script).damaged == 3


# --- who hears of it ----------------------------------------------------------------------------


def heard(script: Script) -> list[Message]:
    """What is told with the next heartbeats, unanswered."""
    script.now += 2 * LOOK_S
    return [call.message for call in reports(script.feed(events.Tick()))]


def test_a_report_is_repeated_until_it_is_answered() -> None:
    script = aged(0)
    call = found_bad(script)
    assert heard(script) == []  # it is under way
    script.feed(events.MasterAnswered(call.call, Failure("unavailable", "in doubt")))
    script.now += 2 * LOOK_S
    (again,) = reports(script.feed(events.Tick()))
    assert again.message == told(0)
    script.feed(events.MasterAnswered(again.call, Done()))
    assert heard(script) == []


def test_what_is_freed_is_not_told_any_more() -> None:
    script = aged(0)
    call = found_bad(script)
    freed(script)
    script.feed(events.MasterAnswered(call.call, None))
    assert heard(script) == []
    assert not script.state.rounds.damaged


def test_the_next_leader_hears_of_what_lies_there_still() -> None:
    script = aged(0)
    call = found_bad(script)
    script.feed(events.MasterAnswered(call.call, Done()))
    script.feed(events.LinkClosed())
    opened = script.feed(events.LinkOpened())
    assert reports(opened) == []
    script.feed(events.LinkClosed())
    script.serve(EPOCH + 1)
    under_way = script.state.rounds.calls.values()
    assert [each.offset for found in under_way for each in found] == [0]


def test_what_is_found_without_a_leader_waits_for_one() -> None:
    script = aged(0)
    script.feed(events.LinkClosed())
    look = begun(script)
    assert script.feed(Scrubbed(look.look, bytes((BAD,)))) == []
    script.serve(EPOCH + 1)
    assert len(script.state.rounds.calls) == 1
