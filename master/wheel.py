"""A timing wheel: items by deadline, cheap to move and to take out, never early.

And the moment at which somebody has to look at any of several wheels.

Knows nothing of what its items are. Items of one bucket come latest placed first, so that a run of
the core is the same every time.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

NOWHERE: Final = -1
"""Bucket of an item that is in no wheel."""


class Wakeup:
    """When the next look is wanted at the latest. Everything that makes it sooner says so here.

    What makes it later does not, since a look too early does no harm: whoever looks sets it anew.
    """

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        """Wanted at once."""
        self.at_s = -inf

    def by(self, at_s: float) -> None:
        """A look is wanted at `at_s`, if not sooner."""
        if at_s < self.at_s:
            self.at_s = at_s


class Timed(Protocol):
    """What a wheel holds: hashable by identity, in at most one wheel at a time."""

    bucket: int


T = TypeVar("T", bound=Timed)


class Wheel(Generic[T]):
    """Items by deadline, in buckets `grain_s` wide.

    An item comes due between its deadline and one grain later. Every operation is O(1), but for
    O(log buckets) when a bucket is new.
    """

    __slots__ = ("_buckets", "_numbers", "_wakeup", "grain_s")

    def __init__(self, grain_s: float, wakeup: Wakeup) -> None:
        """Start empty; `wakeup` hears of deadlines."""
        self.grain_s = grain_s
        self._wakeup = wakeup
        self._buckets: dict[int, dict[T, None]] = {}
        self._numbers: list[int] = []  # heap of the buckets' numbers

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def __iter__(self) -> Iterator[T]:
        return (item for bucket in self._buckets.values() for item in bucket)

    def place(self, item: T, at_s: float) -> None:
        """Let `item` come due at `at_s`, instead of when it was due before; never at infinity."""
        if at_s == inf:
            self.discard(item)
            return
        number = int(at_s / self.grain_s)
        if item.bucket == number:
            return
        if item.bucket != NOWHERE:
            self.discard(item)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._numbers, number)
            self._wakeup.by((number + 1) * self.grain_s)
        bucket[item] = None
        item.bucket = number

    def discard(self, item: T) -> None:
        """Take `item` out, if it is in."""
        number = item.bucket
        if number == NOWHERE:
            return
        item.bucket = NOWHERE
        del self._buckets[number][item]

    def _first(self) -> int | None:
        # A bucket that was emptied stays until it is first, so that its number is in the heap once.
        while self._numbers:
            first = self._numbers[0]
            if self._buckets[first]:
                return first
            del self._buckets[heapq.heappop(self._numbers)]
        return None

    def next_s(self) -> float:
        """When the first item comes due; infinity when the wheel is empty."""
        if not self._numbers:
            return inf
        first = self._first()
        return inf if first is None else (first + 1) * self.grain_s

    def take_due(self, now_s: float, items_max: int) -> list[T]:
        """Take out the items that are due, earliest bucket first, at most `items_max`."""
        due: list[T] = []
        while len(due) < items_max:
            first = self._first()
            if first is None or (first + 1) * self.grain_s > now_s:
                break
            bucket = self._buckets[first]
            while bucket and len(due) < items_max:
                item, _ = bucket.popitem()
                item.bucket = NOWHERE
                due.append(item)
        return due
