"""Worker and master: registration, inventory, heartbeat, and the master's commands.

The worker dials. Requests go both ways on that connection: Register, OfferInventory,
InventoryRows, Heartbeat, ReportSegment, ReportDamage, LeaveWorker and Sealed from the worker;
Fence-, Free-, Retire- and CheckExtents from the master.
"""

from __future__ import annotations

import msgspec

from kvstore.segment import Geometry
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.common import Address


class SegmentOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A segment that the worker lends."""

    segment: str
    incarnation: int
    tier: str
    geometry: Geometry
    released: tuple[int, ...] = ()
    """Numbers of chunks whose memory was given back in this life."""


class RegisterWorker(Message, frozen=True, tag=80):
    """Worker to master -> WorkerAccepted. A second registration replaces the first."""

    worker: str
    host: str
    addresses: tuple[Address, ...]
    segments: tuple[SegmentOffer, ...]
    epoch: int = 0
    """The highest that this worker has met, or that its records name: the leader's is no lower, or
    it has to lead in another one."""
    rack: str = ""
    zone: str = ""
    """Where its host stands, for who places replicas; empty: unknown."""


class WorkerAccepted(Message, frozen=True, tag=81):
    """Master to worker: its epoch (lower ones are refused from now on) and the rhythm."""

    epoch: int
    heartbeat_interval_s: float
    lost_after_s: float


class ChunkDigest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """XXH3-64 over the non-FREE records of one chunk, in slot order."""

    chunk_start: int
    size_class: int
    digest: int


class OfferInventory(Message, frozen=True, tag=82):
    """Worker to master: what each chunk of a segment holds -> InventoryWanted.

    Chunks not listed are empty. No pull runs in the segment from before this is sent until the
    answer has come.
    """

    segment: str
    incarnation: int
    chunks: tuple[ChunkDigest, ...]


class InventoryWanted(Message, frozen=True, tag=83):
    """Master to worker: send the rows of these chunks (those whose digests differ)."""

    chunk_starts: tuple[int, ...]


class InventoryRows(Message, frozen=True, tag=84):
    """Worker to master: the non-FREE records of one chunk, 192 bytes each -> Done."""

    segment: str
    incarnation: int
    chunk_start: int
    size_class: int
    rows: bytes


class InventoryEnd(Message, frozen=True, tag=85):
    """Worker to master: every wanted chunk was sent; the segment may serve -> Done."""

    segment: str
    incarnation: int


class Heartbeat(Message, frozen=True, tag=86):
    """Worker to master, every interval -> HeartbeatNoted."""

    worker: str
    epoch: int
    held_extents: int
    """Extents that could not be freed yet because a reader holds a lock."""


class HeartbeatNoted(Message, frozen=True, tag=87):
    """Master to worker. `known` is False when the worker must register again."""

    epoch: int
    known: bool


class ReportSegment(Message, frozen=True, tag=88):
    """Worker to master, after registration and at each change: how a segment's medium is -> Done.

    `state`: "serving", "read_only" (readable, takes no more pages) or "failed" (every replica in
    it is a miss); `reason` is for people.
    """

    segment: str
    incarnation: int
    state: str
    reason: str


class LeaveWorker(Message, frozen=True, tag=89):
    """Worker to master: give my segments up, I am about to end -> Done, once no lease covers them.

    Nothing of them is found or planned from now on; the worker serves reads until the answer. A
    registration takes it back. Safe to repeat: the last one is answered.
    """

    worker: str


class ReportDamage(Message, frozen=True, tag=90):
    """Worker to master: these sealed extents do not hold what they should -> Done.

    Found by the worker itself, as CheckExtents would find it. Packed u64 columns, one entry an
    extent; what lies there in another generation by now is left alone. Safe to repeat; told again
    to every leader until the extent is freed.
    """

    segment: str
    incarnation: int
    offsets: bytes
    generations: bytes


class FenceExtents(Message, frozen=True, tag=96):
    """Master to worker: end pulls into these extents; refuse these and lower generations.

    A record of that or a lower generation becomes FREE even if it was sealed meanwhile; a
    higher one is left alone -> ExtentsConfirmed.
    """

    epoch: int
    segment: str
    incarnation: int
    size_class: int
    offsets: bytes
    generations: bytes


class FreeExtents(Message, frozen=True, tag=97):
    """Master to worker, after the last lease ended: make them FREE -> ExtentsConfirmed."""

    epoch: int
    segment: str
    incarnation: int
    size_class: int
    offsets: bytes
    generations: bytes


class RetireExtents(Message, frozen=True, tag=98):
    """Master to worker: write these records REMOVED -> ExtentsConfirmed."""

    epoch: int
    segment: str
    incarnation: int
    size_class: int
    offsets: bytes
    generations: bytes


class CheckExtents(Message, frozen=True, tag=99):
    """Master to worker: verify these suspects' payloads -> ExtentsConfirmed (CHECKSUM = bad)."""

    epoch: int
    segment: str
    incarnation: int
    size_class: int
    offsets: bytes
    generations: bytes


class ReleaseChunks(Message, frozen=True, tag=101):
    """Master to worker: give the memory of these chunks back, for this life of the segment -> Done.

    Of a segment on a device. Nothing lies there and nothing is planned there any more; readers that
    have opened the memory keep it until they close it. BadValue where something lies there still.
    Safe to repeat.
    """

    epoch: int
    segment: str
    incarnation: int
    chunks: tuple[int, ...]


class ExtentsConfirmed(Message, frozen=True, tag=100):
    """Worker to master: one Outcome byte an extent. OK = done; BUSY = a reader holds it, ask
    again; TRANSPORT = it is not durable on its disk, ask again; FENCED and STALE = refused
    as a whole (old epoch, other incarnation)."""

    epoch: int
    outcomes: bytes
