"""Lookups, probes and leases: where pages are, and the promise that they stay there for a while.

See the step table "get" in ARCHITECTURE.md. Reads the directory by stretches of runs, never page
by page where a run is uniform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.hints import NO_HINTS
from kvstore.ids import KEY_BYTES, short
from kvstore.replica import Tier, check_tier
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import (
    GiveBackLease,
    GiveHints,
    LeaseRenewed,
    ListObjects,
    Located,
    LocatedCopy,
    LocatedRun,
    Lookup,
    MatchPrefix,
    ObjectsListed,
    Prefetch,
    Probe,
    Probed,
    RenewLease,
)
from master import degraded, heat, hinting, tiering
from master.directory import Stretch, Tree
from master.packed import WORD, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.hints import Hints
    from master.core import Core
    from master.namespaces import KnownNamespace
    from master.run import Copy, LeaseId, Run
    from master.segments import Segment
    from master.sessions import Caller


def match_prefix(core: Core, caller: Caller, message: MatchPrefix) -> None:
    """Answer Located: the longest run of leading pages with every part readable (I15, I16)."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    found = known.tree.leading(message.keys, core.version)
    if found:  # so that only matched pages are leased, and count as used
        found[-1] = known.tree.cut_at_end(found[-1])
    hints = hinting.of_match(core, message, found)
    hinting.count(core, message.hints)
    _answer_located(core, caller, known.tree, found, message, hints)


def lookup(core: Core, caller: Caller, message: Lookup) -> None:
    """Answer Located: each of these pages that is readable; leases cover whole runs."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    hints = hinting.given(message.hints)
    hinting.count(core, message.hints)
    stretches = known.tree.stretches(message.keys)
    found = [piece for stretch in stretches for piece in _readable(core, known.tree, stretch)]
    _answer_located(core, caller, known.tree, found, message, hints)


def locate_unleased(core: Core, caller: Caller, message: MatchPrefix | Lookup) -> None:
    """Answer Located as for `match_prefix` or `lookup`, but take no lease and touch nothing."""
    tree = asked_namespace(core, caller, message.namespace, message.keys).tree
    if isinstance(message, MatchPrefix):
        found = tree.leading(message.keys, core.version)
    else:
        stretches = tree.stretches(message.keys)
        found = [piece for stretch in stretches for piece in _readable(core, tree, stretch)]
    core.counters["pages_located_in_doubt"] += sum([stretch.count for stretch in found])
    indexes: dict[Segment, int] = {}
    runs = [
        each for piece in found for each in _located_runs(core, piece, message.parts, indexes, 0.0)
    ]
    refs = tuple([segment.ref for segment in indexes])
    core.reply(caller, Located(core.epoch, 0.0, refs, tuple(runs)))


def probe(core: Core, caller: Caller, message: Probe) -> None:
    """Answer Probed; takes no lease and touches nothing."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    find = readable_objects if known.namespace.is_opaque else readable_pages
    core.reply(caller, Probed(bytes(find(core, known.tree, message.keys))))


def list_objects(core: Core, caller: Caller, message: ListObjects) -> None:
    """Answer ObjectsListed; takes no lease and touches nothing."""
    known = asked_namespace(core, caller, message.namespace, message.after)
    if not known.namespace.is_opaque:
        raise BadValue("namespace", short(message.namespace), "an opaque one")
    keys = known.tree.keys_after(message.after, limits.BATCH_PAGES_MAX)
    core.reply(caller, ObjectsListed(b"".join(keys)))


