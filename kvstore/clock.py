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
    """CLOCK_MONOTONIC of this host."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()
