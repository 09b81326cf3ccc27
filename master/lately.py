"""How fast something went lately: bytes a second, over windows of time. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

WINDOW_S: Final = 5.0


class Lately(msgspec.Struct, eq=False):
    """What was done of late: in this window, and in the one before."""

    since_s: float = 0.0
    size_bytes: int = 0
    before_bytes_per_s: float = 0.0

    def add(self, size_bytes: int, now_s: float) -> None:
        """So much is done now."""
        if now_s >= self.since_s + WINDOW_S:
            spent_s = now_s - self.since_s
            self.before_bytes_per_s = self.size_bytes / spent_s
            self.since_s, self.size_bytes = now_s, 0
        self.size_bytes += size_bytes

    def bytes_per_s(self, now_s: float) -> float:
        """The mean of the last one to two windows."""
        spent_s = now_s - self.since_s
        if spent_s >= WINDOW_S:
            return self.size_bytes / spent_s
        return (self.size_bytes + self.before_bytes_per_s * (WINDOW_S - spent_s)) / WINDOW_S
