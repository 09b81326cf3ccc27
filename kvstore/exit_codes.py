"""Exit codes of every program of ours, by what the caller can do about it. Never renumbered."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvstore import errors
from kvstore.errors import KVStoreError


class ExitCode(IntEnum):
    """What a program of ours ends with."""

    OK = 0
    FAILED = 1
    """It ran, and what it checked does not hold."""
    USAGE = 2
    """An option, a configuration file or the environment must be fixed."""
    UNAVAILABLE = 3
    """A peer cannot be reached or is not ready: try again."""
    DENIED = 4
    """Wrong secret, role, cluster or protocol version."""
    IN_USE = 5
    """A data folder or a segment belongs to a running process."""
    NO_SPACE = 6
    """Too little memory or disk for what was asked."""
    STALE = 7
    """Another master leads."""
    CHILD_DIED = 8
    """A part of the standalone pool ended by itself."""
    INTERNAL = 70
    """Our own bug."""


# The first class that fits counts, so the narrower come first.
_BY_ERROR: Final[tuple[tuple[type[KVStoreError], ExitCode], ...]] = (
    (errors.SegmentInUse, ExitCode.IN_USE),
    (errors.OutOfSpace, ExitCode.NO_SPACE),
    (errors.StaleEpoch, ExitCode.STALE),
    (errors.AccessDenied, ExitCode.DENIED),
    (errors.VersionMismatch, ExitCode.DENIED),
    (errors.MalformedMessage, ExitCode.DENIED),
    (errors.Unavailable, ExitCode.UNAVAILABLE),
    (errors.Throttled, ExitCode.UNAVAILABLE),
    (errors.Fenced, ExitCode.UNAVAILABLE),
    (errors.CallerError, ExitCode.USAGE),
)


class ProgramDied(KVStoreError):
    """A program that was started for this one ended by itself."""

    code = "program_died"

    def __init__(self, text: str, returncode: int) -> None:
        """`returncode` as subprocess has it: that of its end becomes the one of ours."""
        super().__init__(text)
        self.exit_code = returncode if returncode > 0 else int(ExitCode.CHILD_DIED)


def exit_code_of(error: KVStoreError) -> int:
    """The exit code that says what can be done about this error."""
    if isinstance(error, ProgramDied):
        return error.exit_code
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return ExitCode.INTERNAL
