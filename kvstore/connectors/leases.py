"""Leases of rows that an engine's cache asked for, given back once nobody wants the rows any more.

Knows no engine. Each lookup leases under a number of its own, so that no other's leases end with
it, and they are given back together: a master keeps leases by runs of pages, not by pages. What
is not given back, because nobody said that it is over, lapses by itself.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.connectors.one_thread import OneThread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kvstore.clock import Clock
    from kvstore.connectors.engine_pool import EnginePool, Reached

KEPT_S: Final = limits.LEASE_TTL_MAX_S
"""Older leases have lapsed, and are forgotten."""
END_S: Final = 5.0
"""More than a call that gives leases back may take."""


class _Lease:
    """What one lookup has leased."""

    __slots__ = ("holders", "names", "since_s")

    def __init__(self, names: Sequence[bytes], holders: Collection[object], now_s: float) -> None:
        self.names = names
        self.holders = set(holders)
        self.since_s = now_s


class LeaseBook:
    """Who still wants which leases. Pure: times are told."""

    def __init__(self) -> None:
        self._given = 0
        self._leases: dict[int, _Lease] = {}
        """By their numbers, oldest first."""
        self._held: defaultdict[object, deque[int]] = defaultdict(deque)
        """Leases of each holder, oldest first."""

    def __len__(self) -> int:
        return max(len(self._leases), len(self._held))

    def number(self) -> int:
        """A number for the leases of one lookup, which nobody else has had."""
        self._given += 1
        return self._given

    def took(
        self, number: int, holders: Collection[object], names: Sequence[bytes], now_s: float
    ) -> None:
        """These names were leased as `number`, until each of these holders has let go; not none."""
        self._forget(now_s)
        self._leases[number] = _Lease(names, holders, now_s)
        for holder in self._leases[number].holders:
            self._held[holder].append(number)

    def let_go(self, holders: Collection[object]) -> dict[int, Sequence[bytes]]:
        """Each lets go of its oldest lease: names by number of those that nobody holds any more."""
        over: dict[int, Sequence[bytes]] = {}
        for holder in holders:
            if holder not in self._held:
                continue
            number = self._held[holder][0]
            self._drop(holder, number)
            if not self._leases[number].holders:
                over[number] = self._leases.pop(number).names
        return over

    def _drop(self, holder: object, number: int) -> None:
        self._leases[number].holders.discard(holder)
        self._held[holder].remove(number)
        if not self._held[holder]:
            del self._held[holder]

    def _forget(self, now_s: float) -> None:
        while self._leases:
            number, oldest = next(iter(self._leases.items()))
            if now_s - oldest.since_s < KEPT_S:
                return
            for holder in list(oldest.holders):
                self._drop(holder, number)
            del self._leases[number]


class Leases:
    """The leases of one way to the pool, given back in a thread of their own. Thread-safe."""

    def __init__(
        self,
        pool: EnginePool,
        clock: Clock,
        give_back: Callable[[Reached, Sequence[bytes], int], None],
    ) -> None:
        """`give_back` tells the pool that nothing of these names is read as this number any more.

        Holders are whatever can be a key of a dict.
        """
        self._pool = pool
        self._clock = clock
        self._give_back = give_back
        self._book = LeaseBook()
        self._mutex = threading.Lock()
        self._thread = OneThread("kvharbor-leases")

    def number(self) -> int:
        """A number for the leases of one lookup."""
        with self._mutex:
            return self._book.number()

    def took(self, number: int, holders: Collection[object], names: Sequence[bytes]) -> None:
        """A lookup has leased these names: until each of the holders, whatever they are, lets go.

        Without any holder nobody wants them.
        """
        if not holders:
            self._over({number: names})
            return
        with self._mutex:
            self._book.took(number, holders, names, self._clock.now_s())

    def let_go(self, holders: Collection[object]) -> None:
        """Each of these wants what it was first promised no more; others may still want it."""
        with self._mutex:
            over = self._book.let_go(holders)
        self._over(over)

    @contextmanager
    def reading(self, names: Sequence[bytes]) -> Iterator[int]:
        """A number for the leases of a read, which end with it; where it raises they lapse."""
        number = self.number()
        yield number
        self._over({number: names})

    def close(self) -> None:
        """Give back what is to be; safe to repeat. What is held lapses with the connection."""
        self._thread.close(END_S)

    def _over(self, over: dict[int, Sequence[bytes]]) -> None:
        told = {number: names for number, names in over.items() if names}
        if told:
            self._thread.run(lambda: self._pool.tell("giving leases back", self._tell(told)))

    def _tell(self, told: dict[int, Sequence[bytes]]) -> Callable[[Reached], None]:
        def tell(pool: Reached) -> None:
            for number, names in told.items():
                self._give_back(pool, names, number)

        return tell
