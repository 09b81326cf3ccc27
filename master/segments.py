"""One segment as the master sees it: whose it is, whether it may be read and filled, its space."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from master.extent_allocator import ExtentAllocator

if TYPE_CHECKING:
    from kvstore.segment import Geometry
    from kvstore.wire.messages.common import SegmentRef
    from master.events import SessionId


class SegmentState(Enum):
    """Life of a segment."""

    JOINING = "joining"
    """Registered; its inventory is being compared. Neither read nor filled."""
    LIVE = "live"
    """May be read; filled while its worker is connected."""
    LOST = "lost"
    """Its worker is gone: copies are misses at once, cleaned away bit by bit."""


_LIVE: Final = SegmentState.LIVE


class Segment:
    """A stretch of memory that a worker lends."""

    __slots__ = (
        "allocator",
        "draining",
        "free_not_before_s",
        "held",
        "host",
        "id",
        "incarnation",
        "orders_in_flight",
        "readable",
        "ref",
        "registration",
        "session",
        "state",
        "worker",
    )

    def __init__(self, ref: SegmentRef) -> None:
        """Start joining, with nothing known to be in it."""
        self.id = ref.segment
        self.worker = ref.worker
        self.host = ref.host
        self.incarnation = ref.incarnation
        self.ref = ref
        """What clients are told."""
        self.allocator = ExtentAllocator(ref.geometry)
        self.state = SegmentState.JOINING
        self.readable = False
        """Whether lookups may return it. Kept apart from `state` because every lookup asks."""
        self.session: SessionId | None = None
        """Its worker's control connection; None while the worker is away."""
        self.registration = 0
        """Counts registrations and their ends: orders of an earlier one are void."""
        self.orders_in_flight = 0
        self.held: dict[int, int] = {}
        """Bytes by offset of quarantined extents that wait only for a reader's lock."""
        self.free_not_before_s = 0.0
        """No extent that an inventory lists is freed before: old leases may run (I9)."""
        self.draining = False
        """Chunks are being emptied so that another class can have their frames."""

    @property
    def geometry(self) -> Geometry:
        """Its sizes."""
        return self.allocator.geometry

    def keep_until(self, at_s: float) -> None:
        """Free nothing that the next inventory leaves over before this time (I9).

        While orders can be given, each knows its own time; those of now are void by then.
        """
        if not self.takes_puts:
            self.free_not_before_s = max(self.free_not_before_s, at_s)

    @property
    def takes_puts(self) -> bool:
        """Whether extents may be planned here: reconciled, and its worker is connected."""
        return self.state is _LIVE and self.session is not None
