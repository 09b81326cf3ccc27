"""One segment as the master sees it: whose it is, whether it may be read and filled, its space."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvstore.replica import ExtentState
from master.extent_allocator import ExtentAllocator

if TYPE_CHECKING:
    from kvstore.segment import Geometry
    from kvstore.wire.messages.common import SegmentRef


class SegmentState(Enum):
    """Life of a segment."""

    JOINING = "joining"
    """Registered; its inventory is being compared. Neither read nor filled."""
    LIVE = "live"
    """May be read; filled while its worker is connected."""
    LOST = "lost"
    """Its worker is gone: copies are misses at once, cleaned away bit by bit."""


class Segment:
    """A stretch of memory that a worker lends."""

    __slots__ = (
        "allocator",
        "free_not_before_s",
        "held_bytes",
        "id",
        "incarnation",
        "is_filled",
        "lost_at_s",
        "readable",
        "ref",
        "state",
        "worker",
    )

    def __init__(self, segment: str, worker: str, incarnation: int, geometry: Geometry) -> None:
        """Start joining, with nothing known to be in it."""
        self.id = segment
        self.worker = worker
        self.incarnation = incarnation
        self.allocator = ExtentAllocator(geometry)
        self.state = SegmentState.JOINING
        self.readable = False
        """LIVE, and so lookups may return it. Kept apart because every lookup asks."""
        self.ref: SegmentRef | None = None
        """What clients are told; None before the first registration is complete."""
        self.held_bytes = 0
        """Quarantined bytes that wait only for a reader's lock."""
        self.free_not_before_s = 0.0
        """No extent that an inventory lists is freed before: old leases may run (I9)."""
        self.lost_at_s = 0.0

    @property
    def geometry(self) -> Geometry:
        """Its sizes."""
        return self.allocator.geometry

    def quarantined_bytes(self) -> int:
        """Bytes whose put failed and whose fence is not confirmed, but for those only held."""
        return self.allocator.bytes_in[ExtentState.QUARANTINED] - self.held_bytes
