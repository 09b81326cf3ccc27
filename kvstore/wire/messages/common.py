"""Values that several conversations carry. Packed columns are little-endian, 8 bytes an entry."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvstore.segment import Geometry


class Address(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One way to reach a worker. Lower cost is better; peers fail over in that order."""

    transport: str
    """shm (where = path of the Unix socket), tcp (host:port) or mooncake (host:port)."""
    where: str
    cost: int


class SegmentRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A segment as clients need it: its life, its shape, and who serves it."""

    segment: str
    incarnation: int
    tier: str
    geometry: Geometry
    worker: str
    host: str
    addresses: tuple[Address, ...]


class Outcome(IntEnum):
    """Per-page answer codes in packed results, one byte each."""

    OK = 0
    MISSING = 1
    """No such page, or no readable replica."""
    IN_PROGRESS = 2
    """Another put of the same part is open."""
    OUT_OF_SPACE = 3
    """No room now: back off."""
    PARENT_MISSING = 4
    """The parent page is not in the pool: put it first."""
    BUSY = 5
    """A reader holds the extent: try another plan; does not count as a try."""
    FENCED = 6
    """The plan's generation was fenced, or the worker has fenced itself."""
    CHECKSUM = 7
    """Bytes differ from the writer's checksum."""
    STALE = 8
    """Another incarnation, generation or key lies there."""
    SOURCE_LOST = 9
    """The writer's buffer was closed, truncated or its connection ended."""
    PLAN_CLOSED = 10
    """The master no longer has this plan: the extent is freed."""
    TRANSPORT = 11
    """The transport failed."""
    TOO_MANY_QUARANTINED = 12
    """This segment's quarantine is full: puts elsewhere go on."""
    TOO_BIG = 13
    """The encoded page does not fit its extent: plan a larger one."""
    TOO_FEW_HOSTS = 14
    """Fewer hosts lend now than the put wants replicas on, and it takes no fewer."""
