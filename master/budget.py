"""A budget in bytes a second: what may be spent now, and when more may be. Knows no clock."""

from __future__ import annotations

from typing import Final

import msgspec

BURST_S: Final = 0.25
"""Seconds of a budget that may be spent at once."""


class Budget(msgspec.Struct, eq=False):
    """What is left of it."""

    left_bytes: float = 0.0
    """Below 0 after a large piece, until that is made up for."""
    at_s: float = 0.0
    """When so much was left."""

    def free_at_s(self, now_s: float, bytes_per_s: float) -> float:
        """When the next piece may be spent, of whatever size: `now_s`, or later."""
        earned = (now_s - self.at_s) * bytes_per_s
        self.left_bytes = min(self.left_bytes + earned, BURST_S * bytes_per_s)
        self.at_s = now_s
        return now_s if self.left_bytes > 0 else now_s + (1.0 - self.left_bytes) / bytes_per_s

    def spend(self, size_bytes: int) -> None:
        """Take a piece out."""
        self.left_bytes -= size_bytes
