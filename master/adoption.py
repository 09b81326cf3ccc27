"""Taking in what a worker lists and this master does not know: proven pages, and the rest.

Rows that follow each other and chain by their parents become runs again, as they were put.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.hints import NO_HINTS
from kvstore.ids import ROOT_PARENT
from kvstore.record import Record, RecordFlag, RecordState
from kvstore.replica import ExtentEvent, Tier
from kvstore.segment import size_class_of
from master.chunks import Occupants
from master.holes import make_holes
from master.packed import pack_words
from master.puts import fill, watch_incomplete
from master.run import Copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.directory import Tree
    from master.segments import Segment

ROWS_PER_STEP: Final = 128


def adopt(core: Core, segment: Segment, records: list[Record]) -> Iterator[None]:
    """A job: take in records whose extents are FREE here."""
    group: dict[bytes, Record] = {}
    for number, record in enumerate(records):
        if number % ROWS_PER_STEP == ROWS_PER_STEP - 1:
            _adopt_group(core, segment, [*group.values()])
            group = {}
            yield
        if group and not _follows(group, record):
            # Before the next record is judged: it may be of a page that is in the group.
            _adopt_group(core, segment, [*group.values()])
            group = {}
        first = next(iter(group.values()), record)
        if _take_in(core, segment, record, first.parent):
            group[record.key] = record
    _adopt_group(core, segment, [*group.values()])


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
        or not _has_right_class(segment, record)
        or core.tombstones.covers(segment.id, record.key, record.generation)
    ):
        return False
    parts = known.namespace.parts
    if record.part >= known.tree.parts:
        return False
    if parts and parts[record.part].size_bytes != record.payload_bytes:
        return False
    if not parts and record.parent != ROOT_PARENT:
        return False  # named objects hang below nothing
    return _fits_tree(known.tree, segment, record, above)


def _has_right_class(segment: Segment, record: Record) -> bool:
    """Readers of memory find records by a part's length alone; only NVMe may hold encoded pages."""
    whole = size_class_of(record.payload_bytes)
    if segment.tier is not Tier.NVME:
        return record.size_class == whole
    return size_class_of(record.stored_bytes or record.payload_bytes) <= record.size_class <= whole


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


def _adopt_group(core: Core, segment: Segment, group: list[Record]) -> None:
    """Put a chain of proven pages into the tree, and note where they lie."""
    if not group:
        return
    first = group[0]
    known = core.namespaces.by_ordinal(first.namespace_ordinal)
    assert known is not None, first
    tree = known.tree
    keys = b"".join(record.key for record in group)
    ttl_s = core.page_ttl_s(known)
    make_holes(core, tree, first.parent, keys, tree.stretches(keys), ttl_s, NO_HINTS)
    piece = Copy(
        first.part,
        segment,
        first.payload_bytes,
        pack_words(record.offset for record in group),
        pack_words(record.generation for record in group),
        pack_words(record.checksum for record in group),
        absent=0,
    )
    for run in fill(core, tree, keys, piece):
        # Leases of an earlier master or registration may run (I9).
        run.leased_until_s = max(run.leased_until_s, segment.free_not_before_s)
    if tree.parts > 1:
        page_bytes = known.namespace.page_bytes
        watch_incomplete(core, tree, keys, core.tunables.put_timeout_s(page_bytes * len(group)))
