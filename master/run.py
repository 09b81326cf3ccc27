"""A run: pages put together, with packed keys, packed locations and one access record.

Columns are immutable bytes, 8 a page, little-endian: slices of them are what replies carry, and a
change replaces a column. Generation 0 means absent. Knows nothing of trees, plans' lives or time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.ids import KEY_BYTES
from master.events import SessionId
from master.packed import WORD, index_of, words
from master.plans import Plan
from master.segments import Segment
from master.wheel import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LeaseId = tuple[SessionId, int]
"""Whose lease it is, and the number that it has there."""
_ONES: Final = tuple(b"\1" * count for count in range(limits.RUN_PAGES_MAX + 1))
NEVER: Final = -1
"""Version of a readable mask that was never made."""


LEASES_MAX: Final = 8
"""Leases of one run that can be given back; with more at a time the oldest lapse."""


class Copy(msgspec.Struct, gc=False, eq=False):
    """Where one part of a run's pages lies in one segment; some pages may be absent."""

    part: int
    segment: Segment
    part_bytes: int
    offsets: bytes
    generations: bytes
    checksums: bytes
    absent: int
    """Pages whose generation is 0."""

    def piece(self, first: int, stop: int) -> Copy | None:
        """A copy of pages [first, stop) alone, itself when it has no others; None when all of
        them are absent.
        """
        a, b = first * WORD, stop * WORD
        if not a and b == len(self.offsets):
            return self
        generations = self.generations[a:b]
        absent = words(generations).count(0) if self.absent else 0
        if absent == stop - first:
            return None
        columns = self.offsets[a:b], generations, self.checksums[a:b]
        return Copy(self.part, self.segment, self.part_bytes, *columns, absent)

    def fill(self, first: int, piece: Copy) -> None:
        """Set the entries of absent pages from `first` on to those of `piece`, which has all."""
        a, b = first * WORD, first * WORD + len(piece.offsets)
        assert self.part_bytes == piece.part_bytes, (self.part_bytes, piece.part_bytes)
        self.offsets = self.offsets[:a] + piece.offsets + self.offsets[b:]
        self.generations = self.generations[:a] + piece.generations + self.generations[b:]
        self.checksums = self.checksums[:a] + piece.checksums + self.checksums[b:]
        self.absent -= len(piece.offsets) // WORD

    def clear(self, first: int, count: int) -> None:
        """Make these pages absent, whether or not they are."""
        a, b = first * WORD, (first + count) * WORD
        gone = words(self.generations[a:b])
        self.absent += count - gone.count(0)
        self.generations = self.generations[:a] + bytes(b - a) + self.generations[b:]

    def generation(self, page: int) -> int:
        """Generation of one page, 0 when it is absent."""
        return int.from_bytes(self.generations[page * WORD : (page + 1) * WORD], "little")

    def offset(self, page: int) -> int:
        """Payload offset of one page that is present."""
        return int.from_bytes(self.offsets[page * WORD : (page + 1) * WORD], "little")

    def present(self, first: int, stop: int) -> bytes:
        """One byte a page of [first, stop): 1 where it is present."""
        if not self.absent:
            return b"\1" * (stop - first)
        return bytes(map(bool, words(self.generations[first * WORD : stop * WORD])))


