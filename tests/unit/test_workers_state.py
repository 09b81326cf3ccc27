"""The whole worker machine under random events: what the master may rely on always holds.

A model beside the machine knows which generations were fenced and what was acknowledged. After
every rule the machine's own invariants are checked, and the model's.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import ExtentsConfirmed, FenceExtents, FreeExtents
from kvstore.wire.messages.puts import ExtentSource, Sealed, SealedNoted
from tests.unit.worker_scripts import (
    INCARNATION,
    NVME,
    PAGE,
    SEGMENT,
    Script,
    checksum_of,
    generation,
    ingest,
    move,
    packed,
    registration_reply,
)
from workers import events
from workers.event_ring import EventRing
from workers.events import MOVER
from workers.holdings import Place

if TYPE_CHECKING:
    from workers.events import Action

SLOTS = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
COUNTERS = st.integers(1, 6)
PULL_OUTCOMES = st.sampled_from([Outcome.OK, Outcome.CHECKSUM, Outcome.SOURCE_LOST, Outcome.BUSY])


class WorkerMachine(RuleBasedStateMachine):
    """One worker; the rules play leader, clients and shell, in any order."""

    def __init__(self) -> None:
        """Begin serving in epoch 3, with a few pages that may be copied."""
        super().__init__()
        self.script = Script(nvme=True)
        self.epoch = 3
        self.pulls: dict[int, events.StartPull] = {}
        self.works: dict[int, events.WriteFree] = {}
        self.calls: dict[int, events.CallMaster] = {}
        self.commands: dict[int, FenceExtents | FreeExtents] = {}
        self.fenced: dict[tuple[str, int], int] = {}
        """Highest generation whose fence or free was confirmed, by segment and slot."""
        self.asked: set[int] = set()
        self.is_linked = False
        self.link()
        self.script.seal([slot * PAGE for slot in range(4)], 1)

    def settle(self, actions: list[Action]) -> None:
        """Keep what the shell would have to do; registration is answered at once."""
        for action in actions:
            match action:
                case events.StartPull():
                    assert action.pull not in self.pulls
                    self.pulls[action.pull] = action
                case events.WriteFree():
                    self.works[action.work] = action
                case events.CallMaster(call, message):
                    reply = registration_reply(message, self.epoch)
                    if isinstance(message, Sealed):
                        self.calls[call] = action
                    elif reply is not None:
                        self.settle(self.script.feed(events.MasterAnswered(call, reply)))
                case events.AnswerIngest(request, _, outcomes):
                    self.asked.discard(request)
                    assert set(outcomes) <= set(Outcome)
                case events.AnswerCommand(command, ExtentsConfirmed(_, outcomes)):
                    self.confirmed(self.commands.pop(command), outcomes)
                case events.CancelPull(pull):
                    assert pull in self.script.state.pulls.running or pull in self.pulls
                case _:
                    raise AssertionError(action)

    def confirmed(self, command: FenceExtents | FreeExtents, outcomes: bytes) -> None:
        """From now on the master counts on these generations being refused."""
        columns = array("Q", command.offsets), array("Q", command.generations)
        for offset, fenced, outcome in zip(*columns, outcomes, strict=True):
            if outcome == Outcome.OK:
                place = (command.segment, offset // PAGE)
                self.fenced[place] = max(self.fenced.get(place, 0), fenced)

    @rule()
    @precondition(lambda self: not self.is_linked)
    def link(self) -> None:
        """A leader is reached."""
        self.is_linked = True
        self.settle(self.script.feed(events.LinkOpened()))

    @rule(raises=st.booleans())
    @precondition(lambda self: self.is_linked)
    def unlink(self, raises: bool) -> None:
        """The leader is lost; the next one may be another."""
        self.is_linked = False
        self.epoch += raises
        self.commands.clear()
        self.forget_waiting(MOVER)
        self.settle(self.script.feed(events.LinkClosed()))

    @rule(slots=SLOTS, counter=COUNTERS, session=st.integers(1, 3), key=st.integers(1, 2))
    def ask(self, slots: list[int], counter: int, session: int, key: int) -> None:
        """A client asks for a pull, of the current epoch or an old one."""
        offsets = [slot * PAGE for slot in slots]
        message = ingest(offsets, counter, epoch=self.epoch, first_key=key)
        request = self.script.number()
        self.asked.add(request)
        self.settle(self.script.feed(events.IngestRequested(request, session, message)))

    @rule(data=st.data(), slot=st.integers(0, 7), counter=COUNTERS, is_old=st.booleans())
    @precondition(lambda self: self.is_linked and self.sealed())
    def move(self, data: st.DataObject, slot: int, counter: int, is_old: bool) -> None:
        """The leader has a page copied, which is there; or was, in a generation before."""
        segment, place, held, checksum = data.draw(st.sampled_from(self.sealed()))
        (number,) = (n for n in range(1, 7) if checksum_of(n) == checksum)
        message = move((slot * PAGE,), counter, (place,), up=segment == NVME, first_key=number)
        message = msgspec.structs.replace(
            message,
            epoch=self.epoch,
            generation=generation(counter, self.epoch),
            source=ExtentSource(segment, INCARNATION, packed((place,)), packed((held - is_old,))),
        )
        request = self.script.number()
        self.asked.add(request)
        self.settle(self.script.feed(events.IngestRequested(request, MOVER, message)))

    def sealed(self) -> list[tuple[str, int, int, int]]:
        """(segment, offset, generation, checksum) of what may be copied."""
        return [
            (table.segment, slot * PAGE, chunk.generations[slot], chunk.checksums[slot])
            for table in (self.script.table, self.script.nvme)
            if (chunk := table.chunk_around(0)) is not None
            for slot, state in enumerate(chunk.states)
            if state == RecordState.SEALED
        ]

    @rule(data=st.data())
    @precondition(lambda self: self.pulls)
    def end_pull(self, data: st.DataObject) -> None:
        """Some pull ends somehow."""
        pull = self.pulls.pop(data.draw(st.sampled_from(sorted(self.pulls))))
        pages = len(pull.message.keys) // 32
        outcomes = data.draw(st.lists(PULL_OUTCOMES, min_size=pages, max_size=pages))
        self.settle(self.script.feed(events.PullEnded(pull.pull, bytes(outcomes))))

    @rule(data=st.data())
    @precondition(lambda self: self.works)
    def end_work(self, data: st.DataObject) -> None:
        """Some free is done, with or without a reader's lock in the way."""
        work = self.works.pop(data.draw(st.sampled_from(sorted(self.works))))
        count = work.extents.count
        answers = st.sampled_from([Outcome.OK, Outcome.BUSY])
        outcomes = data.draw(st.lists(answers, min_size=count, max_size=count))
        self.settle(self.script.feed(events.WorkEnded(work.work, bytes(outcomes))))

    @rule(data=st.data())
    @precondition(lambda self: self.calls)
    def note(self, data: st.DataObject) -> None:
        """The leader answers a report, or never does."""
        call = self.calls.pop(data.draw(st.sampled_from(sorted(self.calls))))
        assert isinstance(call.message, Sealed)
        count = len(call.message.offsets) // 8
        answers = st.sampled_from([Outcome.OK, Outcome.PLAN_CLOSED, Outcome.STALE])
        outcomes = data.draw(st.none() | st.lists(answers, min_size=count, max_size=count))
        reply = None if outcomes is None else SealedNoted(bytes(outcomes))
        self.settle(self.script.feed(events.MasterAnswered(call.call, reply)))

    @rule(
        slots=SLOTS,
        counter=COUNTERS,
        kind=st.sampled_from([FenceExtents, FreeExtents]),
        segment=st.sampled_from([SEGMENT, NVME]),
    )
    @precondition(lambda self: self.is_linked)
    def command(
        self,
        slots: list[int],
        counter: int,
        kind: type[FenceExtents | FreeExtents],
        segment: str,
    ) -> None:
        """The leader fences or frees."""
        message = kind(
            self.epoch, segment, INCARNATION, PAGE, packed(slot * PAGE for slot in slots),
            packed([generation(counter, self.epoch)] * len(slots)),
        )  # fmt: skip
        number = self.script.number()
        self.commands[number] = message
        self.settle(self.script.feed(events.CommandReceived(number, message)))

    @rule(session=st.integers(1, 3))
    def leave(self, session: int) -> None:
        """A client is gone; the shell lets its pulls run out."""
        self.forget_waiting(session)
        self.settle(self.script.feed(events.SessionClosed(session)))

    def forget_waiting(self, session: int) -> None:
        """Nobody is told of these any more."""
        waiting = [r.id for r in self.script.state.pulls.waiting if r.session == session]
        self.asked -= set(waiting)

    @invariant()
    def nothing_fenced_is_pulled_or_sealed(self) -> None:
        """After a confirmation no record of that or a lower generation exists (I6)."""
        for (segment, slot), fenced in self.fenced.items():
            chunk = self.script.chunk(slot * PAGE, segment)
            if chunk.states[slot] != RecordState.FREE:
                assert chunk.generations[slot] > fenced, (slot, fenced)
            assert chunk.generations[slot] >= fenced

    @invariant()
    def running_pulls_never_overlap(self) -> None:
        """One pull an extent (I6)."""
        slots = [
            (pull.message.segment, slot)
            for pull in self.pulls.values()
            for stretch in pull.stretches
            for slot in range(stretch.slot, stretch.slot + stretch.count)
        ]
        assert len(slots) == len(set(slots))

    @invariant()
    def what_is_copied_stays(self) -> None:
        """No byte of a move's source is given to anybody else (I4)."""
        for pull in self.pulls.values():
            source = pull.message.source
            if isinstance(source, ExtentSource):
                rows = zip(
                    array("Q", source.offsets), array("Q", source.generations),
                    pull.source_classes, strict=True,
                )  # fmt: skip
                for offset, held, size_class in rows:
                    chunk = self.script.chunk(offset, source.segment)
                    found = chunk.states[offset // PAGE], chunk.generations[offset // PAGE]
                    assert not size_class or found == (RecordState.SEALED, held)

    def teardown(self) -> None:
        """Let everything end: nobody waits for ever, and nothing stays busy."""
        self.settle([])
        while self.pulls or self.works or self.calls:
            for pull in list(self.pulls):
                done = self.pulls.pop(pull)
                pages = len(done.message.keys) // 32
                self.settle(self.script.feed(events.PullEnded(pull, bytes(pages))))
            for work in list(self.works):
                count = self.works.pop(work).extents.count
                self.settle(self.script.feed(events.WorkEnded(work, bytes(count))))
            for call in list(self.calls):
                message = self.calls.pop(call).message
                assert isinstance(message, Sealed)
                reply = SealedNoted(bytes(len(message.offsets) // 8))
                self.settle(self.script.feed(events.MasterAnswered(call, reply)))
        assert not self.script.state.holdings.works
        assert not self.script.state.pulls.waiting
        assert not self.commands
        assert not self.asked


TestWorkerMachine = WorkerMachine.TestCase
TestWorkerMachine.settings = settings(max_examples=150, stateful_step_count=40)


def broken(script: Script, how: str) -> None:
    """Break one invariant behind the machine's back."""
    state, chunk = script.state, script.chunk()
    match how:
        case "a busy mark for nobody":
            chunk.works[9] = 1
        case "a pull without its mark":
            chunk.works[0] = 0
        case "a pull whose record says another state":
            chunk.states[0] = RecordState.SEALED
        case "a pull whose record says another generation":
            chunk.generations[0] += 1
        case "reserved for nobody":
            chunk.states[9] = RecordState.RESERVED
        case "a pull that no request has":
            state.pulls.running.clear()
        case "a chunk that lost its frame":
            script.table._chunk_of_frame[0] = None  # noqa: SLF001 — breaks it on purpose
        case "columns of different length":
            chunk.checksums.append(0)
        case "two works on one extent":
            (work,) = state.holdings.works.values()
            state.holdings.works[999] = msgspec.structs.replace(work, id=999)
        case "a move whose source is not sealed":
            (work,) = state.holdings.works.values()
            work.sources = (Place(chunk, 0),)
        case "an extent of another work":
            chunk.works[0] += 1
        case "too many unreported":
            report = Sealed(SEGMENT, 1, 1, 1, 0, 1, 1, b"", b"", b"", b"")
            places = ((SEGMENT, i, b"") for i in range(limits.WAITING_PUTS_MAX + 1))
            state.pulls.unreported |= dict.fromkeys(places, report)
        case "too many waiting":
            state.pulls.waiting += [next(iter(state.pulls.running.values()))] * (
                limits.WAITING_PUTS_MAX + 1
            )


@pytest.mark.parametrize(
    "how",
    [
        "a busy mark for nobody",
        "a pull without its mark",
        "a pull whose record says another state",
        "a pull whose record says another generation",
        "reserved for nobody",
        "a pull that no request has",
        "a chunk that lost its frame",
        "columns of different length",
        "two works on one extent",
        "a move whose source is not sealed",
        "an extent of another work",
        "too many unreported",
        "too many waiting",
    ],
)
def test_each_invariant_notices_when_it_is_broken(how: str) -> None:
    script = Script().serve()
    script.start(ingest((0,), 5))
    broken(script, how)
    with pytest.raises(InvariantBroken):
        script.state.check_invariants()


def test_a_pull_during_an_offer_is_noticed() -> None:
    script = Script().serve()
    script.start(ingest((0,), 5))
    script.feed(events.LinkOpened())
    member = script.state.membership
    number, call = next(iter(member.calls.items()))
    member.calls[number] = type(call)(call.asked, call.sent_at_s, SEGMENT)
    member.unanswered.add(SEGMENT)
    with pytest.raises(InvariantBroken, match="inventory"):
        script.state.check_invariants()


def test_an_event_of_no_known_kind_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        Script().state.handle("an event", 0.0)  # type: ignore[arg-type]  # that is the point


def test_the_end_of_an_unknown_work_is_our_bug() -> None:
    with pytest.raises(KeyError):
        Script().feed(events.WorkEnded(99, b""))


def test_the_ring_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_RING_ENTRIES", 3)
    ring = EventRing()
    for i in range(5):
        ring.append(float(i), events.Tick())
    assert [now for now, _ in ring.entries] == [2.0, 3.0, 4.0]


def test_the_ring_is_bounded_in_bytes() -> None:
    ring = EventRing()
    message = ingest([0] * 4096, 1)
    for i in range(200):
        ring.append(float(i), events.IngestRequested(i, 1, message))
    assert 0 < len(ring.entries) < 100


def test_a_replay_of_the_ring_gives_the_same_actions() -> None:
    script = Script().serve()
    script.seal((0, PAGE), 5)
    script.beat()
    first = list(script.state.ring.entries)
    again = Script()
    for now, event in first:
        again.state.handle(event, now)
    assert bytes(again.chunk().states) == bytes(script.chunk().states)
    assert again.state.epoch == script.state.epoch
