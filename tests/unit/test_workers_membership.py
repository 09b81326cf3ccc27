"""Registration, inventory, heartbeats, epochs and the self-fence, without a clock."""

from __future__ import annotations

import math

import pytest

from kvstore.record import RecordState, chunk_digest
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import (
    ChunkDigest,
    FenceExtents,
    Heartbeat,
    HeartbeatNoted,
    InventoryEnd,
    InventoryWanted,
    OfferInventory,
    RegisterWorker,
    ReportSegment,
    SegmentOffer,
    WorkerAccepted,
)
from tests.unit.worker_scripts import (
    BEAT_S,
    CHUNK,
    EPOCH,
    GEOMETRY,
    INCARNATION,
    LOST_AFTER_S,
    NVME,
    PAGE,
    SEGMENT,
    Script,
    generation,
    ingest,
    kinds,
    one,
    packed,
    registration_reply,
)
from workers import events

ACCEPTED = WorkerAccepted(EPOCH, BEAT_S, LOST_AFTER_S)
FENCED = bytes((Outcome.FENCED,))


def registering(script: Script, reply: WorkerAccepted | Failure | None) -> list[events.Action]:
    """A link opens and the registration is answered so."""
    call = one(script.feed(events.LinkOpened()), events.CallMaster)
    return script.feed(events.MasterAnswered(call.call, reply))


def test_registration_offers_segments_and_then_the_inventory() -> None:
    script = Script()
    call = one(script.feed(events.LinkOpened()), events.CallMaster)
    address = Address("tcp", "127.0.0.1:1", 10)
    offer = SegmentOffer(SEGMENT, INCARNATION, "dram", GEOMETRY)
    assert call.message == RegisterWorker("w", "host", (address,), (offer,), 0, "r1", "z1")
    call = one(script.feed(events.MasterAnswered(call.call, ACCEPTED)), events.CallMaster)
    assert call.message == OfferInventory(SEGMENT, INCARNATION, ())
    wanted = InventoryWanted(())
    call = one(script.feed(events.MasterAnswered(call.call, wanted)), events.CallMaster)
    assert call.message == InventoryEnd(SEGMENT, INCARNATION)
    assert not script.state.is_serving
    assert script.feed(events.MasterAnswered(call.call, Done())) == []
    assert script.state.is_serving


def named_epoch(script: Script) -> int:
    """That of a registration."""
    call = one(script.feed(events.LinkOpened()), events.CallMaster)
    assert isinstance(call.message, RegisterWorker)
    return call.message.epoch


def test_registration_names_the_highest_epoch_of_leaders_and_records() -> None:
    script = Script()
    script.serve().seal((0,), 5)
    assert named_epoch(script) == EPOCH
    script.serve(EPOCH + 2)
    assert named_epoch(script) == EPOCH + 2
    generations = script.table.chunks[0].generations
    generations[0] = generation(1, EPOCH + 3)  # as found by a worker that met nobody since
    assert named_epoch(script) == EPOCH + 3


def test_the_inventory_is_a_digest_a_chunk_and_rows_of_those_wanted() -> None:
    script = Script().serve()
    script.seal((0, 2 * PAGE, CHUNK), 5)
    offer = one(registering(script, ACCEPTED), events.CallMaster)
    sealed = RecordState.SEALED
    rows = [(0, sealed, generation(5)), (2, sealed, generation(5))]
    assert offer.message == OfferInventory(
        SEGMENT,
        INCARNATION,
        (
            ChunkDigest(0, PAGE, chunk_digest(rows)),
            ChunkDigest(CHUNK, PAGE, chunk_digest([(0, sealed, generation(5))])),
        ),
    )
    # A chunk that the master does not know of any more is no reason to stumble.
    wanted = InventoryWanted((0, CHUNK, 3 * CHUNK))
    sent = []
    actions = script.feed(events.MasterAnswered(offer.call, wanted))
    while kinds(actions) == ["SendRows"]:
        rows_action = one(actions, events.SendRows)
        sent.append((rows_action.segment, rows_action.chunk_start, rows_action.size_class))
        slots = (0, 2) if rows_action.chunk_start == 0 else (0,)
        assert rows_action.listed == tuple(
            events.Listed(slot, sealed, generation(5)) for slot in slots
        )
        actions = script.feed(events.MasterAnswered(rows_action.call, Done()))
    assert sorted(sent) == [(SEGMENT, 0, PAGE), (SEGMENT, CHUNK, PAGE)]
    assert isinstance(one(actions, events.CallMaster).message, InventoryEnd)


