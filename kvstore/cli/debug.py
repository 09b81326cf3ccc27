"""Asks a running master on this host for its last events.

The way is a signal and a file in the data folder: what the events name is for the pool's own user,
so it goes over no socket.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from kvstore.announcement import read_announcement
from kvstore.cli.operator import Operator
from kvstore.cli.standalone import reachable
from kvstore.errors import ConfigError, DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

EVENTS_FILE: Final = "master.events.jsonl"
DUMP_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.02


def dump_master(data_dir: Path, secret: bytes | None) -> Path:
    """Make the master of this data folder write its events; returns the file."""
    found = read_announcement(data_dir, "master")
    if found is None:
        raise Unavailable(f"{data_dir}: no master runs from this data folder")
    if found.epoch is None:
        raise Unavailable(f"{found.listen} does not lead: it has no events")
    # A killed master's number may belong to a stranger by now. The one that answers at the
    # announced address in the announced epoch is the one that wrote the announcement.
    with Operator(reachable(found.listen), secret, found.cluster) as operator:
        epoch = operator.status().epoch
    if epoch != found.epoch:
        raise ConfigError(f"{found.listen} is a master of epoch {epoch}, not of {found.epoch}")
    path = data_dir / EVENTS_FILE
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    os.kill(found.pid, signal.SIGUSR1)
    deadline = time.monotonic() + DUMP_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{path} was not written within {DUMP_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    return path
