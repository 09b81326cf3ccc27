"""Where found pages are, and until when: what lookups return and reads start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.steps import Steps, ask
from kvstore.errors import BadValue, MalformedMessage
from kvstore.hints import NO_HINTS, Hints
from kvstore.ids import KEY_BYTES
from kvstore.lease import holder_deadline_s
from kvstore.page import PageChain
from kvstore.require import require
from kvstore.transfer.transport import COLUMN_BYTES
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import (
    GiveBackLease,
    GiveHints,
    ListObjects,
    Located,
    LocatedCopy,
    Lookup,
    MatchPrefix,
    ObjectsListed,
    Prefetch,
    Probe,
    Probed,
    Remove,
    Removed,
)
from kvstore.wire.messages.stripes import require_shards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.clock import Clock
    from kvstore.namespace import Namespace


class Query(msgspec.Struct, frozen=True):
    """A question about a chain's pages."""

    opened: OpenedNamespace
    chain: PageChain
    deadline_s: float
    """When to stop, on the clock that the plan is given."""
    parts: tuple[int, ...] = ()
    """Parts whose places are wanted; empty for all."""
    lease: bool = True
    hints: Hints | None = None
    lease_id: int = 0
    """A number under which the leases can be given back; 0: they lapse."""


class Piece(msgspec.Struct, frozen=True):
    """One answer of the master: about pages from `first` on of the chain that was asked for."""

    first: int
    located: Located
    deadline_s: float | None
    """When the reader must stop (I9), on its own clock; None without a lease."""
    renew_at_s: float
    is_in_doubt: bool = False
    """A lease was wanted and none could be granted: the leader's own is in doubt."""

    @classmethod
    def of(cls, first: int, located: Located, sent_at_s: float, leased: bool) -> Piece:
        """Count the lease from before the question left."""
        is_leased = leased and located.lease_ttl_s > 0
        deadline_s = holder_deadline_s(sent_at_s, located.lease_ttl_s) if is_leased else None
        renew_at_s = sent_at_s + located.lease_ttl_s / 2
        return cls(first, located, deadline_s, renew_at_s, leased and not is_leased)

    def needs_renewal(self, now_s: float) -> bool:
        """Whether the lease is in its second half."""
        return self.deadline_s is not None and now_s >= self.renew_at_s

    def left_s(self, now_s: float) -> float:
        """What is left of the lease; nothing without one."""
        return 0.0 if self.deadline_s is None else self.deadline_s - now_s

    def renewed(self, sent_at_s: float, ttl_s: float) -> Piece:
        """The same places under a new lease."""
        deadline_s = holder_deadline_s(sent_at_s, ttl_s)
        return Piece(self.first, self.located, deadline_s, sent_at_s + ttl_s / 2)

    def not_renewed(self, now_s: float) -> Piece:
        """The same lease, to be renewed when half of what is left of it has passed."""
        return msgspec.structs.replace(self, renew_at_s=now_s + self.left_s(now_s) / 2)


class Locations(msgspec.Struct, frozen=True):
    """Answer of a lookup, as far as reads need it."""

    opened: OpenedNamespace
    chain: PageChain
    parts: tuple[int, ...]
    """Parts whose places were asked for; empty for all."""
    pieces: tuple[Piece, ...]
    readable: bytes
    """One byte a page: 1 every part is readable, 0 not."""

    @property
    def pages(self) -> int:
        """Pages of the chain that a read may ask for, counted from the first."""
        return len(self.readable)

    @property
    def hits(self) -> list[bool]:
        """Whether each page of the chain was found."""
        return [flag == 1 for flag in self.readable]

    @property
    def leased_until_s(self) -> float:
        """On the store's monotonic clock: when the first of the leases ends; 0 without lease."""
        return min((piece.deadline_s or 0.0 for piece in self.pieces), default=0.0)

    def __repr__(self) -> str:
        found = self.readable.count(1)
        return f"{type(self).__name__}({found} of {len(self.chain)} pages, {self.chain})"

    def part_bytes(self, part: int) -> int:
        """Bytes of such a part; of named objects the largest one's, 0 when none was found."""
        parts = self.opened.namespace.parts
        last = self.opened.namespace.parts_a_page - 1
        require("part", part, int, f"0 to {last}")
        if not 0 <= part <= last:
            raise BadValue("part", part, f"0 to {last}")
        if parts:
            return parts[part].size_bytes
        copies = (c for p in self.pieces for run in p.located.runs for c in run.copies)
        return max((copy.part_bytes for copy in copies if copy.part == part), default=0)


