"""Small files that only their owner may read: secrets, passwords, keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE_BYTES_MAX: Final = 64 << 10


def read_private(path: Path, what: str) -> bytes:
    """The content without white space around it; ConfigError when others may read it, too."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(PRIVATE_BYTES_MAX).strip()
    except OSError as error:
        raise ConfigError(f"{what} file {path}: cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"{what} file {path}: mode {mode & 0o777:04o} lets others read it: chmod 600 it"
        )
    return content
