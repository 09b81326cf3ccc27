"""Writes the core's last events to a file, a few at a time: the loop goes on meanwhile (I27)."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Final

from kvstore.event_log import event_line, header_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from master.events import Event

EVENTS_AT_ONCE: Final = 64


async def dump_events(
    path: Path, entries: Iterable[tuple[float, Event]], **facts: str | float
) -> None:
    """Replace the file at `path` by these events; `facts` go into its header."""
    kept = iter(list(entries))  # the ring turns on while we write
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    # Requests name keys and tenants: for this user only.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(header_line(**facts))
        while some := list(itertools.islice(kept, EVENTS_AT_ONCE)):
            file.writelines(event_line(now_s, event) for now_s, event in some)
            await asyncio.sleep(0)
    fresh.rename(path)
