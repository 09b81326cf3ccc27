"""Drives the worker's pure state machine in tests: a leader, clients and a shell in one object.

Not a test. Answers the calls of registration, keeps the rest for the test to answer, and checks the
invariants after every event.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvstore.ids import Incarnation, SegmentId
from kvstore.segment import check_geometry, size_class_of
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    HeartbeatNoted,
    InventoryEnd,
    InventoryWanted,
    OfferInventory,
    RegisterWorker,
    WorkerAccepted,
)
from kvstore.wire.messages.puts import BufferSource, ExtentSource, Ingest, SealedNoted
from workers import events
from workers.extent_table import ChunkTable, SegmentTable
from workers.membership import Profile
from workers.state import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.record import Record
    from kvstore.wire.messages.base import Message
    from workers.events import Action, Event

CHUNK: Final = 64 * 1024
PAGE: Final = 4096
GEOMETRY: Final = check_geometry(4 * CHUNK, CHUNK)
SEGMENT: Final = "w-dram0"
NVME: Final = "w-nvme0"
INCARNATION: Final = 7
EPOCH: Final = 3
LOST_AFTER_S: Final = 3.0
BEAT_S: Final = 0.5
OK: Final = Outcome.OK

Wanted = TypeVar("Wanted")


def generation(counter: int, epoch: int = EPOCH) -> int:
    """A generation of that epoch."""
    return epoch << 32 | counter


def packed(values: Iterable[int]) -> bytes:
    """A u64 column."""
    return array("Q", values).tobytes()


def key(number: int) -> bytes:
    """A page key."""
    return number.to_bytes(32, "big")


def checksum_of(number: int) -> int:
    """The writer's checksum of the page with that key, as far as the state machine knows."""
    return number * 1_000_003 + 17


def ingest(
    offsets: Sequence[int],
    counter: int,
    *,
    epoch: int = EPOCH,
    incarnation: int = INCARNATION,
    size: int = PAGE,
    first_key: int = 1,
) -> Ingest:
    """An Ingest of pages with consecutive keys."""
    numbers = range(first_key, first_key + len(offsets))
    return Ingest(
        epoch, SEGMENT, incarnation, generation(counter, epoch), 1, 0, size,
        size_class_of(size), 64, bytes(32),
        b"".join(key(n) for n in numbers), packed(offsets),
        packed(checksum_of(n) for n in numbers), BufferSource(1, packed(offsets)),
    )  # fmt: skip


def move(
    offsets: Sequence[int],
    counter: int,
    source: Sequence[int],
    *,
    source_counter: int = 5,
    up: bool = False,
    size_class: int = PAGE,
    first_key: int = 1,
) -> Ingest:
    """The leader's request to copy pages down from SEGMENT to NVME, or up."""
    lower = ingest(offsets, counter, first_key=first_key)
    generations = packed([generation(source_counter)] * len(source))
    return msgspec.structs.replace(
        lower,
        segment=SEGMENT if up else NVME,
        size_class=size_class,
        source=ExtentSource(NVME if up else SEGMENT, INCARNATION, packed(source), generations),
    )


class Script:
    """One worker and everybody around it, at a time that only the test moves."""

    def __init__(
        self, records: Iterable[Record] = (), *, nvme: bool = False, scrub_bytes_per_s: int = 0
    ) -> None:
        """A worker that has never met a leader, with a segment of DRAM, and one below it."""
        incarnation = Incarnation(INCARNATION)
        self.table = SegmentTable(SegmentId(SEGMENT), incarnation, GEOMETRY)
        self.table.adopt(records)
        self.nvme = SegmentTable(SegmentId(NVME), incarnation, GEOMETRY, holds_encoded=True)
        address = Address("tcp", "127.0.0.1:1", 10)
        tiers = {SEGMENT: "dram", NVME: "nvme"}
        profile = Profile("w", "host", (address,), tiers, rack="r1", zone="z1")
        tables = [self.table, self.nvme] if nvme else [self.table]
        self.state = WorkerState(profile, tables, scrub_bytes_per_s)
        self.now = 100.0
        self._last = 0

    def number(self) -> int:
        """A fresh number for a request or a command."""
        self._last += 1
        return self._last

    def feed(self, event: Event) -> list[Action]:
        """Handle one event; every invariant holds afterwards."""
        actions = self.state.handle(event, self.now)
        self.state.check_invariants()
        return actions

    def serve(self, epoch: int = EPOCH) -> Script:
        """Register with a leader of that epoch and hand the inventory over."""
        actions = self.feed(events.LinkOpened())
        while calls := [each for each in actions if isinstance(each, events.CallMaster)]:
            actions = [
                action
                for call in calls
                if (reply := registration_reply(call.message, epoch)) is not None
                for action in self.feed(events.MasterAnswered(call.call, reply))
            ]
        assert self.state.is_serving
        return self

    def beat(self) -> list[Action]:
        """Let a heartbeat interval pass and have the beat answered."""
        self.now += BEAT_S
        call = one(self.feed(events.Tick()), events.CallMaster)
        return self.feed(events.MasterAnswered(call.call, HeartbeatNoted(self.state.epoch, True)))

    def ask(self, message: Ingest, session: int = 1) -> tuple[int, list[Action]]:
        """A client asks; the request's number and what follows."""
        request = self.number()
        return request, self.feed(events.IngestRequested(request, session, message))

    def start(self, message: Ingest, session: int = 1) -> events.StartPull:
        """A client asks, and its pull starts at once."""
        return one(self.ask(message, session)[1], events.StartPull)

    def finish(
        self, pull: events.StartPull, outcomes: bytes | None = None, stored_max: int = 0
    ) -> list[Action]:
        """A pull ends; well, unless outcomes are given."""
        pages = len(pull.message.keys) // 32
        return self.feed(events.PullEnded(pull.pull, outcomes or bytes(pages), stored_max))

    def note(self, action: Action, outcomes: bytes) -> list[Action]:
        """The master answers a Sealed."""
        assert isinstance(action, events.CallMaster)
        return self.feed(events.MasterAnswered(action.call, SealedNoted(outcomes)))

    def seal(self, offsets: Sequence[int], counter: int, first_key: int = 1) -> None:
        """Put pages there, start to end."""
        self.put(ingest(offsets, counter, first_key=first_key))

    def put(self, message: Ingest, session: int = 1) -> None:
        """Carry a request out, start to end."""
        offsets = array("Q", message.offsets)
        report = one(self.finish(self.start(message, session)), events.CallMaster)
        answer = one(self.note(report, bytes(len(offsets))), events.AnswerIngest)
        assert not any(answer.outcomes)

    def command(self, message: Message) -> tuple[int, list[Action]]:
        """The master commands; the command's number and what follows."""
        number = self.number()
        return number, self.feed(events.CommandReceived(number, message))

    def chunk(self, offset: int = 0, segment: str = SEGMENT) -> ChunkTable:
        """The chunk there, which must have been cut."""
        found = self.state.holdings.segments[segment].chunk_around(offset)
        assert found is not None
        return found


def registration_reply(message: Message, epoch: int) -> Message | None:
    """What a leader that wants no rows answers; None for anything but registration."""
    match message:
        case RegisterWorker():
            return WorkerAccepted(epoch, BEAT_S, LOST_AFTER_S)
        case OfferInventory():
            return InventoryWanted(())
        case InventoryEnd():
            return Done()
    return None


def one(actions: Iterable[object], kind: type[Wanted]) -> Wanted:
    """The only action of that kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def kinds(actions: Iterable[object]) -> list[str]:
    """The names of the actions, in order."""
    return [type(action).__name__ for action in actions]
