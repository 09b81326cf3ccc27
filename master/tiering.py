"""Which pages move between tiers: down ahead of eviction, and up once they are wanted again.

While a segment is filled above a watermark, the pages that would be evicted next are copied to the
next slower tier of their worker, to a drive only if its admission policy takes them; the copies
above stay until eviction wants the room. So much is copied as lies above the watermark, and then as
much as leaves: a drive that is too small to keep it is not written over and over. Pages that were
read from a drive a second time, or are about to be read, are copied up, to a device only if that
was asked; the slower tier keeps them. Must not know how a move is carried out or how victims are
found. See the step table "move" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES
from kvstore.replica import Tier
from master import moves, placing, victims
from master.draining import drain_piece
from master.moves import MoveKind, Wish
from master.segments import RANKS
from policies.admission.protocol import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.directory import Stretch, Tree
    from master.run import Copy, Run
    from master.segments import Segment

ROOM_SEARCHES: Final = 1
"""Searches for room for moves that found none, in each segment."""
RETRY_S: Final = 0.05
WISHES_MAX: Final = 1024
WISHES_PER_LOOK: Final = 32
TRIES_MAX: Final = 4
"""How often a wish looks for room in memory."""
MEMORY_RANK: Final = RANKS[Tier.DRAM]
HITS: Final = tuple(f"hits_{tier}" for tier in Tier)
"""Counters of pages by the slowest tier that a reader of all their parts has to read from."""


def note_hits(core: Core, parts: int, stretch: Stretch, *, is_leased: bool) -> None:
    """Count pages that were found by tier; those that lie on a drive only may be brought up."""
    run = stretch.run
    assert run.copies, stretch  # I3: only pages that can be read are found, and a hole lies nowhere
    fastest = run.copies[0]
    if parts == 1 and not fastest.absent and fastest.segment.readable:
        core.counters[HITS[fastest.segment.rank]] += stretch.count
        is_cold = fastest.segment.rank > MEMORY_RANK
    else:
        is_cold = _count_mixed(core, parts, stretch)
    if is_cold and is_leased:
        run.cold_hits += 1
        if run.cold_hits >= core.tunables.promote_hits:
            run.cold_hits = 0
            _wish(core, Wish(run.namespace, run.keys))


def _count_mixed(core: Core, parts: int, stretch: Stretch) -> bool:
    """Count pages whose copies lie here and there; whether some lie on a drive only."""
    ranks = {copy.segment.rank for copy in stretch.run.copies}
    if len(ranks) == 1:  # the usual case: all parts of all that can be read lie there
        (rank,) = ranks
        core.counters[HITS[rank]] += stretch.count
        return rank > MEMORY_RANK
    known = found = 0
    for rank, name in enumerate(HITS):
        known = found
        held = stretch.run.held_up_to(parts, rank)
        found = held.count(1, stretch.page, stretch.page + stretch.count)
        if found > known:
            core.counters[name] += found - known
    return found > known


def want_up(core: Core, tree: Tree, keys: bytes, tier: Tier) -> None:
    """Have those of these pages that lie in slower tiers only brought up, as far as can be."""
    for stretch in tree.stretches(keys):
        held = stretch.run.held_up_to(tree.parts, RANKS[tier])
        if 0 in held[stretch.page : stretch.page + stretch.count]:
            first = stretch.first * KEY_BYTES
            wanted = keys[first : first + stretch.count * KEY_BYTES]
            _wish(core, Wish(tree.namespace, wanted, tier))


def _wish(core: Core, new: Wish) -> None:
    wishes = core.moves.wishes
    if new.tier is Tier.DRAM and not core.moves.has_drives:
        return
    if len(wishes) >= WISHES_MAX:  # I7: it will be asked for again, or was not needed
        core.counters["promotions_dropped"] += 1
        return
    wish = wishes.setdefault(new.keys[:KEY_BYTES], new)
    if len(new.keys) > len(wish.keys):
        wish.keys, wish.room_bytes = new.keys, None
    wish.tier = min(wish.tier, new.tier, key=RANKS.__getitem__)
    core.moves.look(core.now)


def look(core: Core) -> None:
    """Begin what moves can be begun now: up before down, since somebody waits."""
    if core.now < core.moves.look_at_s:
        return
    core.moves.look_at_s = inf
    _grant_wishes(core)
    for segment in list(core.moves.demoting):
        _demote_some(core, segment)


def _grant_wishes(core: Core) -> None:
    wishes = core.moves.wishes
    others = len(wishes) - WISHES_PER_LOOK
    for wish in list(islice(wishes.values(), WISHES_PER_LOOK)):
        key = wish.keys[:KEY_BYTES]
        del wishes[key]
        if not _is_granted(core, wish):
            wishes[key] = wish  # behind the others, which may be of another worker
    if others > 0:
        are_stuck = len(wishes) == others + WISHES_PER_LOOK
        core.moves.look(core.now + (RETRY_S if are_stuck else 0.0))


def _is_granted(core: Core, wish: Wish) -> bool:
    """Bring up what can be; whether nothing is left to do."""
    waits = False
    lacking: dict[str, Counter[int]] = {}
    for stretch, copy in _slower_copies(core, wish):
        waits = _bring_up(core, stretch, copy, wish.tier, lacking) or waits
    if lacking and wish.room_bytes is None:
        wish.room_bytes = _cold_bytes(core, wish)
    for worker, wanted in lacking.items():
        assert wish.room_bytes is not None, wish
        targets = placing.of_worker(core, worker, wish.tier)
        wish.room_bytes -= make_room(core, targets, wanted, wish.room_bytes)
    if lacking and wish.tries < TRIES_MAX:
        wish.tries += 1
        core.moves.look(core.now + RETRY_S)
        waits = True
    return not waits


def _slower_copies(core: Core, wish: Wish) -> Iterator[tuple[Stretch, Copy]]:
    """The copies that its pages may be brought up from."""
    for stretch in core.tree(wish.namespace).stretches(wish.keys):
        for copy in stretch.run.copies:
            if copy.segment.rank > RANKS[wish.tier] and copy.segment.takes_orders:
                yield stretch, copy


def _cold_bytes(core: Core, wish: Wish) -> int:
    """Room that all pages of a wish take which are still to be brought up."""
    return sum(
        _cold(stretch, copy, wish.tier).count(1)
        * moves.class_for(core, stretch.run, copy, wish.tier)
        for stretch, copy in _slower_copies(core, wish)
    )


def _bring_up(
    core: Core, stretch: Stretch, copy: Copy, tier: Tier, lacking: dict[str, Counter[int]]
) -> bool:
    """Copy up the pages of a stretch that only slower tiers hold; whether some have to wait."""
    worker, lane = copy.segment.worker, moves.lane_of(core, copy.segment)
    size_class = moves.class_for(core, stretch.run, copy, tier)
    high = core.tunables.watermark_high
    while 1 in (cold := _cold(stretch, copy, tier)):
        free_at_s = moves.free_at_s(core, lane)
        if free_at_s > core.now:
            core.moves.look(free_at_s)
            return True
        targets = placing.of_worker(core, worker, tier)
        target = next((s for s in targets if pages_with_room(core, s, size_class, high)), None)
        if target is None:
            if targets:
                lacking.setdefault(worker, Counter())[size_class] += cold.count(1) * size_class
            return False
        pages = _first_of(cold, copy)[: pages_with_room(core, target, size_class, high)]
        first = range(stretch.page + pages.start, stretch.page + pages.stop)
        moves.start(core, MoveKind.PROMOTE, stretch.run, copy, first, target)
    return False


def pages_with_room(core: Core, segment: Segment, size_class: int, mark: float) -> int:
    """How many pages find room here below a watermark: the last of a segment is for pages that are
    put.
    """
    if not placing.is_open(core, segment, size_class):
        return 0
    end = mark * segment.geometry.payload_bytes
    return max(0, int(end - segment.allocator.used_bytes) // size_class)


def _cold(stretch: Stretch, copy: Copy, tier: Tier) -> bytes:
    """One byte a page of the stretch: 1 where this copy has it, none lies so far up, and no plan
    moves it.
    """
    run, stop, rank = stretch.run, stretch.page + stretch.count, RANKS[tier]
    warm = run.held_by(
        c for c in run.copies_of(copy.part) if c.segment.rank <= rank and c.segment.readable
    )
    plans = [plan for plan in run.plans if plan.part == copy.part]
    here = copy.present(0, len(run))
    return bytes(
        here[page] and not warm[page] and not any(plan.is_open(run.key(page)) for plan in plans)
        for page in range(stretch.page, stop)
    )


def _first_of(cold: bytes, copy: Copy) -> range:
    """The first of the pages that are cold, as many in a row as move at once."""
    first = cold.find(1)
    gap = cold.find(0, first)
    end = gap if gap >= 0 else len(cold)
    return range(first, min(end, first + moves.pages_at_once(copy.part_bytes)))


def _demote_some(core: Core, segment: Segment) -> None:
    """One search for pages to demote; goes on at the next look while some are found.

    Each put above the watermark begins anew, when it is planned and when it is sealed: with twice
    as many searches it costs half as much again, and they find no more.
    """
    demoting = core.moves.demoting
    targets = below(core, segment)
    excess = segment.allocator.used_bytes
    excess -= int(core.tunables.watermark_demote * segment.allocator.capacity_bytes)
    if not segment.takes_orders or not targets or segment.demoted_bytes >= excess:
        del demoting[segment]
        return
    lane = moves.lane_of(core, segment)
    free_at_s = moves.free_at_s(core, lane)
    if free_at_s > core.now:
        core.counters["demotions_delayed"] += 1
        core.moves.look(free_at_s)
        return
    begun = False
    lacking: Counter[int] = Counter()
    for run in victims.find_unsafe(core, segment):
        for copy in run.copies:
            if copy.segment is segment and moves.free_at_s(core, lane) <= core.now:
                begun = _demote(core, run, copy, targets, lacking) or begun
    make_room(core, targets, lacking)
    if begun:
        core.moves.look(core.now)
    else:
        del demoting[segment]


def below(core: Core, segment: Segment) -> list[Segment]:
    """Where this segment's pages are copied: the next slower tier that its worker has."""
    slower = (tier for tier in Tier if RANKS[tier] > segment.rank)
    found = (placing.of_worker(core, segment.worker, tier) for tier in slower)
    return next((each for each in found if each), [])


