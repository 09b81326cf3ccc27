"""What a master is: the words by which masters, commands and metrics tell it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

IN_DOUBT: Final = "in doubt"
"""What a leader says that it is while its lease may have ended."""


class Standing(StrEnum):
    """What a master is."""

    STANDBY = "standby"
    """Another leads, or nobody, or it is unknown who does."""
    LOADING = "loading"
    """It won, and reads the metadata."""
    LEADING = "leading"
    """It serves; while its lease is doubtful, lookups alone."""
    STOPPED = "stopped"
