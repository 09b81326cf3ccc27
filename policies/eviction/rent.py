"""The learned index: pages stay while the uses they promise are worth the room they take.

Runs are sorted into classes by how often they were used and by what hints said. For each class
and age (time since the last use) two numbers are learned from all pages of the last hour, those
that left included: how many were used again at that age, and for how many page-seconds pages of
that age were waiting for it. Uses per page-second from an age on, over whatever horizon is best, is
what a page of that age earns for its room: an index as in Gittins, "Bandit processes and dynamic
allocation indices" (J. R. Stat. Soc. B 1979). The lowest goes first.

Needs no time constant, and takes most from hints; learning takes some minutes, and in pools below
some thousand pages `lrfu` is better.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import exp
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from policies.eviction.ghosts import GhostParameters, Ghosts
from policies.eviction.protocol import (
    SAME_REQUEST_S,
    EvictionPolicy,
    is_new_use,
    page_count,
)

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.eviction.protocol import Entry

AGES_S: Final = (
    0.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 160.0, 220.0, 300.0, 400.0, 500.0, 600.0,
    750.0, 900.0, 1200.0, 1800.0, 3600.0,
)  # fmt: skip
"""Ages are learned in the steps between these; nothing is learned of older pages."""
STEPS: Final = len(AGES_S) - 1
TOUCHES_MAX: Final = 3
"""More uses than that tell nothing new."""
PROBABILITIES: Final = (0.3, 0.6)
"""Bounds between hints that are told apart; no hint is a class of its own."""
HINT_FACTORS: Final = (1.0, 0.4, 1.1, 2.0)
"""What the classes of hints promise, against all pages, before they have been seen."""
HINTS: Final = len(HINT_FACTORS)
CLASSES: Final = TOUCHES_MAX * HINTS
SLOT_S: Final = 10.0
"""Pages that were last used within one slot of time age together."""
POOLED: Final = 0.02
"""Weight, in every class, of what was learned of all classes."""
GUESSES: Final = tuple(0.002 / (1 + age_s / 100) for age_s in AGES_S[:STEPS])
GUESSED_WAITS: Final = 100.0
"""Uses per page-second that are assumed before anything is learned, and for how many of them."""
SLOTS_AT_ONCE: Final = 6
"""Bound of the time that is learned from in one step, after a pause."""
HORIZON_S: Final = 1800.0
"""Of the probability that is told to others."""


class RentParameters(GhostParameters, frozen=True):
    """Parameters of `rent`."""

    half_life_s: Annotated[float, Meta(ge=60, le=86_400)] = 900.0
    """Time in which half of what was learned is forgotten."""


class Rent(EvictionPolicy):
    """Classes, what they wait for, and the index. `heat` is the class of a run, `bias` what its
    uses are worth: its priority.
    """

    def __init__(self) -> None:
        """Start with the default parameters and a guess that older pages are used less."""
        self.parameters = RentParameters()
        self._ghosts = Ghosts()
        self.waiting: list[dict[int, int]] = [{} for _ in range(CLASSES)]
        """Pages of each class, in the pool or not, by the slot of their last use."""
        self._uses = [[0.0] * STEPS for _ in range(CLASSES)]
        self._waits = [[0.0] * STEPS for _ in range(CLASSES)]
        self._rates: list[list[float]] = []
        """Uses per page-second of each class and step of age."""
        self._index: list[list[float]] = []
        self._learned_s = 0.0
        self._refresh()

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        """One use, on top of those that are remembered."""
        self._learn(now_s)
        entry.bias = float(hints.priority)
        ghost = self._ghosts.take(keys)
        if ghost is not None:
            entry.heat, entry.touches, entry.touched_s = ghost.heat, ghost.touches, ghost.touched_s
            self._use(entry, ghost.pages, now_s, hints)
            return ghost.pages
        pages = page_count(keys)
        entry.touches, entry.touched_s = 1, now_s
        self._join(entry, pages, _hint_class(hints) or 0)
        return pages

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """One use more; within the same use a hint only changes the class."""
        self._learn(now_s)
        self._use(entry, len(entry), now_s, hints)

    def hinted(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """Its pages wait on, in the class that was said."""
        self._learn(now_s)
        said = _hint_class(hints)
        if said is not None:
            self._leave(entry, len(entry))
            self._join(entry, len(entry), said)
        entry.bias = float(hints.priority or entry.bias)

    def score(self, entry: Entry, now_s: float) -> float:
        """Uses per page-second that are to come, at most, by what they are worth."""
        self._learn(now_s)
        age_s, index = now_s - entry.touched_s, self._index[int(entry.heat)]
        worth = float(2.0**entry.bias)
        if age_s >= AGES_S[-1]:
            return worth * index[-1] * AGES_S[-1] / age_s
        step = bisect_right(AGES_S, age_s) - 1
        share = (age_s - AGES_S[step]) / (AGES_S[step + 1] - AGES_S[step])
        return worth * (index[step] + (index[step + 1] - index[step]) * share)

    def reuse_probability(self, entry: Entry, now_s: float) -> float | None:
        """By the rates of its class, over the next half hour."""
        start = now_s - entry.touched_s
        expected = 0.0
        for step, rate in enumerate(self._rates[int(entry.heat)]):
            overlap = min(start + HORIZON_S, AGES_S[step + 1]) - max(start, AGES_S[step])
            expected += rate * max(0.0, overlap)
        return 1.0 - exp(-expected)

    def evicted(self, entry: Entry, keys: bytes, now_s: float) -> None:
        """Remember the numbers; the pages wait on, for whom they come back tells."""
        self._ghosts.keep(keys, entry)

    def resize(self, pages: int) -> None:
        """Remember a multiple of what the pool holds."""
        self._ghosts.resize(pages * self.parameters.ghost_factor)

    def _use(self, entry: Entry, pages: int, now_s: float, hints: Hints) -> None:
        kind, since_s = int(entry.heat), entry.touched_s
        self._leave(entry, pages)
        said = _hint_class(hints)
        if is_new_use(entry, now_s, SAME_REQUEST_S):  # its least age
            if now_s - since_s < AGES_S[-1]:
                self._uses[kind][bisect_right(AGES_S, now_s - since_s) - 1] += pages
            said = said or 0
            entry.bias = 0.0
        entry.bias = float(hints.priority or entry.bias)
        self._join(entry, pages, kind % HINTS if said is None else said)

    def _leave(self, entry: Entry, pages: int) -> None:
        slots, slot = self.waiting[int(entry.heat)], int(entry.touched_s // SLOT_S)
        if slot in slots:
            slots[slot] -= pages

    def _join(self, entry: Entry, pages: int, hint_class: int) -> None:
        kind = (min(entry.touches, TOUCHES_MAX) - 1) * HINTS + hint_class
        entry.heat = float(kind)
        slots, slot = self.waiting[kind], int(entry.touched_s // SLOT_S)
        slots[slot] = slots.get(slot, 0) + pages

    def _learn(self, now_s: float) -> None:
        """Once a slot: what waits has waited so much longer."""
        if now_s < self._learned_s + SLOT_S:
            return
        passed_s = min(now_s - self._learned_s, SLOTS_AT_ONCE * SLOT_S)
        self._learned_s = now_s
        decay = 2.0 ** (-passed_s / self.parameters.half_life_s)
        for uses, waits, slots in zip(self._uses, self._waits, self.waiting, strict=True):
            uses[:] = [each * decay for each in uses]
            waits[:] = [each * decay for each in waits]
            for slot, pages in list(slots.items()):
                age_s = max(0.0, now_s - (slot + 0.5) * SLOT_S)
                if age_s >= AGES_S[-1] or pages <= 0:
                    del slots[slot]
                else:
                    waits[bisect_right(AGES_S, age_s) - 1] += pages * passed_s
        self._refresh()

    def _refresh(self) -> None:
        all_uses = [sum(each) for each in zip(*self._uses, strict=True)]
        all_waits = [sum(each) for each in zip(*self._waits, strict=True)]
        self._rates.clear()
        self._index.clear()
        for kind, (uses, waits) in enumerate(zip(self._uses, self._waits, strict=True)):
            factor = HINT_FACTORS[kind % HINTS]
            seen_uses, seen_waits = [], []
            for step in range(STEPS):
                pooled = (all_uses[step] + GUESSED_WAITS * GUESSES[step]) / (
                    all_waits[step] + GUESSED_WAITS
                )
                weight = POOLED * all_waits[step] + GUESSED_WAITS
                seen_uses.append(uses[step] + weight * pooled * factor)
                seen_waits.append(waits[step] + weight)
            self._rates.append([u / w for u, w in zip(seen_uses, seen_waits, strict=True)])
            self._index.append(_best_rates(seen_uses, seen_waits))


def _best_rates(uses: list[float], waits: list[float]) -> list[float]:
    """For each step the highest of uses / waits summed from it to any later one; then half."""
    best = []
    for step in range(STEPS):
        sums = zip(accumulate(uses[step:]), accumulate(waits[step:]), strict=True)
        best.append(max(used / waited for used, waited in sums))
    return [*best, best[-1] / 2]


def _hint_class(hints: Hints) -> int | None:
    """0 where hints say nothing is for the caller to choose: None."""
    chance = hints.reuse_probability
    if hints.session_closed:
        chance = 0.0
    elif hints.tool_call_s is not None:
        chance = 1.0
    return None if chance is None else 1 + bisect_right(PROBABILITIES, chance)