def _demote(
    core: Core, run: Run, copy: Copy, targets: list[Segment], lacking: Counter[int]
) -> bool:
    """Copy the last pages of a copy that lie in no slower tier; whether some are on their way."""
    pages = last_unsafe(core, run, copy)
    if not pages:
        return False
    tier = targets[0].tier
    size_class = moves.class_for(core, run, copy, tier)
    target = next((s for s in targets if placing.is_open(core, s, size_class)), None)
    if target is None:
        lacking[size_class] += len(pages) * size_class
        return False
    pinned = pages[: max(0, core.pins.named(run) - pages.start)]
    pages = pinned or pages  # what is above a pinned page stays as long as that, and goes with it
    if tier is Tier.NVME and not _is_admitted(core, run, pages, size_class, bool(pinned)):
        core.counters[f"demotions_refused_{core.admission.name}"] += 1
        return False
    moves.start(core, MoveKind.DEMOTE, run, copy, pages, target)
    return True


def _is_admitted(core: Core, run: Run, pages: range, size_class: int, is_pinned: bool) -> bool:
    chance = core.eviction.reuse_probability(run, core.now)
    candidate = Candidate(len(pages) * size_class, run.touches, chance, is_pinned)
    return core.admission.admits(candidate, core.now)


def last_unsafe(core: Core, run: Run, copy: Copy) -> range:
    """The last of those pages of a copy that lie in no slower tier, as many as move at once."""
    unsafe = victims.unsafe_pages(core, run, copy)
    stop = unsafe.rfind(1) + 1
    first = unsafe.rfind(0, 0, stop) + 1
    return range(max(first, stop - moves.pages_at_once(copy.part_bytes)), stop)


def make_room(
    core: Core, targets: list[Segment], lacking: Counter[int], limit_bytes: float = inf
) -> int:
    """Where nothing is open for these classes: evict, or empty a chunk of another class.

    The bytes of the limit that this has used up.
    """
    used = 0
    for size_class, wanted_bytes in lacking.items():
        core.counters["moves_without_room"] += 1
        left = int(min(wanted_bytes, limit_bytes - used))
        for segment in targets:
            if left <= 0:
                break
            same = [c for c in segment.allocator.chunk_list if c.size_class == size_class]
            freed, _ = victims.evict_some(core, segment, same, left, ROOM_SEARCHES)
            if not freed and drain_piece(core, segment, size_class):
                freed = left
            left -= freed
            used += freed
    return used
