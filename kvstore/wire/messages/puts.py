"""The put conversation: client plans with the master, worker ingests, worker reports the seal."""

from __future__ import annotations

import msgspec

from kvstore.hints import Hints
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.common import SegmentRef
from kvstore.wire.messages.stripes import StripedPage


class PutChain(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive pages: 32 bytes a key, each the parent of the next.

    With an empty `parent`: named objects of an opaque namespace, in any order.
    """

    parent: bytes
    keys: bytes


class BeginPut(Message, frozen=True, tag=32):
    """Client to master: reserve extents. Pages are numbered through all chains, from 0.

    Answered by PutPlans. Safe to repeat with the same `request` (16 bytes) in one session: the
    same answer comes back. `wait`: when *nothing* can be planned and some page is in progress
    elsewhere or lacks room, the answer is held back for up to `timeout_s` until that changes.
    """

    request: bytes
    namespace: bytes
    chains: tuple[PutChain, ...]
    parts: tuple[int, ...]
    part_bytes: tuple[int, ...]
    timeout_s: float
    wait: bool = True
    ttl_s: float | None = None
    hints: Hints | None = None
    tier: str = ""
    """Where the pages had best lie, if there is room; else they go where all go."""
    replicas: int = 0
    """How many of each page are wanted, here or by an earlier put; 0: as many as the namespace
    wants. One is planned here, the others are made from it."""
    strict: bool = False
    """Refuse the pages (TOO_FEW_HOSTS) unless so many hosts lend now."""


class PlanSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Extents for pages [first, first + count) of one chain and one part, in one segment."""

    first: int
    count: int
    part: int
    segment: int
    """Index into PutPlans.segments."""
    generation: int
    offsets: bytes
    """Packed u64 payload offsets, one a page."""


class PageRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages [first, first + count) of one part."""

    first: int
    count: int
    part: int


class RefusedRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages that cannot be planned now; `reason` is an Outcome."""

    first: int
    count: int
    part: int
    reason: int
    retry_after_s: float


class PutPlans(Message, frozen=True, tag=33):
    """Master to client. Every (page, part) asked for is in exactly one of the three lists."""

    epoch: int
    segments: tuple[SegmentRef, ...]
    spans: tuple[PlanSpan, ...]
    present: tuple[PageRange, ...]
    refused: tuple[RefusedRange, ...]


class AbortPut(Message, frozen=True, tag=34):
    """Client to master: give these plans up now instead of letting them time out. -> Done"""

    generations: tuple[int, ...]


class BufferSource(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """The bytes lie in a buffer that this session attached; packed u64 offsets, one a page."""

    buffer: int
    offsets: bytes


class StreamSource(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The bytes follow this frame raw, page after page, without padding."""


class EngineSource(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """The transfer engine at `peer` (host:port) serves them at these packed u64 addresses."""

    peer: str
    addresses: bytes


class ExtentSource(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The bytes lie in other extents of the same worker; packed u64 columns, one entry a page.

    For moves between tiers: only a master asks for it, over the worker's control connection.
    """

    segment: str
    incarnation: int
    offsets: bytes
    generations: bytes


class PeerSource(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """The bytes lie in extents of another worker; packed u64 columns, one entry a page.

    For copies between workers: only a master asks for it, over the worker's control connection.
    """

    segment: SegmentRef
    offsets: bytes
    generations: bytes


class StripeSource(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """The bytes are decoded from shards that workers hold; one entry a page.

    For what was lost, and parity: only a master asks for it, over the worker's control connection.
    """

    segments: tuple[SegmentRef, ...]
    pages: tuple[StripedPage, ...]


class Ingest(Message, frozen=True, tag=35):
    """Client (or master) to worker: pull these pages, verify, seal: some pages of a plan's span.

    Answered by Ingested after the master has acknowledged the seal. Safe to repeat: it joins
    the first or gets its result.
    """

    epoch: int
    segment: str
    incarnation: int
    generation: int
    namespace_ordinal: int
    part: int
    part_bytes: int
    size_class: int
    """Bytes of each extent: part_bytes rounded up to 4 KiB, or less where pages lie encoded."""
    token_count: int
    parent: bytes
    """Parent key of the first page; every later page's parent is the page before it. Empty: these
    are named objects, without parents."""
    keys: bytes
    offsets: bytes
    checksums: bytes
    """Packed u64, computed by the writer over its own buffer before this was sent."""
    source: BufferSource | StreamSource | EngineSource | ExtentSource | PeerSource | StripeSource


class Ingested(Message, frozen=True, tag=36):
    """Worker to who asked: one Outcome byte a page. OK means sealed and acknowledged."""

    outcomes: bytes
    stored_max: int = 0
    """Bytes of the largest page as it is stored, also where it was TOO_BIG; 0 where none was
    encoded."""


class Sealed(Message, frozen=True, tag=37):
    """Worker to master: these extents are verified. Answered by SealedNoted. Safe to repeat.

    Says what their records say, so that the master can hold it against the plan: a record may
    have to rebuild the tree one day, and what a client told its worker is no proof.
    """

    segment: str
    incarnation: int
    generation: int
    namespace_ordinal: int
    part: int
    part_bytes: int
    token_count: int
    parents: bytes
    """The parent's key of each page."""
    keys: bytes
    offsets: bytes
    checksums: bytes


class SealedNoted(Message, frozen=True, tag=38):
    """Master to worker: one Outcome byte an extent; PLAN_CLOSED = free it."""

    outcomes: bytes
