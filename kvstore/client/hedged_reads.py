"""Hedged reads: where one worker is late, the next replica is asked, too; the first one wins.

Each of the two delivers into memory of its own. Only what was verified there is copied to the
caller's memory, by the caller's thread, so the loser never touches it, however late it ends.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.counters import ClientCounters
from kvstore.client.hedge_delay import HedgeBudget, HedgeDelay
from kvstore.client.helper_threads import HelperThreads
from kvstore.client.performer import HostMover
from kvstore.transfer.memory import Memory, copy_bytes
from kvstore.transfer.shm import ShmTransport
from kvstore.transfer.transport import all_of
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.transfer.choice import Choice
    from kvstore.transfer.transport import ReadSpan

    Attempt = Callable[[ReadSpan, Memory, float], bytes]
    """`Transport.read`, by whichever transport leads to the span."""
    Late = Callable[[float], None]
    """Told after how long the first replica had not delivered yet."""

HEDGED_BYTES_MAX: Final = 4 * limits.MIB
"""Of one span. Larger reads take as long as their bytes: a late answer is little of that."""
TRIES_MAX: Final = 8
"""Under way at once, of all calls of a store, each with a thread and with memory of its own."""
TRY_MAX_S: Final = 2 * limits.READ_STALL_MAX_S
"""So long a try may take, and the end of a store may wait for one. Reads go on unhedged."""

_ALL: Final[weakref.WeakSet[Hedger]] = weakref.WeakSet()


class _Try:
    """One replica's bytes on their way into a room."""

    __slots__ = ("outcomes", "room", "span")

    def __init__(self, span: ReadSpan, room: Memory) -> None:
        size = span.part_bytes
        places = tuple(range(0, len(span) * size, size))
        self.span = msgspec.structs.replace(span, places=places)
        self.room = room
        self.outcomes: bytes | None = None

    @property
    def is_good(self) -> bool:
        """Whether every page has come, and was verified."""
        return self.outcomes is not None and not any(self.outcomes)


