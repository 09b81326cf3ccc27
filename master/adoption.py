"""Taking in what a worker lists and this master does not know: proven pages, and the rest.

By its records, or, where its digest of a chunk is that of the stored value, by the value: chain by
chain. Rows that follow each other and chain by their parents become runs again, as they were put.
What was checked when a value was written is not checked again page by page; what may have changed
since is: namespaces, layouts, tombstones (I29), and where the chain hangs in the tree (I16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.hints import NO_HINTS
from kvstore.ids import KEY_BYTES, ROOT_PARENT, Generation, Incarnation, PageKey
from kvstore.record import Record, RecordFlag, RecordState
from kvstore.replica import ExtentEvent, Tier
from kvstore.segment import size_class_of
from master.chunks import Occupants
from master.holes import make_holes
from master.packed import pack_words, split_keys, word, words
from master.pool_time import Life
from master.puts import fill, watch_incomplete
from master.restored_chunks import asked_for
from master.run import Copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.chunk_values import Asked, ChainRow, ChunkValue
    from master.core import Core
    from master.directory import Stretch, Tree
    from master.namespaces import KnownNamespace
    from master.restored_chunks import AskedAt
    from master.segments import Segment

ROWS_PER_STEP: Final = 64
COST_PER_STEP: Final = 256
"""Of pages and chains that are taken in from a value: 0.7 ms."""
CHAIN_COST: Final = 8
"""What a chain costs beside its pages, in pages."""


def adopt_value(core: Core, segment: Segment, start: int, value: ChunkValue) -> Iterator[None]:
    """A job: take in a chunk that the worker lists exactly as its stored value does; FREE here."""
    cost = 0
    for row, keys, checksums in value.chains():
        chain = _Chain(start + row.slot * value.size_class, value.size_class, row, keys, checksums)
        if not _adopt_chain(core, segment, chain):
            asked = dict.fromkeys(chain.offsets(), (row.generation, row.asked))
            yield from adopt(core, segment, list(chain.records(segment)), asked)
        cost += row.count + CHAIN_COST
        if cost >= COST_PER_STEP:
            cost = 0
            yield


class _Chain:
    """A row of a value, with where its pages lie."""

    def __init__(
        self, offset: int, size_class: int, row: ChainRow, keys: bytes, checksums: bytes
    ) -> None:
        """Of the first page, in bytes; the columns have one entry a page."""
        self.offset = offset
        self.size_class = size_class
        self.row = row
        self.keys = keys
        self.checksums = checksums

    def offsets(self) -> range:
        """Of the pages, in order."""
        return range(self.offset, self.offset + self.row.count * self.size_class, self.size_class)

    def records(self, segment: Segment) -> Iterator[Record]:
        """What the worker's records say, as far as adoption goes by it."""
        row, parent = self.row, self.row.parent
        pages = zip(split_keys(self.keys), self.offsets(), words(self.checksums), strict=True)
        for key, offset, checksum in pages:
            yield Record(
                RecordState.SEALED, PageKey(key), row.part, Generation(row.generation),
                Incarnation(segment.incarnation), row.payload_bytes, checksum, offset,
                self.size_class, row.namespace, PageKey(parent), token_count=0,
                stored_bytes=min(row.payload_bytes, self.size_class),
            )  # fmt: skip
            parent = key


def _adopt_chain(core: Core, segment: Segment, chain: _Chain) -> bool:
    """Take in all pages of a chain at once; False, and nothing changes, where that cannot be."""
    row = chain.row
    known = core.namespaces.by_ordinal(row.namespace)
    if known is None or core.tombstones.has_rows(segment.id):
        return False
    stored_bytes = min(row.payload_bytes, chain.size_class)
    if not (
        _fits_layout(known, row.part, row.payload_bytes, has_parent=row.parent != ROOT_PARENT)
        and (row.count == 1 or known.namespace.parts)
        and _has_right_class(segment, chain.size_class, row.payload_bytes, stored_bytes)
    ):
        return False
    found = _places(known.tree, segment, chain)
    if found is None:
        return False
    pages = Occupants(chain.keys, row.namespace, row.generation)
    event = ExtentEvent.ADOPTED
    fits = segment.allocator.take_in(chain.offset, chain.size_class, event, pages)
    assert fits, row  # no chunk of another class lies there: master.inventory has looked
    core.counters["pages_adopted"] += row.count
    columns = pack_words(chain.offsets()), word(row.generation) * row.count, chain.checksums
    piece = Copy(row.part, segment, row.payload_bytes, *columns, absent=0)
    _hang(core, known, row.parent, chain.keys, found, piece, row.asked)
    return True


def _places(tree: Tree, segment: Segment, chain: _Chain) -> list[Stretch] | None:
    """Where the chain's pages are in the tree: all of them, or (empty) none; None: look at each."""
    row, keys = chain.row, chain.keys
    found = tree.stretches(keys)
    if not found:
        return None if tree.is_above(split_keys(keys), row.parent) else found
    if sum([stretch.count for stretch in found]) != row.count:
        return None
    for stretch in found:
        run, page, at = stretch.run, stretch.page, stretch.first * KEY_BYTES
        parent = keys[at - KEY_BYTES : at] if at else row.parent
        if parent != (run.key(page - 1) if page else run.parent):
            return None
        for copy in run.copies_of(row.part):
            if copy.segment is segment and any(copy.present(page, page + stretch.count)):
                return None
    return found


