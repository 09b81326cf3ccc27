"""The last events of a state machine, for replay after a fault. Bounded in number and in bytes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore import limits
from workers.events import IngestRequested

if TYPE_CHECKING:
    from workers.events import Event

EVENT_BYTES: Final = 512
RING_BYTES_MAX: Final = 16 * limits.MIB


class EventRing:
    """(now, event) of the newest events; the oldest make room."""

    def __init__(self) -> None:
        """Nothing has happened."""
        self.entries: deque[tuple[float, Event]] = deque()
        self._bytes = 0

    def append(self, now: float, event: Event) -> None:
        """Remember an event that is about to be handled."""
        self.entries.append((now, event))
        self._bytes += _weight(event)
        while len(self.entries) > limits.EVENT_RING_ENTRIES or self._bytes > RING_BYTES_MAX:
            self._bytes -= _weight(self.entries.popleft()[1])


def _weight(event: Event) -> int:
    """Roughly the memory that an event keeps alive, in bytes."""
    if isinstance(event, IngestRequested):
        return EVENT_BYTES + 2 * len(event.message.keys)
    return EVENT_BYTES