class _Race:
    """The tries of one read. Its lock is held for moments only."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tries: list[_Try] = []
        self.is_settled = False

    @property
    def winner(self) -> _Try | None:
        """The first that is good, and where all have ended without success the first replica."""
        good = next((each for each in self.tries if each.is_good), None)
        if good is None and all(each.outcomes is not None for each in self.tries):
            return self.tries[0]
        return good

    def wait(self, seconds: float) -> bool:
        """Until there is a winner; False where that takes too long."""
        with self.changed:
            return self.changed.wait_for(lambda: self.winner is not None, max(0.0, seconds))


class Hedger:
    """What the hedged reads of one store share. Thread-safe; a forked child begins anew."""

    def __init__(self) -> None:
        """Start no thread and take no memory yet."""
        self._threads = HelperThreads(TRIES_MAX, "kvharbor-hedge")
        self._start_anew()
        _ALL.add(self)

    def _start_anew(self) -> None:
        self._threads.start_anew()
        self._mutex = threading.Lock()
        self._delays: dict[int, HedgeDelay] = {}
        self._budget = HedgeBudget()
        self._rooms: list[Memory] = []
        self._counters = ClientCounters()

    @property
    def counters(self) -> ClientCounters:
        """As they are now."""
        return self._counters

    def read(
        self,
        spans: tuple[ReadSpan, ReadSpan],
        into: Memory,
        timeout_s: float,
        attempt: Attempt,
        late: Late,
    ) -> bytes | None:
        """Read a span, hedged by the same pages elsewhere; None where it cannot be hedged now.

        Outcomes are the first replica's, or OK of the other: why that one failed is not told.
        """
        span, other = spans
        deadline_s = time.monotonic() + min(timeout_s, TRY_MAX_S)
        delay_s = self._begin(span)
        race = _Race()
        if delay_s is None or not self._start(race, span, deadline_s, attempt):
            return None
        try:
            if not race.wait(min(delay_s, deadline_s - time.monotonic())):
                late(delay_s)
                self._hedge(race, other, deadline_s, attempt)
                race.wait(deadline_s - time.monotonic())
            return self._end(race, span, into)
        finally:
            self._settle(race)

    def note(self, span: ReadSpan, seconds: float) -> None:
        """The first replica took so long."""
        with self._mutex:
            self._delay_of(span).note(seconds)

    def close(self) -> None:
        """End the threads, once what they read has ended. Safe to repeat."""
        self._threads.close()

    def _begin(self, span: ReadSpan) -> float | None:
        """Count a read that could be hedged: how late it may be, None where nobody knows yet."""
        with self._mutex:
            self._count(hedgeable_reads=1)
            self._budget.earn()
            return self._delay_of(span).delay_s

    def _delay_of(self, span: ReadSpan) -> HedgeDelay:
        """For reads of about this size: there are no more sizes than bits of HEDGED_BYTES_MAX."""
        return self._delays.setdefault(_bytes_of(span).bit_length(), HedgeDelay())

    def _start(self, race: _Race, span: ReadSpan, deadline_s: float, attempt: Attempt) -> bool:
        """Have a thread read a span into a room; False where none is free."""
        is_first = not race.tries
        with self._mutex:
            room = self._rooms.pop() if self._rooms else None
        if room is None:
            room = Memory.of("room", bytearray(HEDGED_BYTES_MAX), writable=True)
        mine = _Try(span, room)

        def run() -> None:
            began_s = time.monotonic()
            outcomes = all_of(Outcome.TRANSPORT, len(span))
            try:
                outcomes = attempt(mine.span, room, max(0.0, deadline_s - began_s))
            finally:
                if is_first:
                    self.note(span, time.monotonic() - began_s)
                with race.changed:
                    mine.outcomes = outcomes
                    is_late = race.is_settled
                    race.changed.notify_all()
                if is_late:
                    self._give_back(room)

        with race.changed:
            race.tries.append(mine)
        if self._threads.run(run):
            return True
        with race.changed:
            race.tries.remove(mine)
        self._give_back(room)
        return False

    def _hedge(self, race: _Race, other: ReadSpan, deadline_s: float, attempt: Attempt) -> None:
        """Ask the other replica as well, if hedges are left."""
        with self._mutex:
            may = self._budget.spend()
        started = may and self._start(race, other, deadline_s, attempt)
        with self._mutex:
            self._count(hedges=int(started), hedges_withheld=int(not started))

    def _end(self, race: _Race, span: ReadSpan, into: Memory) -> bytes:
        """Copy what has won to its places, and wipe those of what has not come."""
        with race.changed:
            winner = race.winner
        if winner is None or winner.outcomes is None:
            into.wipe(span.places, span.part_bytes)
            return all_of(Outcome.TRANSPORT, len(span))
        if winner is not race.tries[0]:
            with self._mutex:
                self._count(hedges_won=1)
        size, refused = span.part_bytes, []
        for place, at, code in zip(span.places, winner.span.places, winner.outcomes, strict=True):
            if code == Outcome.OK:
                copy_bytes(into.address + place, winner.room.address + at, size)
            else:
                refused.append(place)
        into.wipe(refused, size)
        return winner.outcomes

    def _settle(self, race: _Race) -> None:
        """Nobody looks at these tries any more; a room is free once its try has ended."""
        with race.changed:
            race.is_settled = True
            free = [each.room for each in race.tries if each.outcomes is not None]
        for room in free:
            self._give_back(room)

    def _give_back(self, room: Memory) -> None:
        with self._mutex:
            if len(self._rooms) < TRIES_MAX:
                self._rooms.append(room)

    def _count(self, **more: int) -> None:
        """Under the lock."""
        found = {name: getattr(self._counters, name) + count for name, count in more.items()}
        self._counters = msgspec.structs.replace(self._counters, **found)


class HedgingMover(HostMover):
    """Moves pages between workers and memory of this process, and hedges reads over a network."""

    def __init__(self, choice: Choice, memory: Memory, hedger: Hedger) -> None:
        """The hedger is the store's."""
        super().__init__(choice, memory)
        self._hedger = hedger

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        """See Mover.read. `others` has the same pages elsewhere, None where there is no other."""
        deadline_s = time.monotonic() + timeout_s
        results: list[bytes] = []
        for span, other in zip(spans, others or [None] * len(spans), strict=True):
            left_s = max(0.0, deadline_s - time.monotonic())
            results.append(self._read_one(span, other, left_s))
        return results

    def _read_one(self, span: ReadSpan, other: ReadSpan | None, timeout_s: float) -> bytes:
        if other is None or not self._may_hedge(span, timeout_s):
            return super().read([span], timeout_s)[0]
        began_s = time.monotonic()
        late = partial(self._choice.note_late, span)
        outcomes = self._hedger.read((span, other), self._memory, timeout_s, self._attempt, late)
        if outcomes is None:
            left_s = max(0.0, timeout_s - (time.monotonic() - began_s))
            began_s = time.monotonic()
            outcomes = super().read([span], left_s)[0]
            self._hedger.note(span, time.monotonic() - began_s)
        return outcomes

    def _may_hedge(self, span: ReadSpan, timeout_s: float) -> bool:
        """A few bytes, over a network: what lies on this host is at most as far as its memory."""
        if span.stripes or _bytes_of(span) > HEDGED_BYTES_MAX:
            return False
        way = self._choice.transport(span.segment, timeout_s)
        return way is not None and not isinstance(way, ShmTransport)

    def _attempt(self, span: ReadSpan, room: Memory, timeout_s: float) -> bytes:
        return HostMover(self._choice, room).read([span], timeout_s)[0]


def _bytes_of(span: ReadSpan) -> int:
    return len(span) * span.part_bytes


def _start_anew() -> None:
    for each in list(_ALL):
        each._start_anew()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_start_anew)
