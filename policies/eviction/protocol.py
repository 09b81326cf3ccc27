"""What an eviction policy decides: scores. The caller finds victims and obeys leases and leaves."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Scores of runs of pages; the lowest goes first. Times in seconds of one monotonic clock.

    Told of what happens, it proposes; it reads no clock and sees no page.
    """

    def entered(self, key: bytes, now_s: float) -> float:
        """Score of a run that was just put; `key` is its first page."""
        ...

    def touched(self, score: float, now_s: float) -> float:
        """Score after an access, for a run that had `score`."""
        ...

    def evicted(self, key: bytes, score: float) -> None:
        """Pages from `key` on left with this score; they may come back."""
        ...
