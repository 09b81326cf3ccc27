"""How a server tells where it really listens: a small JSON file in its data folder.

Owns the file's form. Ports may be 0, so only the running process knows them; `kvharbor up`, tests
and operators read them here. The file is written whole or not at all, after the process listens,
and removed when it ends cleanly; after a kill it stays, so readers compare `pid`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Announcement(msgspec.Struct, frozen=True):
    """One running server. Addresses are text: host:port, or a path for unix sockets."""

    role: str
    """master or worker; names the file."""
    pid: int
    cluster: str
    listen: str
    admin: str | None = None
    unix: str | None = None
    epoch: int | None = None
    """Of a master: the epoch that it leads in; None while it does not lead."""
    worker: str | None = None
    """Of a worker: its name."""


def announcement_path(data_dir: Path, role: str) -> Path:
    """Where the server of that role in this data folder announces itself."""
    return data_dir / f"{role}.json"


def announce(data_dir: Path, announcement: Announcement) -> None:
    """Write the file, replacing what an earlier process left."""
    path = announcement_path(data_dir, announcement.role)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(msgspec.structs.asdict(announcement)) + "\n")
    fresh.rename(path)


def withdraw(data_dir: Path, role: str) -> None:
    """Remove this process's announcement; another's is left alone."""
    found = read_announcement(data_dir, role)
    if found is not None and found.pid == os.getpid():
        announcement_path(data_dir, role).unlink(missing_ok=True)


def read_announcement(data_dir: Path, role: str) -> Announcement | None:
    """What lies there, or None when nothing readable does. The process may be gone."""
    try:
        text = announcement_path(data_dir, role).read_text()
        return msgspec.convert(json.loads(text), Announcement)
    except (OSError, ValueError):  # msgspec's and json's errors are ValueErrors
        return None