class Match(Locations, frozen=True):
    """The longest prefix of a chain that is in the pool."""

    @property
    def pages(self) -> int:
        """Pages of the prefix, and so the most that a read of this match brings."""
        return len(self.readable) - len(self.readable.lstrip(b"\1"))


class Found(Locations, frozen=True):
    """Every page of a chain that is in the pool, also beyond a gap; the others read as misses."""


def batches(chain: PageChain) -> Iterator[tuple[int, bytes]]:
    """First page and packed keys of each batch that fits one message."""
    step = limits.BATCH_PAGES_MAX * KEY_BYTES
    for start in range(0, len(chain.packed), step):
        yield start // KEY_BYTES, chain.packed[start : start + step]


def check_located(located: Located, pages: int, namespace: Namespace) -> bytes:
    """Bytes of `readable` for one answer; MalformedMessage when its columns do not add up."""
    readable = bytearray(pages)
    segments = len(located.segments)
    for run in located.runs:
        if not 0 <= run.first < run.first + run.count <= pages:
            raise MalformedMessage(f"LocatedRun: pages {run.first} + {run.count} of {pages}")
        want = run.count * COLUMN_BYTES
        for copy in run.copies:
            if not len(copy.offsets) == len(copy.generations) == len(copy.checksums) == want:
                raise MalformedMessage(f"LocatedCopy: columns for {run.count} pages differ")
            if not 0 <= copy.segment < segments:
                raise MalformedMessage(f"LocatedCopy: segment {copy.segment} of {segments}")
            _check_size(copy, namespace)
            _check_stripes(copy, run.count, located)
        readable[run.first : run.first + run.count] = b"\1" * run.count
    return bytes(readable)


def _check_size(copy: LocatedCopy, namespace: Namespace) -> None:
    """A part has the size that follows from the layout; a named object any that fits a chunk."""
    parts, size = namespace.parts, copy.part_bytes
    if parts:
        good = 0 <= copy.part < len(parts) and size == parts[copy.part].size_bytes
    else:
        good = 0 <= copy.part < namespace.parts_a_page and 0 < size <= limits.CHUNK_BYTES
    if not good:
        raise MalformedMessage(f"LocatedCopy: part {copy.part} of {size} bytes")


def _check_stripes(copy: LocatedCopy, pages: int, located: Located) -> None:
    """Pages that are decoded from others have a stripe each, which makes sense."""
    if copy.stripes and len(copy.stripes) != pages:
        raise MalformedMessage(f"LocatedCopy: {len(copy.stripes)} stripes for {pages} pages")
    for stripe in copy.stripes:
        try:
            require_shards(stripe, located.segments)
        except BadValue as error:
            raise MalformedMessage(f"LocatedCopy: {error}") from error


