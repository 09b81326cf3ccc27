"""How fast something went lately: bytes a second, over windows of time. Pure."""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

WINDOW_S: Final = 5.0
BEGINNING_S: Final = 1.0
"""The first bytes of all are taken to have needed so long, at least."""


class Lately(msgspec.Struct, eq=False):
    """What was done of late: in this window, and in the one before."""

    since_s: float = inf
    """Beginning of this window; infinity before there was anything."""
    size_bytes: int = 0
    before_bytes_per_s: float | None = None
    """None: this window is the first."""

    def add(self, size_bytes: int, now_s: float) -> None:
        """So much is done now."""
        if self.since_s == inf:
            self.since_s = now_s
        elif now_s >= self.since_s + WINDOW_S:
            self.before_bytes_per_s = self.size_bytes / (now_s - self.since_s)
            self.since_s, self.size_bytes = now_s, 0
        self.size_bytes += size_bytes

    def bytes_per_s(self, now_s: float) -> float:
        """The mean of the last one to two windows, or since it began."""
        if self.since_s == inf:
            return 0.0
        spent_s = now_s - self.since_s
        if self.before_bytes_per_s is None or spent_s >= WINDOW_S:
            return self.size_bytes / max(BEGINNING_S, spent_s)
        return (self.size_bytes + self.before_bytes_per_s * (WINDOW_S - spent_s)) / WINDOW_S
