"""Which chunks' values in the metadata store are out of date, and when each is written anew.

A chunk whose extents become SEALED is due DELAY_S later, one that pages leave LATER_S later, unless
they were removed; who became due first goes first. Bounded by what there is: a chunk is due once
however often it changes, has one write under way, and IN_FLIGHT_MAX writes wait for the store in
all. Beyond the budget, or while the store fails, chunks wait longer, and `behind_s` says how long.

Owns what the store holds of which chunk. Must not know what lies in a chunk or in its value:
master.chunk_writes makes those.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.replica import ExtentState
from master.budget import Budget
from master.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from master.segments import Segment
    from master.wheel import Wakeup

DELAY_S: Final = 0.05
LATER_S: Final = 5.0
"""What was freed and is still listed costs a takeover no more than a look at the records."""
IN_FLIGHT_MAX: Final = 16
CLOCK_EVERY_S: Final = 5.0
"""Pool time is stored with every value, and at least so often: it may be late by so much."""
_SEALED: Final = int(ExtentState.SEALED)

Place = tuple[str, int]
"""A segment, and the start of a chunk in it."""


class WriteBehind:
    """What is due when. Only chunks of segments that are LIVE can become due."""

    __slots__ = ("_later", "_soon", "_wakeup", "budget", "clock_s", "now_s", "stored", "writing")

    def __init__(self, wakeup: Wakeup) -> None:
        """Nothing is stored; `wakeup` hears of what becomes due."""
        self._wakeup = wakeup
        self.now_s = 0.0
        """Of the event under way."""
        self.stored: dict[str, dict[int, int]] = {}
        """Digests by segment and chunk start: of values in the store, or on their way there."""
        self._soon: dict[Place, float] = {}
        self._later: dict[Place, float] = {}
        """When each is due. Both are in the order of that, and no place is in both."""
        self.writing: dict[Place, float] = {}
        """When those that are being encoded or stored were due."""
        self.budget = Budget()
        self.clock_s = -inf
        """When pool time was stored last."""

    @property
    def dirty(self) -> int:
        """Chunks whose value is out of date, and nobody writes it yet."""
        return len(self._soon) + len(self._later)

    def is_due(self, place: Place) -> bool:
        """Whether a chunk's value may be out of date."""
        return place in self._soon or place in self._later or place in self.writing

    def behind_s(self, now_s: float) -> float:
        """How long the chunk that waits longest, for its turn or for the store, has been due."""
        heads = [next(iter(marks.values()), inf) for marks in (self._soon, self._later)]
        return max(0.0, now_s - min(*heads, *self.writing.values(), inf))

    def changed(self, segment: Segment, start: int, after: int) -> None:
        """Some extents of a chunk became or ceased to be SEALED; this is their state now."""
        if segment.state is not SegmentState.LIVE:
            return  # all of it is looked at when its inventory is compared
        place = segment.id, start
        if after == _SEALED:
            self.hurry(segment.id, start)
        elif place not in self._soon and place not in self._later:
            self._later[place] = self.now_s + LATER_S
            self._wakeup.by(self.now_s + LATER_S)

    def hurry(self, segment: str, start: int) -> None:
        """This chunk is due soon."""
        place = segment, start
        if place not in self._soon:
            self._later.pop(place, None)
            self._soon[place] = self.now_s + DELAY_S
            self._wakeup.by(self.now_s + DELAY_S)

    def compared(self, segment: Segment) -> None:
        """A segment's inventory is compared: each of its chunks may differ from what is stored."""
        starts: Iterable[int] = self.stored.get(segment.id, ())
        for start in sorted({*starts, *segment.allocator.chunks}):
            self.changed(segment, start, ExtentState.RETIRED)

    def forget(self, segment: str) -> list[int]:
        """A segment is given up; the chunks of which the store holds something."""
        for marks in (self._soon, self._later):
            for place in [place for place in marks if place[0] == segment]:
                del marks[place]
        return list(self.stored.pop(segment, ()))

    def _head(self) -> tuple[float, Place] | None:
        """The chunk that is due first and is not being written."""
        heads: list[tuple[float, Place]] = []
        for marks in (self._soon, self._later):
            for place, due_s in marks.items():  # at most IN_FLIGHT_MAX are passed over
                if place not in self.writing:
                    heads.append((due_s, place))
                    break
        return min(heads, default=None)

    def next_s(self, bytes_per_s: float) -> float:
        """When the next value may be written; infinity while none is to be or can be."""
        head = None if len(self.writing) >= IN_FLIGHT_MAX else self._head()
        if head is None:
            return inf
        return max(head[0], self.budget.free_at_s(self.now_s, bytes_per_s))

    def take_due(self, bytes_per_s: float) -> Place | None:
        """Begin to write the chunk that is due, if one may be written now."""
        head = self._head()
        if head is None or self.next_s(bytes_per_s) > self.now_s:
            return None
        due_s, place = head
        self._soon.pop(place, None)
        self._later.pop(place, None)
        self.writing[place] = due_s
        return place

    def done(self, place: Place) -> None:
        """The write of this chunk has ended, or was not needed."""
        del self.writing[place]
        head = self._head()
        self._wakeup.by(min(self.clock_s + CLOCK_EVERY_S, inf if head is None else head[0]))
