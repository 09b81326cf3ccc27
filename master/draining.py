"""Emptying chunks of one size class so that another class can have their frames.

Without it a pool that was filled with pages of one size would never take another size.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.replica import ExtentState
from master.victims import evict_copy, evict_pages, may_go

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.chunks import Chunk
    from master.core import Core
    from master.run import Run
    from master.segments import Segment

CANDIDATES: Final = 4
HEAT_SAMPLES: Final = 4
STEP_RUNS: Final = 32
"""Looked at or evicted."""


def drain_piece(core: Core, segment: Segment, size_class: int) -> bool:
    """Start to empty the coldest of some pieces that a chunk of this class needs.

    Whether that is under way now, or was already; not where nothing can be emptied.
    """
    allocator = segment.allocator
    if segment.draining or not allocator.chunk_list:
        return segment.draining
    piece_bytes = segment.geometry.chunk_span(size_class)
    starts = {
        allocator.chunk_list[core.sample() % len(allocator.chunk_list)].start
        // piece_bytes
        * piece_bytes: None
        for _ in range(CANDIDATES)
    }
    pieces = [allocator.chunks_within(start, piece_bytes) for start in starts]
    other = [piece for piece in pieces if all(c.size_class != size_class for c in piece)]
    if not other:
        return False
    coldest = min(other, key=lambda piece: _heat(core, piece))
    segment.draining = True
    core.start(_drain(core, segment, coldest, size_class))
    return True


def _heat(core: Core, chunks: list[Chunk]) -> float:
    """The highest score among some pages of these chunks."""
    scores = [float("-inf")]
    for chunk in chunks:
        for _ in range(HEAT_SAMPLES):
            slot = chunk.states.find(ExtentState.SEALED, core.sample() % chunk.slots)
            if slot >= 0:
                run = core.tree(chunk.namespaces[slot]).get(chunk.key(slot))
                assert run is not None, (chunk.start, slot)
                pinned = core.pins.kept_if_possible(run)
                scores.append(inf if pinned else core.eviction.score(run, core.now))
    return max(scores)


def _drain(core: Core, segment: Segment, chunks: list[Chunk], size_class: int) -> Iterator[None]:
    """A job: evict every page of these chunks with what hangs below; leave what may not go."""
    for chunk in chunks:
        segment.allocator.close(chunk)
    looked = 0
    stuck: set[Run] = set()
    for chunk in chunks:
        # Children mostly come after their parents: so each page is a leaf when its turn comes.
        for slot in reversed(list(chunk.slots_in(ExtentState.SEALED))):
            for _ in _evict_below(core, segment, chunk, slot, stuck):
                looked += 1
                if looked % STEP_RUNS == 0:
                    yield
    segment.draining = False
    left = [chunk for chunk in chunks if not _is_emptying(chunk)]
    for chunk in left:
        segment.allocator.reopen(chunk)
    if not left:
        core.room_is_coming(size_class, segment.geometry.chunk_span(size_class))


def _is_emptying(chunk: Chunk) -> bool:
    """Whether every slot is free or will be."""
    retired = chunk.states.count(ExtentState.RETIRED)
    return retired + chunk.states.count(ExtentState.FREE) == chunk.slots


def _evict_below(
    core: Core, segment: Segment, chunk: Chunk, slot: int, stuck: set[Run]
) -> Iterator[None]:
    """Evict this page and what hangs below, leaves first, until one may not go.

    A step for each run looked at: from the page down to a leaf, then from each leaf's parent on.
    `stuck` are runs below which something may not go.
    """
    tree, key = core.tree(chunk.namespaces[slot]), chunk.key(slot)
    leaf: Run | None = None
    while segment.takes_plans and chunk.states[slot] == ExtentState.SEALED:
        run = tree.get(key)
        assert run is not None, key
        if evict_copy(core, segment, run, run.page_of(key)):
            return
        if leaf is None or not leaf.keys:  # it may have gone since the last step
            leaf = run
        if leaf in stuck or not (tree.has_children(leaf) or may_go(core, tree, leaf)):
            stuck |= {leaf, run}
            return
        if tree.has_children(leaf):
            leaf = next(tree.children(leaf))
        else:
            above = tree.parent_run(leaf)
            evict_pages(core, leaf, run.page_of(key) if leaf is run else 0)
            leaf = above
        yield
