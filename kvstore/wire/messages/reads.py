"""Lookups, leases and probes: client to master, one round trip for any number of pages."""

from __future__ import annotations

import msgspec

from kvstore.hints import Hints
from kvstore.standing import Standing
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.common import SegmentRef
from kvstore.wire.messages.stripes import StripedPage


class MatchPrefix(Message, frozen=True, tag=48):
    """Longest run of leading pages with every part readable -> Located. Safe to repeat."""

    namespace: bytes
    keys: bytes
    parts: tuple[int, ...] = ()
    """Parts to return locations of; empty for all. A hit needs all parts either way."""
    lease: bool = True
    hints: Hints | None = None
    lease_id: int = 0
    """A number of the session's own, under which it can give these leases back; 0: they lapse."""


class Lookup(Message, frozen=True, tag=49):
    """Where each of these pages is -> Located; pages not covered there are misses."""

    namespace: bytes
    keys: bytes
    parts: tuple[int, ...] = ()
    lease: bool = True
    hints: Hints | None = None
    lease_id: int = 0
    """As of MatchPrefix."""


class LocatedCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One replica of one part of a stretch of pages; packed u64 columns, one entry a page."""

    part: int
    segment: int
    """Index into Located.segments."""
    part_bytes: int
    offsets: bytes
    generations: bytes
    checksums: bytes
    stripes: tuple[StripedPage, ...] = ()
    """One a page where nobody holds it, and others give it: then segment and offsets say nothing,
    and generations are of the stripes."""


class LocatedRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages [first, first + count) of the request and every readable copy of them."""

    first: int
    count: int
    copies: tuple[LocatedCopy, ...]


class Located(Message, frozen=True, tag=50):
    """Master to client. `lease_ttl_s` is 0 when no lease was asked for or can be granted."""

    epoch: int
    lease_ttl_s: float
    segments: tuple[SegmentRef, ...]
    runs: tuple[LocatedRun, ...]


def is_in_doubt(question: Message, reply: Message) -> bool:
    """Whether a lease was asked for and none could be granted: its granter may not lead."""
    return (
        isinstance(reply, Located)
        and not reply.lease_ttl_s
        and isinstance(question, MatchPrefix | Lookup)
        and question.lease
    )


class Probe(Message, frozen=True, tag=51):
    """Which of these pages are readable -> Probed. Takes no lease and touches nothing."""

    namespace: bytes
    keys: bytes


class Probed(Message, frozen=True, tag=52):
    """One byte a page: 1 readable, 0 not."""

    present: bytes


class ListObjects(Message, frozen=True, tag=57):
    """The next objects of an opaque namespace, in the order of their keys -> ObjectsListed.

    What stays there through all of a listing is listed once.
    """

    namespace: bytes
    after: bytes = b""
    """The last key that was listed; empty at the beginning."""


class ObjectsListed(Message, frozen=True, tag=58):
    """At most a batch of packed keys; none: there are no more.

    They may be of objects that are not readable: their put is open, or their workers are away.
    """

    keys: bytes


class RenewLease(Message, frozen=True, tag=53):
    """Lease these pages again if they still have these generations -> LeaseRenewed."""

    namespace: bytes
    keys: bytes
    generations: bytes
    """Packed u64: of any one part that the reader holds, one a page."""


class LeaseRenewed(Message, frozen=True, tag=54):
    """One byte a page: 1 leased for `lease_ttl_s` from now, 0 no longer there."""

    lease_ttl_s: float
    renewed: bytes


class GiveBackLease(Message, frozen=True, tag=60):
    """Client to master: this session reads no more under this `lease_id` -> Done. Safe to repeat.

    Other leases on the same pages go on, its own under other numbers too.
    """

    namespace: bytes
    keys: bytes
    lease_id: int


class Prefetch(Message, frozen=True, tag=56):
    """Client to master: these pages will be read soon: bring up what lies below `tier` -> Done.

    A hint: it takes no lease, promises nothing and is answered before anything is brought.
    """

    namespace: bytes
    keys: bytes
    tier: str = ""
    """DRAM where none is named."""


class GiveHints(Message, frozen=True, tag=61):
    """Client to master: what is known of the future of a chain that ends with these pages -> Done.

    No use of them: nothing is leased, nor does it live longer. Where the session is closed, only
    pages that no other chain goes on from are told so. Pages that are not there are passed over.
    Safe to repeat. Hints are not stored: those of a lost master are forgotten.
    """

    namespace: bytes
    keys: bytes
    hints: Hints


class ReportSuspect(Message, frozen=True, tag=55):
    """Client to master: this replica failed verification while its lease was valid -> Done."""

    namespace: bytes
    key: bytes
    part: int
    segment: str
    incarnation: int
    offset: int
    generation: int


