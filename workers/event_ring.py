"""The last events of a state machine, for replay after a fault. Bounded in number and in bytes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore import limits
from workers.events import IngestRequested

if TYPE_CHECKING:
    from workers.events import Event

COLUMN_BYTES_MAX: Final = 4 * limits.MIB
"""Of keys in all entries; an Ingest's other columns are about as long again."""


class EventRing:
    """(now, event) of the newest events; the oldest make room."""

    def __init__(self) -> None:
        """Nothing has happened."""
        self.entries: deque[tuple[float, Event]] = deque()
        self._columns = 0
        """Bytes of keys in the entries: what an event keeps alive beyond a fixed measure."""

    def append(self, now: float, event: Event) -> None:
        """Remember an event that is about to be handled."""
        entries = self.entries
        entries.append((now, event))
        if isinstance(event, IngestRequested):
            self._columns += len(event.message.keys)
        while len(entries) > limits.EVENT_RING_ENTRIES or self._columns > COLUMN_BYTES_MAX:
            _, old = entries.popleft()
            if isinstance(old, IngestRequested):
                self._columns -= len(old.message.keys)