class Run(msgspec.Struct, gc=False, eq=False):
    """Consecutive pages of one namespace; children hang below the last one only."""

    namespace: int
    """Ordinal of the namespace."""
    parent: bytes
    """Key of the page before the first; that page need not be in the tree."""
    keys: bytes
    """Empty once the run is gone."""
    ttl_s: float
    created_s: float
    expires_s: float
    heat: float = 0.0
    """This and the next three belong to the eviction policy (policies/eviction/protocol.py)."""
    bias: float = 0.0
    touches: int = 0
    touched_s: float = 0.0
    era: int = 0
    """Which eviction policy gave it those numbers (master/eviction.py)."""
    leased_until_s: float = 0.0
    """When the last lease has ended and the margin is over (I9)."""
    lapsing_until_s: float = 0.0
    """When the last of those has ended that nobody can give back."""
    leases: dict[LeaseId, float] | None = None
    """The others, oldest first, with their ends; some may have passed."""
    read_until_s: float = 0.0
    """When the copies that are under way read it no more (I35)."""
    kept_until_s: float = 0.0
    """A put whose rest waits for room wants to hang it below the last page until then."""
    progress_s: float = 0.0
    """When some part of some page was last planned or sealed."""
    copies: tuple[Copy, ...] = ()
    """Fastest tier first: so lookups return them."""
    cold_hits: int = 0
    """Leases that were granted on pages of it which lie on a drive only, since it was brought up
    last."""
    replicas: int = 0
    """How many were asked for by puts; 0: as many as the namespace wants."""
    extra: int = 0
    """Wanted besides, because many read it."""
    thinned: bool = False
    """Eviction took some of its replicas: none is made again before it is used."""
    reads: float = 0.0
    """Leases granted on it, those of long ago counted less."""
    reads_at_s: float = 0.0
    """As of when."""
    scanned: int = 0
    """Number of the last scan that has seen it."""
    plans: tuple[Plan, ...] = ()
    """Open plans that some page of this run is part of."""
    bucket: int = NOWHERE
    """Place in the expiry wheel."""
    mask: bytes = b""
    mask_version: int = NEVER

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, page: int) -> bytes:
        """Key of one page."""
        return self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]

    def lease(self, until_s: float, lease: LeaseId | None = None) -> None:
        """Keep its extents until then (I9), or until this lease is given back; 0 is no lease."""
        self.leased_until_s = max(self.leased_until_s, until_s)
        if lease is None or not until_s:
            self.lapsing_until_s = max(self.lapsing_until_s, until_s)
            return
        leases = self.leases = self.leases or {}
        leases.pop(lease, None)
        leases[lease] = until_s
        if len(leases) > LEASES_MAX:
            self.lapsing_until_s = max(self.lapsing_until_s, leases.pop(next(iter(leases))))

    def give_back(self, lease: LeaseId) -> None:
        """End this lease, if it is one; the others go on (I9)."""
        if self.leases and self.leases.pop(lease, None) is not None:
            self.leased_until_s = max([self.lapsing_until_s, *self.leases.values()])
            self.leases = self.leases or None

    @property
    def free_from_s(self) -> float:
        """Nothing of it is freed before: readers have a lease (I9), or copies are at it (I35)."""
        return max(self.leased_until_s, self.read_until_s)

    @property
    def last_key(self) -> bytes:
        """Key of the last page."""
        return self.keys[-KEY_BYTES:]

    @property
    def page_bytes(self) -> int:
        """Of all parts of a page that lie anywhere, each counted once."""
        return sum({copy.part: copy.part_bytes for copy in self.copies}.values())

    def page_of(self, key: bytes) -> int:
        """Position of `key`, which is in this run."""
        page = index_of(self.keys, key)
        assert page >= 0, key
        return page

    def copy_at(self, segment: Segment, page: int, offset: int) -> Copy:
        """The copy of this page that lies there; every SEALED extent is one (I17)."""
        for copy in self.copies:
            if copy.segment is segment and copy.generation(page) and copy.offset(page) == offset:
                return copy
        raise AssertionError(f"no copy of {self.key(page).hex()} at {offset} in {segment.id}")

    def copies_of(self, part: int) -> Iterator[Copy]:
        """Every copy of `part`, whole or not."""
        return (copy for copy in self.copies if copy.part == part)

    def readable(self, parts: int, version: int) -> bytes:
        """One byte a page: 1 where every one of `parts` parts can be read now (I3, I15).

        `version` counts changes of segments' readability; the mask is kept until it changes.
        """
        if self.mask_version != version:
            self.mask = self.fresh_mask(parts)
            self.mask_version = version
        return self.mask

    def part_present(self, part: int) -> bytes:
        """One byte a page: 1 where this part can be read now."""
        return self.held_by(c for c in self.copies_of(part) if c.segment.readable)

    def fresh_mask(self, parts: int) -> bytes:
        """What `readable` returns, made anew."""
        pages = len(self)
        whole = {copy.part for copy in self.copies if not copy.absent and copy.segment.readable}
        if len(whole) == parts:  # the usual case
            return _ONES[pages]
        merged = int.from_bytes(_ONES[pages], "little")
        for part in range(parts):
            merged &= int.from_bytes(self.part_present(part), "little")
        return merged.to_bytes(pages, "little")

    def held_by(self, copies: Iterable[Copy]) -> bytes:
        """One byte a page: 1 where one of these copies has it."""
        pages = len(self)
        merged = 0
        for copy in copies:
            if not copy.absent:
                return _ONES[pages]
            merged |= int.from_bytes(copy.present(0, pages), "little")
        return merged.to_bytes(pages, "little")

    def held_up_to(self, parts: int, rank: int) -> bytes:
        """One byte a page: 1 where each of `parts` parts is in a tier of this rank or a faster one,
        and can be read now.
        """
        copies = [c for c in self.copies if c.segment.rank <= rank and c.segment.readable]
        merged = int.from_bytes(_ONES[len(self)], "little")
        for part in range(parts):
            held = self.held_by(copy for copy in copies if copy.part == part)
            merged &= int.from_bytes(held, "little")
        return merged.to_bytes(len(self), "little")

    def covered(
        self, segment: Segment, counts: Callable[[Segment], bool] = lambda _: True
    ) -> bytes:
        """One byte a page: 1 where no copy in `segment` is the last one of its part that can be
        read, is to stay, and lies where it `counts`.
        """
        pages = len(self)
        bare = 0
        for copy in self.copies:
            if copy.segment is segment:
                others = (c for c in self.copies_of(copy.part) if c.segment is not segment)
                stay = (c for c in others if c.segment.readable and not c.segment.drained)
                held = self.held_by(c for c in stay if counts(c.segment))
                mine = int.from_bytes(copy.present(0, pages), "little")
                bare |= mine & ~int.from_bytes(held, "little")
        return (int.from_bytes(_ONES[pages], "little") & ~bare).to_bytes(pages, "little")

    def has_gaps(self) -> bool:
        """Whether some page lacks a part that others of these pages have."""
        if len(self.copies) == 1:
            return self.copies[0].absent > 0
        parts = {copy.part for copy in self.copies}
        return any(0 in self.held_by(self.copies_of(part)) for part in parts)

    def fill(self, first: int, piece: Copy) -> None:
        """Note that pages from `first` on lie where `piece`, which lacks none, says."""
        self.mask_version = NEVER
        for copy in self.copies:
            if copy.part == piece.part and copy.segment is piece.segment:
                copy.fill(first, piece)
                return
        pages, count = len(self), len(piece.offsets) // WORD
        if count != pages:
            before, after = bytes(first * WORD), bytes((pages - first - count) * WORD)
            piece.offsets = before + piece.offsets + after
            piece.generations = before + piece.generations + after
            piece.checksums = before + piece.checksums + after
            piece.absent = pages - count
        at = sum([copy.segment.rank <= piece.segment.rank for copy in self.copies])
        self.copies = (*self.copies[:at], piece, *self.copies[at:])

    def clear(self, copy: Copy, first: int, count: int = 1) -> None:
        """Forget that `copy` holds these pages; the copy itself goes with its last one."""
        self.mask_version = NEVER
        copy.clear(first, count)
        if copy.absent == len(self):
            self.copies = tuple(other for other in self.copies if other is not copy)

    def is_hole(self, page: int) -> bool:
        """Whether no copy of this page is left, and no plan for it is open."""
        if any(copy.generation(page) for copy in self.copies):
            return False
        key = self.key(page)
        return not any(plan.is_open(key) for plan in self.plans)
