"""Tiers, and the life of an extent as the master sees it (a table, drawn in the docs)."""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from typing import Final

from kvstore.errors import BadValue


class Tier(StrEnum):
    """Media of a segment, fastest first."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


_TIERS: Final = frozenset(("", *Tier))


def check_tier(tier: str) -> str:
    """BadValue unless it is the name of a tier, or empty: none in particular."""
    if tier not in _TIERS:
        raise BadValue("tier", tier, f"one of {', '.join(Tier)}")
    return tier


class ExtentState(IntEnum):
    """State of an extent in the master's allocator; one byte a slot."""

    FREE = 0
    """May be planned."""
    RESERVED = 1
    """A put plan holds it; bytes are not yet trusted."""
    SEALED = 2
    """Bytes verified by the worker; the only state that lookups return (I3)."""
    RETIRED = 3
    """Out of every lookup; leases may still run, the worker has not confirmed the free."""
    QUARANTINED = 4
    """Its put failed; the worker has not confirmed the fence (I6)."""


class ExtentEvent(Enum):
    """What can happen to an extent."""

    PLANNED = "planned"
    SEALED = "sealed"
    PLAN_FAILED = "plan failed"
    RETIRED = "retired"
    FREED = "freed"
    FENCED = "fenced"
    ADOPTED = "adopted"
    UNACCOUNTED = "unaccounted"


EXTENT_TRANSITIONS: Final[dict[tuple[ExtentState, ExtentEvent], ExtentState]] = {
    (ExtentState.FREE, ExtentEvent.PLANNED): ExtentState.RESERVED,
    (ExtentState.RESERVED, ExtentEvent.SEALED): ExtentState.SEALED,
    (ExtentState.RESERVED, ExtentEvent.PLAN_FAILED): ExtentState.QUARANTINED,
    (ExtentState.SEALED, ExtentEvent.RETIRED): ExtentState.RETIRED,
    (ExtentState.RETIRED, ExtentEvent.FREED): ExtentState.FREE,
    (ExtentState.QUARANTINED, ExtentEvent.FENCED): ExtentState.FREE,
    # A worker's inventory after its registration: proven records, and everything else it lists.
    (ExtentState.FREE, ExtentEvent.ADOPTED): ExtentState.SEALED,
    (ExtentState.FREE, ExtentEvent.UNACCOUNTED): ExtentState.QUARANTINED,
}
