"""The clock of the shells."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock

if TYPE_CHECKING:
    import pytest


def test_time_goes_on_while_the_host_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_MONOTONIC: 100.0, time.CLOCK_BOOTTIME: 3700.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: clocks[time.CLOCK_MONOTONIC])
    assert SystemClock().now_s() == 3700.0