def adopt(core: Core, segment: Segment, records: list[Record], known: AskedAt) -> Iterator[None]:
    """A job: take in records whose extents are FREE here; they live as stored, or anew."""
    group: dict[bytes, Record] = {}
    asked: Asked | None = None
    for number, record in enumerate(records):
        if number % ROWS_PER_STEP == ROWS_PER_STEP - 1:
            _adopt_group(core, segment, [*group.values()], asked)
            group = {}
            yield
        stored = asked_for(known, record)
        if group and not (stored == asked and _follows(group, record)):
            # Before the next record is judged: it may be of a page that is in the group.
            _adopt_group(core, segment, [*group.values()], asked)
            group = {}
        first = next(iter(group.values()), record)
        if _take_in(core, segment, record, first.parent):
            group[record.key] = record
            asked = stored
    _adopt_group(core, segment, [*group.values()], asked)


def _take_in(core: Core, segment: Segment, record: Record, above: bytes) -> bool:
    """Note the extent as adopted, or as quarantined when the page may not be served.

    `above` is the page below which the record's group will hang.
    """
    pages = Occupants(record.key, record.namespace_ordinal, record.generation)
    wanted = _is_wanted(core, segment, record, above)
    event = ExtentEvent.ADOPTED if wanted else ExtentEvent.UNACCOUNTED
    fits = segment.allocator.take_in(record.offset, record.size_class, event, pages)
    assert fits, record  # no chunk of another class lies there: master.inventory has looked
    core.counters["pages_adopted" if wanted else "extents_unaccounted"] += 1
    return wanted


def _is_wanted(core: Core, segment: Segment, record: Record, above: bytes) -> bool:
    known = core.namespaces.by_ordinal(record.namespace_ordinal)
    if (
        known is None
        or record.state is not RecordState.SEALED
        or record.flags != RecordFlag.NONE
        or record.key == ROOT_PARENT
        or record.incarnation != segment.incarnation
        or not _has_right_class(
            segment, record.size_class, record.payload_bytes, record.stored_bytes
        )
        or core.tombstones.covers(segment.id, record.key, record.generation)
    ):
        return False
    has_parent = record.parent != ROOT_PARENT
    if not _fits_layout(known, record.part, record.payload_bytes, has_parent=has_parent):
        return False
    return _fits_tree(known.tree, segment, record, above)


def _fits_layout(known: KnownNamespace, part: int, payload_bytes: int, *, has_parent: bool) -> bool:
    parts = known.namespace.parts
    if parts:
        return part < known.tree.parts and parts[part].size_bytes == payload_bytes
    return part < known.tree.parts and not has_parent  # named objects hang below nothing


def _has_right_class(
    segment: Segment, size_class: int, payload_bytes: int, stored_bytes: int
) -> bool:
    """Readers of memory find records by a part's length alone; only NVMe may hold encoded pages."""
    whole = size_class_of(payload_bytes)
    if segment.tier is not Tier.NVME:
        return size_class == whole
    return size_class_of(stored_bytes or payload_bytes) <= size_class <= whole


def _fits_tree(tree: Tree, segment: Segment, record: Record, above: bytes) -> bool:
    """Parents are what writers said: none may make a page its own ancestor (I16)."""
    run = tree.get(record.key)
    if run is None:
        return not tree.is_above([record.key], above)
    page = run.page_of(record.key)
    parent = run.key(page - 1) if page else run.parent
    taken = any(
        copy.segment is segment and copy.generation(page) for copy in run.copies_of(record.part)
    )
    return parent == record.parent and not taken


def _follows(group: dict[bytes, Record], record: Record) -> bool:
    before = next(reversed(group.values()))
    return (
        record.parent == before.key
        and record.key not in group
        and record.part == before.part
        and record.namespace_ordinal == before.namespace_ordinal
        and record.payload_bytes == before.payload_bytes
    )


def _adopt_group(core: Core, segment: Segment, group: list[Record], stored: Asked | None) -> None:
    """Put a chain of proven pages into the tree, and note where they lie."""
    if not group:
        return
    first = group[0]
    known = core.namespaces.by_ordinal(first.namespace_ordinal)
    assert known is not None, first
    keys = b"".join(record.key for record in group)
    piece = Copy(
        first.part,
        segment,
        first.payload_bytes,
        pack_words(record.offset for record in group),
        pack_words(record.generation for record in group),
        pack_words(record.checksum for record in group),
        absent=0,
    )
    _hang(core, known, first.parent, keys, known.tree.stretches(keys), piece, stored)


def _hang(
    core: Core,
    known: KnownNamespace,
    parent: bytes,
    keys: bytes,
    found: list[Stretch],
    piece: Copy,
    stored: Asked | None,
) -> None:
    """Have a chain's pages in the tree, where `found` are already, and note where they lie."""
    tree = known.tree
    if stored is None:
        life = core.new_life(core.page_ttl_s(known))
    else:
        life = _going_on(core, core.pool_time.own(stored.life))
    make_holes(core, tree, parent, keys, found, life, NO_HINTS)
    segment, count = piece.segment, len(keys) // KEY_BYTES
    for run in fill(core, tree, keys, piece):
        # Leases of an earlier master or registration may run (I9).
        run.lease(segment.free_not_before_s)
        if stored is not None:
            run.expires_s = max(run.expires_s, life.expires_s)
            run.replicas = max(run.replicas, stored.replicas)
    if tree.parts > 1:
        timeout_s = core.tunables.put_timeout_s(known.namespace.page_bytes * count)
        watch_incomplete(core, tree, keys, timeout_s)


def _going_on(core: Core, life: Life) -> Life:
    """A life that the store knows of, as it is now.

    If it seems to be over although the worker still has the page, the page has been used since its
    value was written: uses alone are not written.
    """
    if life.expires_s > core.now:
        return life
    oldest_s = max(core.now, life.created_s + core.tunables.page_age_max_s)
    return Life(life.ttl_s, life.created_s, min(core.now + life.ttl_s, oldest_s))
