"""This worker's standing with the leader: registration, inventory, heartbeat, epoch, self-fence,
and how it takes its leave.

A part of the worker's state machine, called by `workers.state` alone. Contact is counted from when
a call that was answered had been *sent*, so a worker that was paused cannot take an old reply for
news. Must not know pulls beyond pausing them, nor sockets.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.ids import epoch_of
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import (
    Heartbeat,
    HeartbeatNoted,
    InventoryEnd,
    InventoryWanted,
    LeaveWorker,
    OfferInventory,
    RegisterWorker,
    ReportSegment,
    SegmentOffer,
    WorkerAccepted,
)
from workers.events import Action, CallMaster, CloseLink, EndProcess, Listed, SendRows

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.puts import Ingest
    from workers.extent_table import SegmentTable
    from workers.holdings import Holdings


FAILED: Final = "failed"
"""State of a medium that gives nothing back (see ReportSegment)."""


class Profile(msgspec.Struct, frozen=True):
    """What a worker says of itself when it registers."""

    worker: str
    host: str
    addresses: tuple[Address, ...]
    tiers: dict[str, str]
    """Tier by segment."""
    rack: str = ""
    zone: str = ""


class Link(Enum):
    """How far the control connection has come."""

    DOWN = "down"
    REGISTERING = "registering"
    OFFERING = "offering"
    SERVING = "serving"


class Asked(Enum):
    """What a call to the master was for."""

    REGISTER = "register"
    OFFER = "offer"
    ROWS = "rows"
    END = "end"
    MEDIUM = "medium"
    BEAT = "beat"
    LEAVE = "leave"


class Call(msgspec.Struct, frozen=True):
    """A call in flight. `segment` is empty where the call concerns none."""

    asked: Asked
    sent_at_s: float
    segment: str = ""


class Membership:
    """Epoch, contact and the steps of registration."""

    def __init__(self, profile: Profile, holdings: Holdings) -> None:
        """Never in contact: fenced until a leader accepts this worker."""
        self._profile = profile
        self._holdings = holdings
        self.link = Link.DOWN
        self.epoch = 0
        self.calls: dict[int, Call] = {}
        self.offering: dict[str, list[tuple[int, int]]] = {}
        """By segment whose inventory is not ended: (chunk start, class) still to be sent."""
        self.unanswered: set[str] = set()
        """Segments whose offer is not answered: nothing may be pulled there."""
        self.media: dict[str, tuple[str, str]] = {}
        """(state, reason) of segments whose medium does not do everything any more."""
        self._contact_s = float("-inf")
        self._lost_after_s = limits.WORKER_LOST_AFTER_S
        self._interval_s = limits.HEARTBEAT_INTERVAL_S
        self._next_beat_s = float("inf")
        self._ends_s = float("inf")
        """When this worker ends, whoever still reads; infinity unless it leaves."""
        self._may_end = False

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no pages any more, and waits for its readers only."""
        return self._ends_s != float("inf")

    def is_fenced(self, now: float) -> bool:
        """Whether nothing may be overwritten while reads go on: no leader was heard for T/2, or
        the worker leaves.
        """
        return self.is_leaving or now - self._contact_s >= self._lost_after_s / 2

    def gate(self, message: Ingest, now: float) -> Outcome | None:
        """Why nothing may be pulled for this message; None when it may."""
        if message.epoch != self.epoch or self.is_fenced(now):  # I10
            return Outcome.FENCED
        known = self._holdings.find(message.segment, message.incarnation)
        return None if known is not None else Outcome.STALE  # I11

    def has_failed(self, segment: str) -> bool:
        """Whether the segment's medium gives nothing back."""
        return self.media.get(segment, ("", ""))[0] == FAILED

    def is_paused(self, segment: str) -> bool:
        """Whether the segment's inventory is being offered, so that nothing may change there."""
        return segment in self.unanswered

    def next_wakeup(self) -> float:
        """When the next heartbeat is due; infinity while there is no leader to tell."""
        return self._next_beat_s if self._may_end else min(self._next_beat_s, self._ends_s)

    def opened(self, now: float) -> list[Action]:
        """A connection stands: register."""
        self._reset(Link.REGISTERING)
        segments = tuple(
            SegmentOffer(table.segment, table.incarnation, self._profile.tiers[table.segment],
                         table.geometry, tuple(sorted(table.released)))
            for table in self._holdings.segments.values()
        )  # fmt: skip
        profile = self._profile
        message = RegisterWorker(
            profile.worker, profile.host, profile.addresses, segments, self._highest_epoch(),
            profile.rack, profile.zone,
        )  # fmt: skip
        return [self._call(Asked.REGISTER, message, now)]

    def _highest_epoch(self) -> int:
        """That of a leader, or of a record: those outlive this process (I10)."""
        tables = self._holdings.segments.values()
        return max([self.epoch, *(epoch_of(table.highest_generation()) for table in tables)])

    def closed(self) -> None:
        """The connection is gone; contact runs out by itself."""
        self._reset(Link.DOWN)

    def leave(self, now: float) -> list[Action]:
        """Begin to leave: tell the leader, who answers once no lease covers what lies here."""
        if self.is_leaving:
            return []
        self._ends_s = now + limits.LEAVE_TIMEOUT_S
        if self.link is Link.DOWN:
            # Who lost this worker grants no leases on it any more; nobody ever had it if -inf.
            granted_s = self._contact_s + self._lost_after_s
            longest_s = limits.LEASE_TTL_MAX_S + limits.LEASE_MARGIN_S
            self._ends_s = min(self._ends_s, granted_s + longest_s)
        return [] if self.link in {Link.DOWN, Link.REGISTERING} else self._take_leave(now)

    def _take_leave(self, now: float) -> list[Action]:
        return [self._call(Asked.LEAVE, LeaveWorker(self._profile.worker), now)]

    def _end(self) -> list[Action]:
        """Say that nobody needs this worker any more: once."""
        self._may_end = True
        return [EndProcess()]

    def _reset(self, link: Link) -> None:
        self.link = link
        self.calls.clear()
        self.offering.clear()
        self.unanswered.clear()
        self._next_beat_s = float("inf")

    def _call(self, asked: Asked, message: Message, now: float, segment: str = "") -> Action:
        number = self._holdings.next_number()
        self.calls[number] = Call(asked, now, segment)
        return CallMaster(number, message)

    def answered(self, number: int, reply: Message | None, now: float) -> list[Action]:
        """A reply to a call of this file."""
        call = self.calls.pop(number)
        match call.asked, reply:
            case Asked.REGISTER, WorkerAccepted():
                return self._accepted(reply, call, now)
            case Asked.BEAT, HeartbeatNoted():
                return self._noted(reply, call, now)
            case Asked.OFFER, InventoryWanted():
                return self._wanted(reply, call.segment, now)
            case Asked.ROWS, Done():
                return self._send_next(call.segment, now)
            case Asked.END, Done():
                return self._ended(call.segment, now)
            case Asked.MEDIUM, Done() | Failure():
                return []  # a leader that has given the segment up need not be told
            case Asked.LEAVE, Done():
                return self._end()
            case Asked.LEAVE, None if self.link is not Link.DOWN:
                return self._take_leave(now)  # it takes longer than a call may: ask again
            case Asked.BEAT, None:
                silent = "no heartbeat was answered for half the time to be lost"
                return [CloseLink(silent)] if self.is_fenced(now) else []
            case _, None:
                return [CloseLink(f"{call.asked.value}: not answered")]
            case _:
                told = f"{reply.code}: {reply.text}" if isinstance(reply, Failure) else repr(reply)
                return [CloseLink(f"{call.asked.value}: {told}")]

    def _accepted(self, reply: WorkerAccepted, call: Call, now: float) -> list[Action]:
        if reply.epoch < self.epoch:  # I10
            return [CloseLink(f"a leader of epoch {reply.epoch}, but {self.epoch} was seen")]
        self.epoch = reply.epoch
        self._lost_after_s = reply.lost_after_s
        self._interval_s = reply.heartbeat_interval_s
        self._contact_s = max(self._contact_s, call.sent_at_s)
        self._next_beat_s = call.sent_at_s + self._interval_s
        if self.is_leaving:
            self.link = Link.SERVING
            return self._take_leave(now)
        # Nobody can tell what lies on a medium that has failed: it has no inventory.
        failed = [name for name in self.media if self.has_failed(name)]
        self.offering = {name: [] for name in self._holdings.segments if name not in failed}
        self.unanswered = set(self.offering)
        self.link = Link.OFFERING if self.offering else Link.SERVING
        return [action for name in failed for action in self._report(name, now)]

    def offer(self, now: float) -> list[Action]:
        """Offer the inventories, once nobody is at work any more on the segments."""
        if self.is_leaving or self.link is not Link.OFFERING:
            return []
        if not self.unanswered or self._holdings.works:
            return []
        if any(call.asked is Asked.OFFER for call in self.calls.values()):
            return []
        # The leader starts from the inventory: what it still wants freed, it will ask for again.
        self._holdings.held.clear()
        tables = [self._holdings.segments[segment] for segment in sorted(self.unanswered)]
        return [
            self._call(
                Asked.OFFER,
                OfferInventory(table.segment, table.incarnation, table.digests()),
                now,
                table.segment,
            )
            for table in tables
        ]

    def _wanted(self, reply: InventoryWanted, segment: str, now: float) -> list[Action]:
        self.unanswered.discard(segment)
        chunks = self._holdings.segments[segment].chunks
        self.offering[segment] = [
            (start, chunks[start].size_class) for start in reply.chunk_starts if start in chunks
        ]
        return self._send_next(segment, now)

    def _send_next(self, segment: str, now: float) -> list[Action]:
        """One chunk at a time, so that a large inventory does not fill the send queue."""
        left = self.offering[segment]
        if left:
            start, size_class = left.pop()
            number = self._holdings.next_number()
            self.calls[number] = Call(Asked.ROWS, now, segment)
            chunk = self._holdings.segments[segment].chunks.get(start)
            there = chunk is not None and chunk.size_class == size_class
            occupied = chunk.occupied() if chunk is not None and there else ()
            listed = tuple(Listed(*each) for each in occupied)
            return [SendRows(number, segment, start, size_class, listed)]
        table: SegmentTable = self._holdings.segments[segment]
        message = InventoryEnd(segment, table.incarnation)
        return [self._call(Asked.END, message, now, segment)]

    def _ended(self, segment: str, now: float) -> list[Action]:
        self.offering.pop(segment, None)
        if not self.offering:
            self.link = Link.SERVING
        return self._report(segment, now)

    def medium_changed(self, segment: str, medium: tuple[str, str], now: float) -> list[Action]:
        """Tell the leader, now or when it has the segment's inventory."""
        self.media[segment] = medium
        return self._report(segment, now)

    def _report(self, segment: str, now: float) -> list[Action]:
        is_known = self.link in {Link.OFFERING, Link.SERVING} and segment not in self.offering
        if not is_known or segment not in self.media:
            return []
        incarnation = self._holdings.segments[segment].incarnation
        message = ReportSegment(segment, incarnation, *self.media[segment])
        return [self._call(Asked.MEDIUM, message, now, segment)]

    def tick(self, now: float) -> list[Action]:
        """A heartbeat when one is due. Independent of data work (I27)."""
        if now >= self._ends_s and not self._may_end:
            return self._end()
        if now < self._next_beat_s:
            return []
        self._next_beat_s = now + self._interval_s
        message = Heartbeat(self._profile.worker, self.epoch, len(self._holdings.held))
        return [self._call(Asked.BEAT, message, now)]

    def _noted(self, reply: HeartbeatNoted, call: Call, now: float) -> list[Action]:
        if reply.epoch < self.epoch:  # I10
            return [CloseLink(f"a leader of epoch {reply.epoch}, but {self.epoch} was seen")]
        if reply.epoch > self.epoch or not (reply.known or self.is_leaving):
            return self.opened(now)
        self._contact_s = max(self._contact_s, call.sent_at_s)
        return []
