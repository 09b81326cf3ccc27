"""A circuit breaker: whether the pool is worth asking now, from what became of earlier calls.

Pure: times are told. An engine whose pool is away or slow pays for one timeout, and then computes
as if it had none, until one call that is let through finds the pool well again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
LATE_MAX: Final = 8
"""Answers in a row that came too late to be of use, which count as one failure."""


class Circuit(StrEnum):
    """What is known of the pool."""

    CLOSED = "closed"
    """It answers: calls go through."""
    OPEN = "open"
    """It did not: nothing goes through until a pause has passed."""
    TRYING = "trying"
    """The pause has passed: one call is under way to find out."""


class Happening(StrEnum):
    """What a circuit hears of."""

    DUE = "due"
    """Somebody wants to call, and the pause has passed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"


NEXT: Final[dict[tuple[Circuit, Happening], Circuit]] = {
    (Circuit.CLOSED, Happening.SUCCEEDED): Circuit.CLOSED,
    (Circuit.CLOSED, Happening.FAILED): Circuit.OPEN,
    (Circuit.OPEN, Happening.DUE): Circuit.TRYING,
    # Calls that had begun before the circuit opened; only a try may close it.
    (Circuit.OPEN, Happening.SUCCEEDED): Circuit.OPEN,
    (Circuit.OPEN, Happening.FAILED): Circuit.OPEN,
    (Circuit.TRYING, Happening.SUCCEEDED): Circuit.CLOSED,
    (Circuit.TRYING, Happening.FAILED): Circuit.OPEN,
}
"""CLOSED is never DUE: calls go through without asking the table. Nor is TRYING: one is enough."""


class Breaker:
    """The circuit of one pool. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        """Begin closed: the first call finds out."""
        self.circuit = Circuit.CLOSED
        self.opened = 0
        """How often it has opened."""
        self._pause_s = PAUSE_MIN_S
        self._due_s = 0.0
        self._late = 0

    def lets_through(self, now_s: float) -> bool:
        """Whether to call now. Who is let through must tell what became of the call."""
        if self.circuit is Circuit.OPEN and now_s >= self._due_s:
            self._go(Happening.DUE, now_s)
            return True
        return self.circuit is Circuit.CLOSED

    def is_closed(self) -> bool:
        """Whether calls go through; asking begins no try."""
        return self.circuit is Circuit.CLOSED

    def succeeded(self, now_s: float) -> None:
        """A call was answered; it says nothing of those that somebody waits for."""
        self._go(Happening.SUCCEEDED, now_s)

    def in_time(self, now_s: float) -> None:
        """An answer came while it was waited for."""
        self._late = 0
        self.succeeded(now_s)

    def failed(self, now_s: float) -> None:
        """A call was not answered, or by an error that time may change."""
        self._late = 0
        self._go(Happening.FAILED, now_s)

    def late(self, now_s: float) -> None:
        """An answer was no longer waited for; some in a row count as a failure."""
        self._late += 1
        if self._late >= LATE_MAX:
            self.failed(now_s)

    def _go(self, happening: Happening, now_s: float) -> None:
        before, self.circuit = self.circuit, NEXT[self.circuit, happening]
        if self.circuit is Circuit.OPEN and before is not Circuit.OPEN:
            self.opened += 1
            self._due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        elif self.circuit is Circuit.CLOSED and before is Circuit.TRYING:
            self._pause_s = PAUSE_MIN_S
