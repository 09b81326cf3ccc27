"""Pages that may have too few replicas, or too many: what is due when, and what comes first.

Those of which fewest replicas can be read come first, then those that somebody waits for, then the
hottest. A worker that is slow holds up its own pages only: those that nobody else has wait apart.
Bounded (I7); what finds no place is found again by a scan. Pure: knows no pages' places.
"""

from __future__ import annotations

import heapq
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEEDS_MAX: Final = 65_536
GRAIN_S: Final = 0.02
HURRIED_PER_STEP: Final = 2048


class Need(msgspec.Struct, eq=False):
    """Pages of one chain that are to be looked at."""

    namespace: int
    keys: bytes
    due_s: float
    presses: bool = False
    """Room may be made for copies of them, as for pages that are put."""
    is_awaited: bool = False
    """Somebody waits for the copies."""
    surplus_at_s: float = inf
    """When they were first seen to have more replicas than they want."""
    tries: int = 0
    """How often they found no room."""
    reason: str = ""
    """Why they wait; empty: until they are due."""
    rank: int = -1
    """Replicas that can be read of the scarcest of them; -1 while that is to be looked up."""
    bucket: int = NOWHERE


class RepairQueue:
    """Needs: each waits for its time, or is ready and has its rank."""

    __slots__ = ("_needs", "_number", "_ready", "_waiting", "is_cut", "ready")

    def __init__(self, wakeup: Wakeup) -> None:
        """Start empty; `wakeup` hears of what is due."""
        self._needs: dict[tuple[int, bytes], Need] = {}
        """By all of their keys: chains may begin alike and part then."""
        self._waiting: Wheel[Need] = Wheel(GRAIN_S, wakeup)
        self._ready: dict[str, list[tuple[int, bool, float, int, Need]]] = {}
        """By the worker that alone has some of them; empty: others have them, too."""
        self.ready: Counter[int] = Counter()
        """How many are, by rank."""
        self._number = 0
        self.is_cut = False
        """Whether something found no place: a scan has to find it again."""

    def __len__(self) -> int:
        return len(self._needs)

    def __iter__(self) -> Iterator[Need]:
        return iter(self._needs.values())

    def note(self, new: Need) -> Need | None:
        """Look at these pages at `due_s`, or sooner if that is known already; None: no place."""
        key = new.namespace, new.keys
        need = self._needs.get(key)
        if need is None:
            if len(self._needs) >= NEEDS_MAX:  # I7
                self.is_cut = True
                return None
            self._needs[key] = new
            self._waiting.place(new, new.due_s)
            return new
        need.presses = need.presses or new.presses
        need.is_awaited = need.is_awaited or new.is_awaited
        if need.rank < 0 and new.due_s < need.due_s:
            need.due_s = new.due_s
            self._waiting.place(need, need.due_s)
        return need

    def take_due(self, now_s: float, needs_max: int) -> list[Need]:
        """Needs whose time has come; each is to be ranked, made to wait or done."""
        return self._waiting.take_due(now_s, needs_max)

    def make_ready(self, need: Need, rank: int, heat: float, only_at: str = "") -> None:
        """It is to be served, in the order of ranks, once worker `only_at` can be read from."""
        need.rank = rank
        self.ready[rank] += 1
        self._number += 1
        entry = rank, not need.is_awaited, -heat, self._number, need
        heapq.heappush(self._ready.setdefault(only_at, []), entry)

    def take_ready(self, is_free: Callable[[str], bool]) -> Need | None:
        """The need that comes first of those whose worker is free; it is to be made to wait, or
        done.
        """
        free = [worker for worker in self._ready if not worker or is_free(worker)]
        if not free:
            return None
        worker = min(free, key=lambda each: self._ready[each][0])
        need = heapq.heappop(self._ready[worker])[-1]
        if not self._ready[worker]:
            del self._ready[worker]
        self.ready[need.rank] -= 1
        need.rank = -1
        return need

    @property
    def has_ready(self) -> bool:
        """Whether some are ready, be their worker free or not."""
        return bool(self._ready)

    def wait(self, need: Need, at_s: float, reason: str) -> None:
        """Look at it again at `at_s`."""
        need.due_s, need.reason = at_s, reason
        self._waiting.place(need, at_s)

    def done(self, need: Need) -> None:
        """Nothing is to be done about it any more."""
        del self._needs[need.namespace, need.keys]

    def hurry(self, now_s: float, namespace: int | None = None) -> Iterator[None]:
        """A job: nothing waits for its time any more, of one namespace or of all."""
        for number, need in enumerate(list(self._needs.values()), 1):
            if need.bucket != NOWHERE and namespace in (None, need.namespace):
                need.tries = 0
                need.surplus_at_s = -inf
                self.wait(need, now_s, "")
            if number % HURRIED_PER_STEP == 0:
                yield

    def next_s(self) -> float:
        """When the next need is due; infinity when none waits."""
        return self._waiting.next_s()