class Remove(Message, frozen=True, tag=64):
    """Take these pages out, everywhere and for good -> Removed. Safe to repeat."""

    namespace: bytes
    keys: bytes
    timeout_s: float


class Removed(Message, frozen=True, tag=65):
    """One byte a page: 1 it was there and is gone, 0 it was not there."""

    removed: bytes


class GetStatus(Message, frozen=True, tag=66):
    """Operator or client to master -> Status. Operators are answered by standbys, too."""


class SegmentStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes by state of one segment; `medium` is serving, read_only or failed, as last reported."""

    segment: str
    worker: str
    tier: str
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    sealed_bytes: int
    retired_bytes: int
    quarantined_bytes: int
    medium: str
    reason: str
    """Why the medium does not serve, in its worker's words; empty while it does."""


class TierStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All segments of one tier, and what became of the pages in them since the master's start."""

    tier: str
    segments: int
    capacity_bytes: int
    used_bytes: int
    extents: int
    """Sealed ones: a page has one a part."""
    hits: int
    """Pages of lookups for which nothing slower had to be read."""
    copies_evicted: int
    """Copies that made room here while their pages stayed elsewhere."""
    moved_pages: int
    """Parts of pages that were brought here from another tier."""
    moved_bytes: int
    """Of those parts."""
    stored_bytes: int
    """Of the extents that they were put into."""


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One worker as the master sees it, joining, live, draining, drained, lost or left."""

    worker: str
    host: str
    state: str
    heard_ago_s: float
    addresses: tuple[str, ...]
    rack: str = ""
    zone: str = ""
    """As its worker was told; empty: unknown."""


class PinTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What pins hold in the pool, all tenants together."""

    pins: int = 0
    pages: int = 0
    """Named by them, each as often as it has owners."""
    soft_bytes: int = 0
    """Of the pages that soft ones name, each as often as it has owners."""
    hard_bytes: int = 0
    """Of the pages that hard ones name and those above them, each once: what counts against the
    quotas."""


class StoredChunks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the metadata store holds of what lies where."""

    chunks: int = 0
    """Of which it has a value."""
    dirty: int = 0
    """Whose value is out of date and is not being written."""
    behind_s: float = 0.0
    """How long the one that waits longest has been due."""


class StripeTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cold pages that are kept by parity."""

    stripes: int = 0
    parity_bytes: int = 0
    """Of all their parity together, as far as it was made."""
    waiting: int = 0
    """Stripes that lack a shard, or may."""
    lacks: str = ""
    """Why none are made although they are wanted."""


class ReplicaTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many replicas readable pages had when they were last counted, and what repair is at."""

    by_got: tuple[int, ...] = ()
    """Pages with one replica, with two, and so on."""
    lacking: int = 0
    """Pages with fewer than they are to have; the next two are among them."""
    without_host: int = 0
    thinned: int = 0
    counted_ago_s: float = -1.0
    """Negative: never."""
    ready: tuple[int, ...] = ()
    """Chains to be copied now, by the replicas of their scarcest page: 1, 2 and so on."""
    waiting: int = 0
    """Others that wait for their time, a host, room or a lane."""
    hot_runs: int = 0
    for_heat: int = 0
    """Replicas wanted of them besides, because they are read much."""


class TicketTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests on their way from prefill to decode, all fleets together."""

    by_state: dict[str, int] = {}
    workers: dict[str, int] = {}
    """Inference workers, by state."""
    credit_tokens: int = 0
    """Promised of the capacity of decode workers that take requests."""
    capacity_tokens: int = 0
    staged_bytes: int = 0
    staging_budget_bytes: int = 0
    admitted_share: float = 1.0
    """Of the waiting for a first token that is admitted where nothing is late; of the tightest
    fleet."""


class Status(Message, frozen=True, tag=67):
    """The pool at one moment, for people and programs."""

    cluster: str
    epoch: int
    uptime_s: float
    pages: int
    runs: int
    namespaces: int
    sessions: int
    open_plans: int
    workers: tuple[WorkerStatus, ...]
    segments: tuple[SegmentStatus, ...]
    tiers: tuple[TierStatus, ...]
    """Those that have segments, fastest first."""
    counters: dict[str, int]
    pins: PinTotals = PinTotals()
    master: str = ""
    """Name of the master that answers; the pool is empty unless it leads."""
    standing: str = Standing.LEADING.value
    """standby, loading, leading, or in doubt: it leads, but its lease may have ended."""
    leader: tuple[str, ...] = ()
    """Addresses of the master that leads, where they are known."""
    stored: StoredChunks = StoredChunks()
    stripes: StripeTotals = StripeTotals()
    replicas: ReplicaTotals = ReplicaTotals()
    tickets: TicketTotals = TicketTotals()
