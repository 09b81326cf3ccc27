"""LRFU in log form: recency and frequency in one number that never needs ageing.

Lee et al., "LRFU: a spectrum of policies" (IEEE ToC 2001), with the combined count C kept as
score = H * log2(C) + the time at which C was taken. A count taken at t weighs 2**(-(now - t)/H)
now, so scores of different runs compare without being brought up to date: one float a run.

Scores of evicted runs are remembered (ghosts): without them frequency is worth nothing, because
what is reused is away in between.
"""

from __future__ import annotations

from math import log2
from typing import Final

HALF_LIFE_S: Final = 240.0
"""About twice the median time until a page is used again, on traces of chats."""
GHOSTS_MAX: Final = 65_536


class AgedFrequency:
    """Exponentially aged access counts, with ghosts."""

    def __init__(self, half_life_s: float = HALF_LIFE_S, ghosts_max: int = GHOSTS_MAX) -> None:
        """Count an access half after `half_life_s`; remember up to `ghosts_max` scores."""
        self.half_life_s = half_life_s
        self._ghosts_max = max(2, ghosts_max)
        # Two generations: when the young one is full the old one is forgotten at once, which
        # bounds both at no cost per entry.
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}

    @property
    def ghosts(self) -> int:
        """How many scores are remembered."""
        return len(self._young) + len(self._old)

    def entered(self, key: bytes, now_s: float) -> float:
        """One access, on top of what is remembered of `key`."""
        score = self._young.pop(key, None)
        if score is None:
            score = self._old.pop(key, None)
        return now_s if score is None else self.touched(score, now_s)

    def touched(self, score: float, now_s: float) -> float:
        """C' = 1 + C * 2**((t - now)/H), in log form; exact for any gap between the two."""
        gap = (now_s - score) / self.half_life_s
        if gap >= 0:
            return now_s + self.half_life_s * log2(1.0 + 2.0**-gap)
        return score + self.half_life_s * log2(1.0 + 2.0**gap)

    def evicted(self, key: bytes, score: float) -> None:
        """Remember the score, at the cost of the oldest ones."""
        self._young[key] = score
        if len(self._young) * 2 >= self._ghosts_max:
            self._old, self._young = self._young, {}