def readable_pages(core: Core, tree: Tree, keys: bytes) -> bytearray:
    """One byte a page: 1 where every part is readable."""
    present = bytearray(len(keys) // KEY_BYTES)
    for stretch in tree.stretches(keys):
        mask = stretch.run.readable(tree.parts, core.version)
        page, first, count = stretch.page, stretch.first, stretch.count
        present[first : first + count] = mask[page : page + count]
    return present


def readable_objects(core: Core, tree: Tree, keys: bytes) -> list[bool]:
    """The same of named objects, each of which is a run: in half the time."""
    parts, version = tree.parts, core.version
    return [run is not None and run.readable(parts, version) == b"\1" for run in tree.runs_of(keys)]


def prefetch(core: Core, caller: Caller, message: Prefetch) -> None:
    """Answer Done, and have brought up what lies below of these pages, as far as can be."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    tier = Tier(check_tier(message.tier) or Tier.DRAM)
    tiering.want_up(core, known.tree, message.keys, tier)
    core.reply(caller, Done())


def give_hints(core: Core, caller: Caller, message: GiveHints) -> None:
    """Answer Done, and have the policy know of these pages' future; no use, and no lease."""
    tree = asked_namespace(core, caller, message.namespace, message.keys).tree
    hints = hinting.given(message.hints)
    hinting.count(core, hints)
    found = tree.stretches(message.keys)
    if found and hints != NO_HINTS:
        found[-1] = tree.cut_at_end(found[-1])  # what follows was not meant
        for stretch, told in zip(found, hinting.for_each(tree, found, hints), strict=True):
            core.eviction.hinted(stretch.run, core.now, told)
    core.reply(caller, Done())


def renew_lease(core: Core, caller: Caller, message: RenewLease) -> None:
    """Lease pages again that still have these generations; a fresh lease, wherever they are."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    pages = len(message.keys) // KEY_BYTES
    if len(message.generations) != pages * WORD:
        raise BadValue("generations", len(message.generations), f"{pages} packed words")
    renewed, until_s = bytearray(pages), core.lease_end_s()
    for stretch in known.tree.stretches(message.keys):
        first, count = stretch.first, stretch.count
        asked = message.generations[first * WORD : (first + count) * WORD]
        still = _still_there(stretch, asked)
        if 1 in still:
            _lease(core, stretch.run, until_s)
            for copy in stretch.run.copies:
                copy.segment.leased_until_s = max(copy.segment.leased_until_s, until_s)
            if core.stripes:
                there = range(stretch.page, stretch.page + count)
                degraded.lease(core, stretch.run, there, until_s)
            renewed[first : first + count] = still
    core.reply(caller, LeaseRenewed(core.tunables.lease_ttl_s, bytes(renewed)))


def asked_namespace(core: Core, caller: Caller, namespace: bytes, keys: bytes) -> KnownNamespace:
    """The caller's namespace; CallerError unless it may ask about that many pages of it."""
    known = core.namespaces.get(namespace)
    caller.session.must_own(known.namespace.content)
    if len(keys) % KEY_BYTES:
        raise BadValue("keys", len(keys), f"a multiple of {KEY_BYTES} bytes")
    if len(keys) > limits.BATCH_PAGES_MAX * KEY_BYTES:
        raise BadValue("keys", len(keys) // KEY_BYTES, f"at most {limits.BATCH_PAGES_MAX} pages")
    return known


def give_back_lease(core: Core, caller: Caller, message: GiveBackLease) -> None:
    """Answer Done; what nobody else has a lease on may go from now on."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    lease = caller.session.id, message.lease_id
    for stretch in known.tree.stretches(message.keys):
        stretch.run.give_back(lease)
    core.reply(caller, Done())


def _lease(
    core: Core,
    run: Run,
    until_s: float,
    hints: Hints = NO_HINTS,
    lease: LeaseId | None = None,
) -> None:
    """Note an access, with a lease unless `until_s` is 0."""
    run.lease(until_s, lease)
    core.touch(run, hints)
    if run.thinned and until_s:
        core.replication.note_used(core, run)


def _readable(core: Core, tree: Tree, stretch: Stretch) -> Iterator[Stretch]:
    """The readable pieces of a stretch."""
    return pieces(stretch, stretch.run.readable(tree.parts, core.version))


def pieces(stretch: Stretch, mask: bytes) -> Iterator[Stretch]:
    """The pieces of a stretch for whose pages the mask, one byte a page of the run, is 1."""
    stop = stretch.page + stretch.count
    page = mask.find(1, stretch.page, stop)
    while page >= 0:
        gap = mask.find(0, page, stop)
        end = gap if gap >= 0 else stop
        yield Stretch(stretch.first + page - stretch.page, end - page, stretch.run, page)
        page = mask.find(1, end, stop)


def _still_there(stretch: Stretch, asked: bytes) -> bytes:
    """One byte a page: 1 where some readable copy has the generation that was asked for."""
    a, b = stretch.page * WORD, (stretch.page + stretch.count) * WORD
    merged = bytearray(stretch.count)
    for copy in stretch.run.copies:
        if not copy.segment.readable:
            continue
        held = copy.generations[a:b]
        if held == asked and not copy.absent:
            return b"\1" * stretch.count
        for i, (mine, theirs) in enumerate(zip(words(held), words(asked), strict=True)):
            if mine and mine == theirs:
                merged[i] = 1
    return bytes(merged)


def _answer_located(
    core: Core,
    caller: Caller,
    tree: Tree,
    found: list[Stretch],
    message: MatchPrefix | Lookup,
    hints: Hints,
) -> None:
    core.counters["pages_matched"] += sum([stretch.count for stretch in found])
    core.counters["pages_asked"] += len(message.keys) // KEY_BYTES
    indexes: dict[Segment, int] = {}
    runs: list[LocatedRun] = []
    ttl_s, until_s = 0.0, 0.0
    if message.lease:
        ttl_s, until_s = core.tunables.lease_ttl_s, core.lease_end_s()
    lease = (caller.session.id, message.lease_id) if message.lease_id else None
    for stretch, told in zip(found, hinting.for_each(tree, found, hints), strict=True):
        _lease(core, stretch.run, until_s, told, lease)
        tiering.note_hits(core, tree.parts, stretch, is_leased=message.lease)
        runs += _located_runs(core, stretch, message.parts, indexes, until_s)
    if message.lease:
        heat.note_reads(core, tree, found, message.parts, caller.session.host)
    for segment in indexes:
        segment.leased_until_s = max(segment.leased_until_s, until_s)
    refs = tuple([segment.ref for segment in indexes])
    core.reply(caller, Located(core.epoch, ttl_s, refs, tuple(runs)))


def answer_part(core: Core, caller: Caller, found: list[Stretch], part: int) -> None:
    """Answer Located: where this part of these pages is, leased, whatever else they lack."""
    indexes: dict[Segment, int] = {}
    runs: list[LocatedRun] = []
    until_s = core.lease_end_s()
    for stretch in found:
        _lease(core, stretch.run, until_s)
        runs += _located_runs(core, stretch, (part,), indexes, until_s)
    for segment in indexes:
        segment.leased_until_s = max(segment.leased_until_s, until_s)
    refs = tuple([segment.ref for segment in indexes])
    core.reply(caller, Located(core.epoch, core.tunables.lease_ttl_s, refs, tuple(runs)))


def _located_runs(
    core: Core,
    stretch: Stretch,
    parts: tuple[int, ...],
    indexes: dict[Segment, int],
    until_s: float,
) -> Iterator[LocatedRun]:
    """One entry where every copy has every page, else one for each change of who has what."""
    first, count, page = stretch.first, stretch.count, stretch.page
    copies = [
        copy
        for copy in stretch.run.copies
        if copy.segment.readable and (not parts or copy.part in parts)
    ]
    start, all_whole = 0, not any(copy.absent for copy in copies)
    while start < count:
        stop = count
        if not all_whole:
            stop = start + _uniform(copies, page + start, page + count)
        located = tuple(
            [
                _located_copy(copy, page + start, page + stop, indexes)
                if copy.segment is not core.stripes.place
                else _decoded(
                    core, stretch, copy, range(page + start, page + stop), indexes, until_s
                )
                for copy in copies
                if all_whole or copy.generation(page + start)
            ]
        )
        yield LocatedRun(first + start, stop - start, located)
        start = stop


def _uniform(copies: list[Copy], page: int, stop: int) -> int:
    """How many pages from `page` on have the same copies."""
    patterns = list(zip(*(copy.present(page, stop) for copy in copies), strict=True))
    return next((i for i, each in enumerate(patterns) if each != patterns[0]), stop - page)


def _decoded(
    core: Core,
    stretch: Stretch,
    copy: Copy,
    pages: range,
    indexes: dict[Segment, int],
    until_s: float,
) -> LocatedCopy:
    """Where pages are that only their stripes give."""
    stripes = degraded.located(core, stretch.run, copy, pages, indexes, until_s)
    located = _located_copy(copy, pages.start, pages.stop, indexes)
    return msgspec.structs.replace(located, stripes=stripes)


def _located_copy(copy: Copy, page: int, stop: int, indexes: dict[Segment, int]) -> LocatedCopy:
    a, b = page * WORD, stop * WORD
    index = indexes.setdefault(copy.segment, len(indexes))
    columns = copy.offsets[a:b], copy.generations[a:b], copy.checksums[a:b]
    return LocatedCopy(copy.part, index, copy.part_bytes, *columns)