def match_steps(query: Query, clock: Clock) -> Steps[Match]:
    """Longest readable prefix, one question a batch; stops at the first batch with a gap."""
    namespace = query.opened.namespace.id
    pieces: list[Piece] = []
    readable = b""
    for first, keys in batches(query.chain):
        sent_at_s = clock.now_s()
        question = MatchPrefix(
            namespace, keys, query.parts, query.lease, query.hints, query.lease_id
        )
        located = yield from ask(question, Located, query.deadline_s - sent_at_s)
        found = check_located(located, len(keys) // KEY_BYTES, query.opened.namespace)
        pieces.append(Piece.of(first, located, sent_at_s, query.lease))
        readable += found
        if not all(found):
            break
    readable = readable.ljust(len(query.chain), b"\0")
    return Match(query.opened, query.chain, query.parts, tuple(pieces), readable)


def lookup_steps(query: Query, clock: Clock) -> Steps[Found]:
    """Every readable page, one question a batch."""
    namespace = query.opened.namespace.id
    pieces: list[Piece] = []
    readable: list[bytes] = []
    for first, keys in batches(query.chain):
        sent_at_s = clock.now_s()
        question = Lookup(namespace, keys, query.parts, query.lease, query.hints, query.lease_id)
        located = yield from ask(question, Located, query.deadline_s - sent_at_s)
        readable.append(check_located(located, len(keys) // KEY_BYTES, query.opened.namespace))
        pieces.append(Piece.of(first, located, sent_at_s, query.lease))
    return Found(query.opened, query.chain, query.parts, tuple(pieces), b"".join(readable))


def give_back_steps(query: Query, clock: Clock) -> Steps[None]:
    """Tell the master that nothing is read any more under a lease."""
    for _, keys in batches(query.chain):
        told = GiveBackLease(query.opened.namespace.id, keys, query.lease_id)
        yield from ask(told, Done, query.deadline_s - clock.now_s())


def probe_steps(query: Query, clock: Clock) -> Steps[list[bool]]:
    """Whether each page is readable; takes no lease."""
    found: list[bool] = []
    for _, keys in batches(query.chain):
        question = Probe(query.opened.namespace.id, keys)
        reply = yield from ask(question, Probed, query.deadline_s - clock.now_s())
        found += flags(reply.present, keys)
    return found


def prefetch_steps(query: Query, clock: Clock, tier: str = "") -> Steps[None]:
    """Tell the master what will be read soon."""
    for _, keys in batches(query.chain):
        hint = Prefetch(query.opened.namespace.id, keys, tier)
        yield from ask(hint, Done, query.deadline_s - clock.now_s())


def hint_steps(query: Query, clock: Clock) -> Steps[None]:
    """Tell the master what is known of the chain's future."""
    hints = query.hints or NO_HINTS
    for _, keys in batches(query.chain):
        told = GiveHints(query.opened.namespace.id, keys, hints)
        yield from ask(told, Done, query.deadline_s - clock.now_s())


def object_steps(
    opened: OpenedNamespace, deadline_s: float, clock: Clock
) -> Steps[list[PageChain]]:
    """The keys of all objects, in chains of a batch each."""
    found: list[PageChain] = []
    after = b""
    while True:
        question = ListObjects(opened.namespace.id, after)
        listed = yield from ask(question, ObjectsListed, deadline_s - clock.now_s())
        if not listed.keys:
            return found
        chain = PageChain(listed.keys)
        if chain.key(0) <= after:
            raise MalformedMessage("ObjectsListed: keys that were listed before")
        found.append(chain)
        after = chain.key(len(chain) - 1)


def remove_steps(query: Query, clock: Clock) -> Steps[list[bool]]:
    """Whether each page was there; it is gone everywhere when the answer comes."""
    found: list[bool] = []
    for _, keys in batches(query.chain):
        left_s = query.deadline_s - clock.now_s()
        question = Remove(query.opened.namespace.id, keys, left_s)
        reply = yield from ask(question, Removed, left_s)
        found += flags(reply.removed, keys)
    return found


def flags(packed: bytes, keys: bytes) -> list[bool]:
    """One a page; MalformedMessage unless there are as many as these packed keys."""
    pages = len(keys) // KEY_BYTES
    if len(packed) != pages:
        raise MalformedMessage(f"{len(packed)} flags for {pages} pages")
    return [flag == 1 for flag in packed]
