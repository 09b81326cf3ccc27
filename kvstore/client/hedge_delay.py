"""When a read is hedged, and how often that may be: what reads of its size took, and a budget.

Pure: told how long reads took, asked how long to wait. Knows no threads, transports or clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvstore import limits

SAMPLES: Final = 256
"""Remembered of reads of about one size."""
SAMPLES_MIN: Final = 64
"""Before so many nobody can tell what is late."""
LOOK_EVERY: Final = 16
"""Samples between two sorts."""
QUANTILE: Final = 0.99
MEDIANS_MAX: Final = 8
"""Nor later than so many medians: a worker that is late more often than one time in a hundred
would else set the measure of lateness."""
DELAY_MIN_S: Final = 0.5e-3
DELAY_MAX_S: Final = limits.READ_STALL_MAX_S / 2
SHARE_MAX: Final = 0.05
"""Of the reads that could be hedged."""
BURST_MAX: Final = 8.0
"""Hedges in a row, where there were few for long."""


class HedgeDelay:
    """How late a read may be, of those that bring about as many bytes (within a power of two)."""

    def __init__(self) -> None:
        """Know nothing."""
        self._took_s: deque[float] = deque(maxlen=SAMPLES)
        self._since_look = 0
        self._delay_s: float | None = None

    def note(self, seconds: float) -> None:
        """One read took so long."""
        self._took_s.append(seconds)
        self._since_look += 1
        if len(self._took_s) >= SAMPLES_MIN and self._since_look >= LOOK_EVERY:
            self._since_look = 0
            self._delay_s = _delay_of(sorted(self._took_s))

    @property
    def delay_s(self) -> float | None:
        """After how long another replica is asked; None while there are too few samples."""
        return self._delay_s


def _delay_of(ordered: list[float]) -> float:
    """The delay after reads that took so long, in ascending order."""
    late_s = ordered[int(len(ordered) * QUANTILE)]
    median_s = ordered[len(ordered) // 2]
    return min(max(min(late_s, MEDIANS_MAX * median_s), DELAY_MIN_S), DELAY_MAX_S)


class HedgeBudget:
    """Keeps hedges to SHARE_MAX of the reads, so that a slow pool gets no second load on top."""

    def __init__(self) -> None:
        """One hedge is there from the start."""
        self._left = 1.0

    def earn(self) -> None:
        """A read that could be hedged has begun."""
        self._left = min(self._left + SHARE_MAX, BURST_MAX)

    def spend(self) -> bool:
        """Take one hedge, if there is one."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
