"""Making room: pages whose time is up, then victims of the eviction policy, tails first.

A page goes only when nothing hangs below it, no put of it is open and no lease on it runs. Work is
bounded per call and goes on at the next Tick. See the step table "evict" in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.replica import ExtentState
from master.draining import drain_piece
from master.placing import put_segments
from master.retiring import retire_pages
from master.victims import evict_some

if TYPE_CHECKING:
    from master.core import Core
    from master.segments import Segment

EXPIRED_PER_TICK: Final = 64
"""Runs."""
SEARCHES_PER_TICK: Final = 2
"""Searches for victims; each costs 0.1 ms, and 0.5 ms more where it finds long tails."""
SIZE_EVERY_S: Final = 10.0
"""Between two counts of the pool's pages for the policy: each looks at every namespace."""
RETRY_S: Final = 0.05
"""How long to wait when nothing could go."""


def expire_runs(core: Core) -> None:
    """Drop runs whose time is up, children before parents.

    A run with children or open plans is left out of the wheel: it comes back when it loses the
    last of them, so that its effective expiry is the maximum over its subtree. So do pages that
    are pinned hard, when the pin ends.
    """
    for run in core.expiry.take_due(core.now, EXPIRED_PER_TICK):
        if not run.keys:
            continue  # it went with one before it
        tree = core.tree(run.namespace)
        if run.expires_s > core.now:
            core.expiry.place(run, run.expires_s)
        elif run.plans or tree.has_children(run):
            continue
        elif run.leased_until_s > core.now:
            core.expiry.place(run, run.leased_until_s)
        else:
            kept = core.pins.kept(run)
            if kept < len(run):
                core.counters["pages_expired"] += len(run) - kept
                retire_pages(core, tree, run, kept, len(run) - kept)


def next_reclaim_s(core: Core) -> float:
    """When room is to be made again: at once while some is wanted and some was found."""
    return core.reclaim_at_s if core.pressed or core.wanted_bytes else float("inf")


def make_room(core: Core) -> None:
    """Evict for the puts that found no room, and below the watermarks."""
    if core.now < core.reclaim_at_s:
        return
    if core.now >= core.size_told_s + SIZE_EVERY_S:
        core.tell_size()
    searches, freed = SEARCHES_PER_TICK, 0
    for segment in list(core.pressed):
        excess = _excess_bytes(core, segment)
        if excess <= 0:
            del core.pressed[segment]
        elif searches > 0:
            chunks = segment.allocator.chunk_list
            evicted, searches = evict_some(core, segment, chunks, excess, searches)
            freed += evicted
    for size_class in list(core.wanted_bytes):
        evicted, searches = _serve(core, size_class, searches)
        freed += evicted
    if not freed and (core.pressed or core.wanted_bytes):
        core.reclaim_at_s = core.now + RETRY_S
        core.wanted_bytes.clear()  # whoever still wants it asks again, those that wait now
        core.waiting.wake_for_room()


def _excess_bytes(core: Core, segment: Segment) -> int:
    """Bytes to retire until the segment is at its low watermark."""
    allocator = segment.allocator
    kept = allocator.used_bytes - allocator.bytes_in[ExtentState.RETIRED]
    goal = core.tunables.watermark_low * segment.allocator.capacity_bytes
    return int(kept - goal) if segment.takes_plans else 0


def _serve(core: Core, size_class: int, searches: int) -> tuple[int, int]:
    """Evict extents of a class that found no room: (bytes evicted, searches left)."""
    freed = 0
    for segment in put_segments(core):
        wanted = core.wanted_bytes.get(size_class, 0) - freed
        if wanted <= 0 or searches <= 0:
            break
        if not segment.takes_plans or size_class > segment.geometry.chunk_bytes:
            continue
        same = [c for c in segment.allocator.chunk_list if c.size_class == size_class]
        evicted, searches = evict_some(core, segment, same, wanted, searches)
        if not evicted:
            drain_piece(core, segment, size_class)
        freed += evicted
    core.room_is_coming(size_class, freed)
    return freed, searches