def test_no_pull_runs_from_before_the_offer_until_its_answer() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    actions = registering(script, ACCEPTED)
    assert actions == [events.CancelPull(pull.pull)]  # nothing is offered yet
    assert script.ask(ingest((PAGE,), 6))[1] == []
    actions = script.finish(pull, FENCED)
    assert kinds(actions) == ["AnswerIngest", "CallMaster"]
    offer = one(actions, events.CallMaster)
    assert isinstance(offer.message, OfferInventory)
    assert script.ask(ingest((2 * PAGE,), 7))[1] == []
    actions = script.feed(events.MasterAnswered(offer.call, InventoryWanted(())))
    assert kinds(actions) == ["CallMaster", "StartPull", "StartPull"]


def test_extents_that_readers_held_are_counted_anew_after_a_registration() -> None:
    script = Script().serve()
    script.seal((0,), 5)
    fence = FenceExtents(EPOCH, SEGMENT, INCARNATION, PAGE, packed((0,)), packed((generation(5),)))
    work = one(script.command(fence)[1], events.WriteFree)
    script.feed(events.WorkEnded(work.work, bytes((Outcome.BUSY,))))
    assert len(script.state.holdings.held) == 1
    script.serve()  # nothing lies there any more: the leader has nothing to ask
    assert not script.state.holdings.held


def test_a_lost_link_lets_the_waiting_requests_go_on() -> None:
    script = Script().serve()
    registering(script, ACCEPTED)
    assert script.ask(ingest((0,), 5))[1] == []
    assert kinds(script.feed(events.LinkClosed())) == ["StartPull"]


def test_a_new_leader_ends_what_runs_for_the_old() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    assert script.ask(ingest((0,), 6), session=2)[1] == []
    higher = WorkerAccepted(EPOCH + 1, BEAT_S, LOST_AFTER_S)
    assert kinds(registering(script, higher)) == ["CancelPull"]
    assert script.state.epoch == EPOCH + 1
    actions = script.finish(pull, FENCED)
    answers = [each for each in actions if isinstance(each, events.AnswerIngest)]
    assert [each.outcomes for each in answers] == [FENCED, FENCED]  # I10: also who waited


@pytest.mark.parametrize(
    "reply",
    [
        None,
        Failure("access_denied", "no"),
        WorkerAccepted(EPOCH - 1, BEAT_S, LOST_AFTER_S),
    ],
)
def test_a_registration_that_fails_ends_the_link(reply: WorkerAccepted | Failure | None) -> None:
    script = Script().serve()
    assert kinds(registering(script, reply)) == ["CloseLink"]
    assert script.state.epoch == EPOCH


@pytest.mark.parametrize("reply", [None, Failure("unavailable", "no"), Done()])
def test_an_offer_that_is_not_answered_ends_the_link(reply: Failure | Done | None) -> None:
    script = Script()
    offer = one(registering(script, ACCEPTED), events.CallMaster)
    assert kinds(script.feed(events.MasterAnswered(offer.call, reply))) == ["CloseLink"]


def test_nothing_is_pulled_before_a_leader_is_heard() -> None:
    script = Script()
    assert script.state.is_fenced(script.now)
    assert one(script.ask(ingest((0,), 5))[1], events.AnswerIngest).outcomes == FENCED


