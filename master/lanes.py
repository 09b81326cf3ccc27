"""What one worker may be asked to move, or to copy, at once: how often, bytes in flight, a budget.

A worker has one lane for moves between its segments, and one for copies, which every copy takes at
both ends. Must not know what is moved.
"""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from master.budget import Budget

IN_FLIGHT_MAX: Final = 4
BYTES_IN_FLIGHT_MAX: Final = 64 << 20
"""Of one lane."""
REST_S: Final = 1.0
"""A worker that stored nothing of a move is asked for no other so long."""


class Lane(msgspec.Struct, eq=False):
    """What is in flight, and when more may be."""

    moves: int = 0
    size_bytes: int = 0
    """In flight."""
    budget: Budget = msgspec.field(default_factory=Budget)
    rests_until_s: float = 0.0

    def free_at_s(self, now_s: float, bytes_per_s: float) -> float:
        """When another move may begin: `now_s`, later, or (infinity) once one has ended."""
        if self.moves >= IN_FLIGHT_MAX or self.size_bytes >= BYTES_IN_FLIGHT_MAX:
            return inf
        return max(self.budget.free_at_s(now_s, bytes_per_s), self.rests_until_s)

    def take(self, size_bytes: int) -> None:
        """A move of so much begins."""
        self.moves += 1
        self.size_bytes += size_bytes
        self.budget.spend(size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """It has ended."""
        self.moves -= 1
        self.size_bytes -= size_bytes
