"""Which sealed extents are verified next, so that in time all are, and which were found damaged.

A part of the worker's state machine, called by `workers.state` alone. Goes through each segment at
a set pace, from end to end and then again, and leaves out what a seal or a check has verified since
it came by last. Extents stay free for any work meanwhile: what has changed by the time of the
answer is no finding. Places and findings go with the process, and the next one's rounds find again
what is bad. Must not know bytes or threads.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import ReportDamage
from workers.events import CallMaster, ExtentGroup, ScrubExtents
from workers.extent_table import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.wire.messages.base import Message
    from workers.events import Action
    from workers.extent_table import ChunkTable, SegmentTable
    from workers.holdings import Holdings

LOOK_S: Final = 0.25
"""Of the pace: how much of a segment is looked at at once, and waits for one thread."""
LOOK_EXTENTS_MAX: Final = 1024
DAMAGED_MAX: Final = limits.BATCH_PAGES_MAX
"""Findings that are remembered, and so told in one message (I7); the next round finds the rest."""
BEGINNINGS: Final = 3
"""Of rounds that are remembered. What was sealed right behind one round's place is left out by the
next and verified by the one after that: so nothing was verified before the oldest of three began
(W12)."""


class Damaged(msgspec.Struct, frozen=True, gc=False):
    """A sealed extent that does not hold what its record says."""

    segment: str
    offset: int
    generation: int


class Round(msgspec.Struct):
    """How far one segment's present round has come, and what all of them have done."""

    offset: int = 0
    """Where the next look begins."""
    next_s: float = 0.0
    look: int = 0
    """The number of the look that is under way; 0 while there is none."""
    began_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=BEGINNINGS))
    ended: int = 0
    """Rounds that came to the segment's end."""
    extents: int = 0
    bytes: int = 0
    """Of extents that were verified, good or bad."""
    damaged: int = 0

    def unverified_s(self, now: float) -> float:
        """How long ago, at most, the last look at any extent was; 0 before the first round.

        Counts from the first round of this process, for nobody knows of looks before it.
        """
        return now - self.began_s[0] if self.began_s else 0.0


class Look(msgspec.Struct, frozen=True):
    """Extents that are being verified."""

    segment: str
    size_class: int
    offsets: array[int]
    generations: array[int]