def test_a_heartbeat_says_what_is_held() -> None:
    script = Script().serve()
    script.state.holdings.held.add((SEGMENT, 8 * PAGE))
    assert script.state.next_wakeup() == script.now + BEAT_S
    assert script.feed(events.Tick()) == []
    script.now += BEAT_S
    call = one(script.feed(events.Tick()), events.CallMaster)
    assert call.message == Heartbeat("w", EPOCH, 1)
    assert script.feed(events.Tick()) == []  # one a beat
    assert script.feed(events.MasterAnswered(call.call, HeartbeatNoted(EPOCH, True))) == []


def test_silence_of_half_the_time_fences_the_worker_itself() -> None:
    script = Script().serve()
    pull = script.start(ingest((0,), 5))
    assert script.ask(ingest((0,), 6), session=2)[1] == []
    script.now += LOST_AFTER_S / 2 - 0.01
    assert "CancelPull" not in kinds(script.feed(events.Tick()))
    assert not script.state.is_fenced(script.now)
    script.now += 0.01
    actions = script.feed(events.Tick())
    assert one(actions, events.CancelPull).pull == pull.pull
    assert one(actions, events.AnswerIngest).outcomes == FENCED  # the one that waited
    assert one(script.ask(ingest((PAGE,), 7))[1], events.AnswerIngest).outcomes == FENCED
    script.finish(pull, FENCED)


def test_contact_counts_from_when_the_answered_beat_was_sent() -> None:
    script = Script().serve()
    script.now += BEAT_S
    call = one(script.feed(events.Tick()), events.CallMaster)
    script.now += LOST_AFTER_S  # the worker was paused; the answer lay in its socket
    script.feed(events.MasterAnswered(call.call, HeartbeatNoted(EPOCH, True)))
    assert script.state.is_fenced(script.now)
    script.beat()
    assert script.state.is_fenced(script.now) is False
    assert script.start(ingest((0,), 5)).stretches


def test_beats_keep_the_fence_away_and_silence_ends_the_link() -> None:
    script = Script().serve()
    for _ in range(20):
        script.beat()
        assert not script.state.is_fenced(script.now)
    script.now += BEAT_S
    call = one(script.feed(events.Tick()), events.CallMaster)
    assert script.feed(events.MasterAnswered(call.call, None)) == []  # not yet
    script.now += LOST_AFTER_S
    call = one(script.feed(events.Tick()), events.CallMaster)
    assert kinds(script.feed(events.MasterAnswered(call.call, None))) == ["CloseLink"]


@pytest.mark.parametrize("reply", [HeartbeatNoted(EPOCH, False), HeartbeatNoted(EPOCH + 1, True)])
def test_a_leader_that_does_not_know_us_is_registered_with_again(reply: HeartbeatNoted) -> None:
    script = Script().serve()
    script.now += BEAT_S
    call = one(script.feed(events.Tick()), events.CallMaster)
    again = one(script.feed(events.MasterAnswered(call.call, reply)), events.CallMaster)
    assert isinstance(again.message, RegisterWorker)


def test_a_leader_of_an_older_epoch_is_left() -> None:
    script = Script().serve()
    script.now += BEAT_S
    call = one(script.feed(events.Tick()), events.CallMaster)
    old = HeartbeatNoted(EPOCH - 1, True)
    assert kinds(script.feed(events.MasterAnswered(call.call, old))) == ["CloseLink"]


def test_answers_of_a_link_that_is_gone_are_not_listened_to() -> None:
    script = Script()
    call = one(script.feed(events.LinkOpened()), events.CallMaster)
    script.feed(events.LinkClosed())
    assert script.feed(events.MasterAnswered(call.call, ACCEPTED)) == []
    assert script.state.epoch == 0
    assert script.state.next_wakeup() == math.inf


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_a_request_of_another_epoch_is_refused(epoch: int) -> None:
    script = Script().serve()
    assert one(script.ask(ingest((0,), 5, epoch=epoch))[1], events.AnswerIngest).outcomes == FENCED
    assert script.state.epoch == EPOCH  # a client cannot raise it


