"""What tests do with processes: stopping them in a way that can be told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

STOP_S: Final = 30.0
POLL_S: Final = 0.005


def stop(pid: int) -> None:
    """SIGSTOP; returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    ends_s = time.monotonic() + STOP_S
    while not all(map(_is_stopped, threads)):
        assert time.monotonic() < ends_s, f"process {pid} does not stop"
        time.sleep(POLL_S)


def _is_stopped(stat: Path) -> bool:
    try:
        state = stat.read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # a thread that ended just before
        return True
    return state in "TZX"
