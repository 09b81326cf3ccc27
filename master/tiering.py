"""Which pages move between tiers: down ahead of eviction, so that memory is given back at once.

While memory is filled above a watermark, the pages that would be evicted next are offered to the
admission policy of the drives and copied there; their copies in memory stay until eviction wants
the room. So much is copied as lies above the watermark, and then as much as leaves: a drive that
is too small to keep it is not written over and over. Must not know how a move is carried out or
how victims are found. See the step table "move" in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.replica import Tier
from master import moves, placing, victims
from master.draining import drain_piece
from master.moves import MoveKind
from policies.admission.protocol import Candidate

if TYPE_CHECKING:
    from master.core import Core
    from master.run import Copy, Run
    from master.segments import Segment

FRUITLESS_MAX: Final = 4
"""Searches in a row that may find nothing to demote before the segment is let be."""
ROOM_SEARCHES: Final = 1
"""Searches for room below, for each move that finds none."""


def look(core: Core) -> None:
    """Begin what moves can be begun now."""
    if core.now < core.moves.look_at_s:
        return
    core.moves.look_at_s = float("inf")
    for segment in list(core.moves.demoting):
        _demote_some(core, segment)


def _demote_some(core: Core, segment: Segment) -> None:
    """One search for pages to demote; goes on at the next look."""
    demoting = core.moves.demoting
    targets = placing.of_worker(core, segment.worker, Tier.NVME)
    excess = segment.allocator.used_bytes
    excess -= int(core.tunables.watermark_demote * segment.geometry.payload_bytes)
    if not segment.takes_orders or not targets or segment.demoted_bytes >= excess:
        del demoting[segment]
        return
    lane = moves.lane_of(core, segment)
    free_at_s = moves.free_at_s(core, lane)
    if free_at_s > core.now:
        core.moves.look(free_at_s)
        return
    begun = False
    for run in victims.find_unsafe(core, segment):
        if moves.free_at_s(core, lane) <= core.now:
            begun = _demote(core, segment, run, targets) or begun
    demoting[segment] = 0 if begun else demoting[segment] + 1
    if demoting[segment] < FRUITLESS_MAX:
        core.moves.look(core.now)
    else:
        del demoting[segment]


def _demote(core: Core, segment: Segment, run: Run, targets: list[Segment]) -> bool:
    """Copy the last pages of a run that lie in no slower tier; whether some are on their way."""
    begun = False
    for copy in run.copies:
        if copy.segment is segment:
            pages = _last_unsafe(core, run, copy)
            begun = bool(pages and _demote_part(core, run, copy, pages, targets)) or begun
    return begun


def _demote_part(core: Core, run: Run, copy: Copy, pages: range, targets: list[Segment]) -> bool:
    size_class = moves.class_for(core, run, copy, Tier.NVME)
    target = next((s for s in targets if placing.is_open(core, s, size_class)), None)
    if target is None:
        _make_room(core, targets, size_class, len(pages) * size_class)
        return False
    chance = core.eviction.reuse_probability(run, core.now)
    candidate = Candidate(len(pages) * size_class, run.touches, chance)
    if not core.admission.admits(candidate, core.now):
        core.counters["demotions_refused"] += 1
        return False
    moves.start(core, MoveKind.DEMOTE, run, copy, pages, target)
    return True


def _last_unsafe(core: Core, run: Run, copy: Copy) -> range:
    """The last of those pages of a copy that lie in no slower tier, as many as move at once."""
    unsafe = victims.unsafe_pages(core, run, copy)
    stop = unsafe.rfind(1) + 1
    first = unsafe.rfind(0, 0, stop) + 1
    return range(max(first, stop - moves.pages_at_once(copy.part_bytes)), stop)


def _make_room(core: Core, targets: list[Segment], size_class: int, wanted_bytes: int) -> None:
    """Nothing is open for this class below: evict there, or empty a chunk of another class."""
    core.counters["demotions_without_room"] += 1
    for segment in targets:
        same = [c for c in segment.allocator.chunk_list if c.size_class == size_class]
        freed, _ = victims.evict_some(core, segment, same, wanted_bytes, ROOM_SEARCHES)
        if not freed:
            drain_piece(core, segment, size_class)