def calls(actions: list[events.Action]) -> list[events.CallMaster]:
    return [each for each in actions if isinstance(each, events.CallMaster)]


def offered(call: events.CallMaster) -> str:
    """The segment whose inventory is offered; empty for other calls."""
    return call.message.segment if isinstance(call.message, OfferInventory) else ""


def reports(actions: list[events.Action]) -> list[ReportSegment]:
    messages = [each.message for each in calls(actions)]
    return [message for message in messages if isinstance(message, ReportSegment)]


def test_a_medium_that_does_less_is_told_at_once() -> None:
    script = Script(nvme=True).serve()
    call = one(script.feed(events.MediumChanged(NVME, "read_only", "EROFS")), events.CallMaster)
    assert call.message == ReportSegment(NVME, INCARNATION, "read_only", "EROFS")
    assert script.feed(events.MasterAnswered(call.call, Done())) == []
    worse = script.feed(events.MediumChanged(NVME, "failed", "EIO"))
    assert reports(worse) == [ReportSegment(NVME, INCARNATION, "failed", "EIO")]


@pytest.mark.parametrize("state", ["read_only", "failed"])
@pytest.mark.parametrize("serves_first", [True, False])
def test_a_medium_is_told_of_once_its_inventory_has_ended_or_instead(
    serves_first: bool, state: str
) -> None:
    """Of a failed disk nobody could prove what it holds; an empty list would be a lie."""
    script = Script(nvme=True)
    if serves_first:
        script.serve()
        script.feed(events.LinkClosed())
    assert script.feed(events.MediumChanged(NVME, state, "EIO")) == []
    told: list[ReportSegment] = []
    ended: set[str] = set()
    actions = script.feed(events.LinkOpened())
    while asked := calls(actions):
        actions = []
        for call in asked:
            reply = registration_reply(call.message, EPOCH)
            if isinstance(call.message, InventoryEnd):
                ended.add(call.message.segment)
            if isinstance(call.message, ReportSegment):
                assert (NVME in ended) is (state == "read_only")
                told.append(call.message)
                reply = Done()
            actions += script.feed(events.MasterAnswered(call.call, reply))
    assert told == [ReportSegment(NVME, INCARNATION, state, "EIO")]
    assert (NVME in ended) is (state == "read_only")
    assert script.state.is_serving


@pytest.mark.parametrize("reply", [Failure("unavailable", "given up"), None])
def test_a_report_that_is_refused_is_let_be_and_one_without_an_answer_ends_the_link(
    reply: Failure | None,
) -> None:
    script = Script(nvme=True).serve()
    call = one(script.feed(events.MediumChanged(NVME, "failed", "EIO")), events.CallMaster)
    actions = script.feed(events.MasterAnswered(call.call, reply))
    assert kinds(actions) == ([] if reply else ["CloseLink"])


def test_a_medium_that_fails_before_its_offer_is_left_out_of_the_next_registration() -> None:
    script = Script(nvme=True)
    offers = registering(script, ACCEPTED)
    assert {type(each.message) for each in calls(offers)} == {OfferInventory}
    assert script.feed(events.MediumChanged(NVME, "failed", "EIO")) == []
    offer = next(each for each in calls(offers) if offered(each) == NVME)
    ended = script.feed(events.MasterAnswered(offer.call, Failure("unavailable", "lost")))
    assert kinds(ended) == ["CloseLink"]
    script.feed(events.LinkClosed())
    again = registering(script, ACCEPTED)
    assert [offered(each) for each in calls(again)] == ["", SEGMENT]
    assert reports(again) == [ReportSegment(NVME, INCARNATION, "failed", "EIO")]
