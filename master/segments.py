"""One segment as the master sees it: whose it is, whether it may be read and filled, its space."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from kvstore.replica import Tier
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


class Medium(Enum):
    """What a segment's worker says of its medium."""

    SERVING = "serving"
    READ_ONLY = "read_only"
    """Copies can be read; nothing is planned here."""
    FAILED = "failed"
    """The segment is LOST although its worker is there."""


_LIVE: Final = SegmentState.LIVE
_SERVING: Final = Medium.SERVING
REASON_CHARS_MAX: Final = 512
RANKS: Final = {tier: rank for rank, tier in enumerate(Tier)}
"""Tiers by speed: the lower one is the faster one."""


class Segment:
    """A stretch of memory that a worker lends."""

    __slots__ = (
        "allocator",
        "demoted_bytes",
        "drained",
        "draining",
        "free_not_before_s",
        "held",
        "host",
        "id",
        "incarnation",
        "leased_until_s",
        "medium",
        "orders_in_flight",
        "rack",
        "rank",
        "readable",
        "reason",
        "ref",
        "registration",
        "session",
        "state",
        "tier",
        "worker",
        "zone",
    )

    def __init__(self, ref: SegmentRef) -> None:
        """Start joining, with nothing known to be in it."""
        self.id = ref.segment
        self.tier = Tier(ref.tier)
        self.rank = RANKS[self.tier]
        self.worker = ref.worker
        self.host = ref.host
        self.rack = self.zone = ""
        """Where its host stands, as far as its worker was told."""
        self.incarnation = ref.incarnation
        self.ref = ref
        """What clients are told."""
        self.allocator = ExtentAllocator(ref.geometry)
        self.state = SegmentState.JOINING
        self.medium = Medium.SERVING
        self.reason = ""
        """Why the medium does not serve, in its worker's words."""
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
        self.leased_until_s = 0.0
        """When the last lease granted on anything here has ended: for who leaves (I9)."""
        self.demoted_bytes = 0
        """Bytes of parts that were copied to a drive ahead of their eviction from here, less what
        has left since."""
        self.draining = False
        """Chunks are being emptied so that another class can have their frames."""
        self.drained = False
        """Its worker is to be empty: nothing is planned here, what lies here goes elsewhere."""

    @property
    def geometry(self) -> Geometry:
        """Its sizes."""
        return self.allocator.geometry

    def keep_until(self, at_s: float) -> None:
        """Free nothing that the next inventory leaves over before this time (I9).

        While orders can be given, each knows its own time; those of now are void by then.
        """
        if not self.takes_orders:
            self.free_not_before_s = max(self.free_not_before_s, at_s)

    @property
    def takes_orders(self) -> bool:
        """Whether its worker can be told of extents: reconciled, and connected."""
        return self.state is _LIVE and self.session is not None

    @property
    def takes_plans(self) -> bool:
        """Whether extents may be planned here."""
        return self.takes_orders and self.medium is _SERVING and not self.drained
