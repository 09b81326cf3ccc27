"""How far each page of one part of a put has come. Owns the states; knows no messages or time."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.client.writes import PartSource


class PageState(IntEnum):
    """What is known of one part of one page; one byte each."""

    PENDING = 0
    STORED = 1
    PRESENT = 2
    REFUSED = 3


PENDING: Final = int(PageState.PENDING)
_PENDING: Final = bytes((PENDING,))
STORED: Final = int(PageState.STORED)
"""As plain numbers: they are looked at in every put."""


class PartProgress:
    """Progress of one part of a batch of pages."""

    __slots__ = ("reasons", "retry_after_s", "source", "states", "tries")

    def __init__(self, source: PartSource, pages: int) -> None:
        """Every page is pending."""
        self.source = source
        self.states = bytearray(pages)
        self.tries = bytearray(pages)
        self.reasons = bytearray(pages)
        """Outcome of the last refusal or failure, for the day that no try is left."""
        self.retry_after_s = 0.0

    def pending(self) -> list[tuple[int, int]]:
        """Stretches [start, stop) of pages still to be stored."""
        states, pages = self.states, len(self.states)
        found: list[tuple[int, int]] = []
        start = states.find(PENDING)
        while start >= 0:
            stop = pages - len(states[start:].lstrip(_PENDING))
            found.append((start, stop))
            start = states.find(PENDING, stop)
        return found

    def refuse_pending(self, reason: int | None = None) -> None:
        """Give up on what is still pending, for `reason` or each page's own last one."""
        for start, stop in self.pending():
            for page in range(start, stop):
                self.states[page] = PageState.REFUSED
                if reason is not None:
                    self.reasons[page] = reason
