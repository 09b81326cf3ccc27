"""How a test's pool comes to offer every transport. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

TRANSPORTS: Final = ("shm", "tcp", "mooncake")


def every_transport(folder: Path) -> str:
    """The option of `kvharbor up` that says so; its file lies beside the pool's data folder."""
    config = folder.with_suffix(".toml")
    config.write_text(f"[worker]\ntransports = {list(TRANSPORTS)}\n")
    return f"--config={config}"
