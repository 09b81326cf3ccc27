"""The clock port: monotonic seconds. Shells hold a `SystemClock`; cores are told `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time. No wall clock decides anything (I26)."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """CLOCK_BOOTTIME of this host: like its monotonic clock, but it also counts the time that the
    host was suspended for. A leader that slept so must know that its lease has ended (I10).
    """

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
