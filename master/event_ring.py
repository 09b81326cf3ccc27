"""The last events, for the story behind a fault and for replay. Bounded in number and in bytes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.wire.messages.puts import BeginPut, Sealed
from master.events import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.events import Event

EVENT_BYTES: Final = 256
RING_BYTES_MAX: Final = 16 * limits.MIB


class EventRing:
    """(now, event) of the newest events; the oldest make room."""

    __slots__ = ("_bytes", "_entries")

    def __init__(self) -> None:
        """Nothing has happened."""
        self._entries: deque[tuple[float, Event, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        return ((now, event) for now, event, _ in self._entries)

    def append(self, now: float, event: Event) -> None:
        """Remember an event that is about to be handled."""
        weight = _weight(event)
        self._entries.append((now, event, weight))
        self._bytes += weight
        while len(self._entries) > limits.EVENT_RING_ENTRIES or self._bytes > RING_BYTES_MAX:
            self._bytes -= self._entries.popleft()[2]


def _weight(event: Event) -> int:
    """Roughly the memory that an event keeps alive, in bytes."""
    if not isinstance(event, Request):
        return EVENT_BYTES
    message = event.message
    if isinstance(message, BeginPut):
        return EVENT_BYTES + sum([len(chain.keys) for chain in message.chains])
    if isinstance(message, Sealed):
        return EVENT_BYTES + 2 * len(message.keys)
    return EVENT_BYTES + len(getattr(message, "keys", b""))
