"""Pool time: seconds that masters have led this pool in all, a clock that no host's clock touches.

Moments of it are durable. A new master goes on from the last one that was stored, so that lives of
pages go on where they were, and the time in which nobody led counts for nothing. Owns the key
`clock`.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from kvstore.errors import CorruptPage

KEY: Final = "clock"
_SECONDS: Final = struct.Struct("<d")
SECONDS_MAX: Final = 1e10
"""Three hundred years: no pool is older, and moments stay apart."""


class Life(msgspec.Struct, frozen=True, gc=False):
    """How long pages live: the TTL that each use gives them, and two moments."""

    ttl_s: float
    created_s: float
    expires_s: float


class PoolTime:
    """Between this master's monotonic clock and pool time."""

    __slots__ = ("_ahead_s", "is_lost", "restored_s")

    def __init__(self) -> None:
        """Nobody has led before."""
        self.restored_s = 0.0
        """Pool time at which this master begins."""
        self.is_lost = True
        """Whether no moment was found in the store: then other values tell how late it is."""
        self._ahead_s = 0.0

    def restore(self, value: bytes) -> None:
        """Go on from a durable value; CorruptPage when it is not ours."""
        if len(value) != _SECONDS.size:
            raise CorruptPage(f"metadata value {KEY}: got {len(value)} bytes, want {_SECONDS.size}")
        (seconds,) = _SECONDS.unpack(value)
        if not 0 <= seconds <= SECONDS_MAX:
            raise CorruptPage(f"metadata value {KEY}: got {seconds} s, want 0 to {SECONDS_MAX}")
        self.go_on_from(seconds)

    def go_on_from(self, seconds: float) -> None:
        """Begin at this moment of pool time."""
        self.restored_s, self.is_lost = seconds, False

    def start(self, now_s: float) -> None:
        """The master begins, at this moment of its own clock."""
        self._ahead_s = self.restored_s - now_s

    def value(self, now_s: float) -> bytes:
        """What is stored now."""
        return _SECONDS.pack(self.stored_s(now_s))

    def stored_s(self, at_s: float) -> float:
        """A moment in pool time."""
        return at_s + self._ahead_s

    def own_s(self, at_s: float) -> float:
        """A stored moment on this master's clock."""
        return at_s - self._ahead_s

    def stored(self, life: Life) -> Life:
        """A life in pool time."""
        return Life(life.ttl_s, self.stored_s(life.created_s), self.stored_s(life.expires_s))

    def own(self, life: Life) -> Life:
        """A stored life on this master's clock."""
        return Life(life.ttl_s, self.own_s(life.created_s), self.own_s(life.expires_s))
