"""Files whose lock says that a process works in their folder, and that name it.

The lock belongs to the open file and ends with the last process that has it, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError, SegmentInUse

PATIENCE_S: Final = 3.0
"""How long those who inherited the lock of a process that was killed may take to be gone."""
POLL_S: Final = 0.02


def hold(path: Path, holder: str) -> int:
    """Take the lock of this file; the descriptor that holds it until every copy is closed.

    SegmentInUse, naming folder and process, where another one has it, who is called `holder`.
    ConfigError when the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from error
    deadline = time.monotonic() + PATIENCE_S
    while not _locked(descriptor):
        named = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        if Path("/proc", named or "none").exists() or time.monotonic() >= deadline:
            os.close(descriptor)
            raise SegmentInUse(
                f"data folder {path.parent}: {holder} runs from it (process {named})"
            )
        time.sleep(POLL_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