class Rounds:
    """The rounds of all segments, and what they found."""

    def __init__(
        self, holdings: Holdings, is_failed: Callable[[str], bool], bytes_per_s: int
    ) -> None:
        """Verify so many bytes a second of each segment; 0 verifies nothing.

        `is_failed` tells whether a segment's medium gives nothing back.
        """
        self._holdings = holdings
        self._is_failed = is_failed
        self.bytes_per_s = bytes_per_s
        self.by_segment: dict[str, Round] = {name: Round() for name in holdings.segments}
        self.damaged: dict[Damaged, bool] = {}
        """What was found, until it is freed: whether the present leader has heard of it."""
        self.calls: dict[int, list[Damaged]] = {}
        """Reports under way, by call number."""
        self._looks: dict[int, Look] = {}

    def next_wakeup(self) -> float:
        """When the next look is due; infinity while there is none."""
        if not self.bytes_per_s:
            return float("inf")
        due = (each.next_s for name, each in self.by_segment.items() if self._may_look(name))
        return min(due, default=float("inf"))

    def _may_look(self, segment: str) -> bool:
        return not (self.by_segment[segment].look or self._is_failed(segment))

    # --- looks --------------------------------------------------------------------------------

    def look(self, now: float) -> list[Action]:
        """The next extents of each segment whose time has come, one look a segment at a time."""
        if not self.bytes_per_s:
            return []
        actions: list[Action] = []
        for name, progress in self.by_segment.items():
            if progress.next_s <= now and self._may_look(name):
                actions += self._look(self._holdings.segments[name], progress, now)
        return actions

    def _look(self, table: SegmentTable, progress: Round, now: float) -> list[Action]:
        """Look at a piece of a segment; late looks are not made up for."""
        start = progress.offset
        if not start:
            progress.began_s.append(now)
        stop = min(
            start + max(1, int(self.bytes_per_s * LOOK_S)), _frame_end(table, start),
            table.geometry.payload_bytes,
        )  # fmt: skip
        chunk, slots = table.chunk_around(start), list[int]()
        if chunk is not None:
            first, last = _begins(chunk, start), _begins(chunk, stop)
            last = min(last, first + LOOK_EXTENTS_MAX)
            if last - first == LOOK_EXTENTS_MAX:
                stop = min(stop, chunk.start + last * chunk.size_class)
            slots = chunk.unverified(first, last)
        progress.next_s = now + (stop - start) / self.bytes_per_s
        progress.offset = stop
        if stop == table.geometry.payload_bytes:
            progress.offset, progress.ended = 0, progress.ended + 1
        return [self._begin(table, chunk, slots)] if chunk is not None and slots else []

    def _begin(self, table: SegmentTable, chunk: ChunkTable, slots: list[int]) -> Action:
        offsets = array("Q", (chunk.start + slot * chunk.size_class for slot in slots))
        generations = array("Q", (chunk.generations[slot] for slot in slots))
        number = self._holdings.next_number()
        self._looks[number] = Look(table.segment, chunk.size_class, offsets, generations)
        self.by_segment[table.segment].look = number
        stretches = table.stretches(chunk.size_class, offsets)
        return ScrubExtents(number, ExtentGroup(table.segment, chunk.size_class, stretches))

    def ended(self, number: int, outcomes: bytes) -> None:
        """A look has ended: note what is damaged and still there."""
        look = self._looks.pop(number)
        progress = self.by_segment[look.segment]
        progress.look = 0
        for offset, generation, outcome in zip(
            look.offsets, look.generations, outcomes, strict=True
        ):
            if outcome not in {Outcome.OK, Outcome.CHECKSUM}:
                continue  # the medium did not answer
            progress.extents += 1
            progress.bytes += look.size_class
            found = Damaged(look.segment, offset, generation)
            if outcome == Outcome.CHECKSUM and found not in self.damaged and self._is_there(found):
                progress.damaged += 1
                if len(self.damaged) < DAMAGED_MAX:
                    self.damaged[found] = False

    def _is_there(self, found: Damaged) -> bool:
        """Whether the extent is sealed as it was, and nobody is about to change that."""
        place = self._holdings.segments[found.segment].slot_at(found.offset)
        if place is None:
            return False
        chunk, slot = place
        return (chunk.states[slot], chunk.generations[slot], chunk.works[slot]) == (  # W11
            RecordState.SEALED, found.generation, NOBODY,
        )  # fmt: skip

    # --- reports ------------------------------------------------------------------------------

    def tell_anew(self) -> None:
        """A leader has taken the inventory: it knows of no finding."""
        self.damaged = dict.fromkeys(self.damaged, False)

    def report(self) -> list[Action]:
        """Tell the leader of findings that it has not heard of; safe to repeat."""
        if not self.damaged:
            return []
        there = (each for each in self.damaged.items() if self._is_there(each[0]))
        self.damaged = dict(there)  # the others were freed, or are about to be
        under_way = {found for call in self.calls.values() for found in call}
        untold: dict[str, list[Damaged]] = {}
        for found, is_told in self.damaged.items():
            if not is_told and found not in under_way:
                untold.setdefault(found.segment, []).append(found)
        return [self._call(segment, found) for segment, found in untold.items()]

    def _call(self, segment: str, found: list[Damaged]) -> Action:
        number = self._holdings.next_number()
        self.calls[number] = found
        offsets = array("Q", (each.offset for each in found)).tobytes()
        generations = array("Q", (each.generation for each in found)).tobytes()
        incarnation = self._holdings.segments[segment].incarnation
        return CallMaster(number, ReportDamage(segment, incarnation, offsets, generations))

    def noted(self, call: int, reply: Message | None) -> None:
        """The leader's answer; anything but Done is asked for again with the next report."""
        for found in self.calls.pop(call):
            if found in self.damaged:
                self.damaged[found] = isinstance(reply, Done)


def _frame_end(table: SegmentTable, offset: int) -> int:
    """The end of the chunk that lies there, or of the frame where none does."""
    chunk, frame_bytes = table.chunk_around(offset), table.geometry.frame_bytes
    if chunk is None:
        return (offset // frame_bytes + 1) * frame_bytes
    return chunk.start + table.geometry.chunk_span(chunk.size_class)


def _begins(chunk: ChunkTable, offset: int) -> int:
    """The first slot of a chunk that begins at `offset` or after it; their number for none.

    A chunk ends behind its last slot, wherever its size class does not divide it.
    """
    return min(-(-(offset - chunk.start) // chunk.size_class), len(chunk.states))
