"""Finding what the eviction policy would let go, and letting it go: tails of runs without children.

Samples of sealed extents stand for the whole pool (as good as a heap when each sample is walked to
a leaf, and without its memory). Deterministic: the samples are a fixed sequence. Of pages that lie
elsewhere too only the copy in the segment goes, children or not. Where the others' workers are
silent it is worth as much as a last one, and stays if it, or what hangs below, is pinned hard; else
it may go, since so may a last one; the others stay in the directory, for their workers may live.
"""

from __future__ import annotations

from enum import IntEnum
from math import isfinite
from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.replica import ExtentState
from kvstore.segment import size_class_of
from master import heat, replica_counts
from master.retiring import retire_copy, retire_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from master.chunks import Chunk
    from master.core import Core
    from master.directory import Tree
    from master.run import Copy, Run
    from master.segments import Segment

_SEALED: Final = int(ExtentState.SEALED)
SAMPLES: Final = 64
KEPT: Final = 2
"""Victims of one search: the lowest scores of all samples, so that each costs 32 samples. With 8
a pool of a thousand pages serves 0.2 to 0.4 points less than one that sees all scores, with 16
less by up to 0.1."""
KEPT_AHEAD: Final = 8
"""The coldest eighth of a segment is made safe ahead of eviction: first of what is not leased."""
FRUITLESS_MAX: Final = 4
"""Searches in a row that may find nothing before the segment is given up for now."""
DEPTH_MAX: Final = 256
"""Runs walked from a sample towards the leaves."""
TAIL_PAGES_MAX: Final = 64
BELOW_RUNS_MAX: Final = 16
"""Looked through for hard pins, each page by page (I27)."""


class Worth(IntEnum):
    """What a victim's copies are to the pool; the least goes first."""

    SURPLUS = 0
    SPARE = 1
    LAST = 2


def evict_some(
    core: Core, segment: Segment, chunks: Sequence[Chunk], goal_bytes: int, searches: int
) -> tuple[int, int]:
    """Evict from these chunks of a segment until `goal_bytes` will be free.

    Returns (bytes that will be free, searches left).
    """
    freed = fruitless = 0
    while chunks and freed < goal_bytes and searches > 0 and fruitless < FRUITLESS_MAX:
        searches -= 1
        victims = find_victims(core, segment, chunks)
        fruitless = 0 if victims else fruitless + 1
        for victim in victims:
            # An earlier victim may have taken this one along, or bared its parent.
            if freed < goal_bytes and victim.keys and not _is_spared(core, victim):
                freed += evict_tail(core, segment, victim, goal_bytes - freed)
    return freed, searches


def find_victims(core: Core, segment: Segment, chunks: Sequence[Chunk]) -> list[Run]:
    """The runs of lowest score at the ends of some samples, lowest first; none when none may go.

    Replicas that are too many, or for heat only, come first, then others than the last: a full pool
    keeps more pages so, and hits more (two hosts: 27.3 % against 20.4 % of a trace's pages, where
    one replica of each gives 27.4 %). Pages that lie in slower tiers only come last: their end
    would help the segment only later. Soft-pinned ones come when there is nothing else.
    """
    found: dict[Run, tuple[bool, int, bool, float]] = {}
    has_pins = bool(core.pins)
    for tree, sample in _samples(core, chunks):
        run = _end(core, segment, tree, sample)
        if run is None or run in found or (has_pins and not _may_help(core, segment, run)):
            continue
        is_last = has_pins and core.pins.is_soft(run) and not _safe_tail(core, run, segment)
        is_last = is_last or run.namespace == core.stripes.parity  # it goes with its pages
        lies_below = run.copies[0].segment.rank > segment.rank  # they are fastest first
        score = _score(core, run)
        worth = _worth(core, run, segment) if isfinite(score) else Worth.SURPLUS
        found[run] = is_last, worth, lies_below, score
    best = sorted(found, key=found.__getitem__)[:KEPT]
    return [run for run in best if found[run][0] == found[best[0]][0]]


def _may_help(core: Core, segment: Segment, run: Run) -> bool:
    """Whether the last page of `run` may leave the segment, or the pool."""
    return not core.pins.is_hard(run) or bool(_safe_tail(core, run, segment))


def find_unsafe(core: Core, segment: Segment) -> list[Run]:
    """The runs at the ends of some samples that the segment will lose first, if they lie nowhere
    below it; none where the coldest of all do.

    Readers keep leased ones: while much is leased, the few others are lost, cold or not.
    """
    found: dict[Run, tuple[bool, float]] = {}
    for tree, sample in _samples(core, segment.allocator.chunk_list):
        run = _last_in(tree, sample, segment)
        if not run.plans:
            found[run] = run.leased_until_s > core.now, _score(core, run)
    coldest = sorted(found, key=found.__getitem__)[:KEPT_AHEAD]
    return [
        run
        for run in coldest
        if isfinite(found[run][1])
        and any(1 in unsafe_pages(core, run, c) for c in run.copies if c.segment is segment)
    ]


def coldest(core: Core, segment: Segment) -> list[Run]:
    """Of the runs of some samples, those that can be hit and that nobody reads or puts, coldest
    first.
    """
    found: dict[Run, float] = {}
    for tree, run in _samples(core, segment.allocator.chunk_list):
        if run not in found and _is_idle(core, tree, run):
            found[run] = _score(core, run)
    scored = sorted(found, key=found.__getitem__)
    return [run for run in scored if isfinite(found[run])][:KEPT_AHEAD]


def unsafe_pages(core: Core, run: Run, copy: Copy) -> bytes:
    """One byte a page: 1 where this copy has it, no slower tier does, and it can be hit."""
    pages, rank = len(run), copy.segment.rank
    below = run.held_by(
        c for c in run.copies_of(copy.part) if c.segment.rank > rank and c.segment.readable
    )
    hits = run.readable(core.tree(run.namespace).parts, core.version)
    mine, safe, hit = (
        int.from_bytes(each, "little") for each in (copy.present(0, pages), below, hits)
    )
    return (mine & hit & ~safe).to_bytes(pages, "little")


def _samples(core: Core, chunks: Sequence[Chunk]) -> Iterator[tuple[Tree, Run]]:
    """Runs of some sealed extents, of which there may be none."""
    for _ in range(SAMPLES if chunks else 0):
        number = core.sample() >> 16
        chunk = chunks[number % len(chunks)]
        slot = chunk.states.find(_SEALED, (number >> 24) % chunk.slots)
        if slot < 0:
            slot = chunk.states.find(_SEALED)
            if slot < 0:
                continue
        tree = core.tree(chunk.namespaces[slot])
        run = tree.get(chunk.key(slot))
        assert run is not None, (chunk.start, slot)
        yield tree, run


def _score(core: Core, run: Run) -> float:
    """The policy's score; pages that a hole before them hides go first."""
    if run.has_gaps():
        return float("-inf")
    if run.parent != ROOT_PARENT:
        parent = core.tree(run.namespace).get(run.parent)
        if parent is None or parent.is_hole(len(parent) - 1):
            return float("-inf")
    return core.eviction.score(run, core.now)


def _is_spared(core: Core, run: Run) -> bool:
    """Whether the policy gives it a second chance: none for pages that cannot be hit."""
    return isfinite(_score(core, run)) and core.eviction.spares(run, core.now)


def _end(core: Core, segment: Segment, tree: Tree, run: Run) -> Run | None:
    """The first leaf below this run, if it may go.

    Or the last run above it in this segment, where what hangs below lies elsewhere and the end of
    that run does so too.
    """
    for _ in range(DEPTH_MAX):
        child = next(tree.children(run), None)
        if child is None or (not _lies_in(child, segment) and _covered_tail(run, segment)):
            return run if _is_idle(core, tree, run) else None
        run = child
    return None


def _last_in(tree: Tree, run: Run, segment: Segment) -> Run:
    """The last run below this one that the segment has pages of."""
    for _ in range(DEPTH_MAX):
        child = next(tree.children(run), None)
        if child is None or not _lies_in(child, segment):
            break
        run = child
    return run


def _lies_in(run: Run, segment: Segment) -> bool:
    return any(copy.segment is segment for copy in run.copies)


def _covered_tail(run: Run, segment: Segment) -> range:
    """The last of the pages that the segment has of this run, as far as they lie elsewhere too."""
    return _tail(run, segment, run.covered(segment))


def _safe_tail(core: Core, run: Run, segment: Segment) -> range:
    """The same, as far as the others' workers are not silent."""
    return _tail(run, segment, _safe(core, run, segment))


def _tail(run: Run, segment: Segment, covered: bytes) -> range:
    end = run.held_by(c for c in run.copies if c.segment is segment).rfind(1) + 1
    return range(covered.rfind(0, 0, end) + 1, end)


def _safe(core: Core, run: Run, segment: Segment) -> bytes:
    """One byte a page: 1 where it is left when the segment lets it go and the silent are dead."""

    def is_left(other: Segment) -> bool:
        return other.worker == segment.worker or replica_counts.is_heard(core, other)

    return run.covered(segment, is_left)


def _may_leave(core: Core, run: Run, segment: Segment) -> bytes:
    """One byte a page: 1 where what the segment has of it may go alone (I31)."""
    covered = run.covered(segment)
    if not core.pins:
        return covered
    safe = _safe(core, run, segment)
    if safe == covered:  # nobody is silent: the usual case
        return covered
    kept = len(run) if _is_kept_by_children(core, run) else core.pins.kept(run)
    return safe[:kept] + covered[kept:]


def _is_kept_by_children(core: Core, run: Run) -> bool:
    """Whether a page that is pinned hard hangs below it, or there is too much to know."""
    tree = core.tree(run.namespace)
    below, left = [tree.children(run)], BELOW_RUNS_MAX
    while below:
        child = next(below[-1], None)
        if child is None:
            below.pop()
        elif not left or core.pins.kept(child):
            return True
        else:
            left -= 1
            below.append(tree.children(child))
    return False


def _worth(core: Core, run: Run, segment: Segment) -> int:
    """How much is lost with the segment's last pages of it: a replica more than was asked for, or
    for pages that cannot be hit nothing; another one than the last; the last one.
    """
    if core.domains < 2 or len(run.copies) < 2:
        return Worth.LAST
    covered = _safe_tail(core, run, segment)
    if not covered:
        return Worth.LAST
    here = run.held_by(copy for copy in run.copies if copy.segment is segment)
    counts = zip(_got(core, run, covered), here[covered.start : covered.stop], strict=True)
    replicas = min(count for count, is_here in counts if is_here)
    if replicas > replica_counts.asked(core, run):
        return Worth.SURPLUS
    return Worth.SPARE if replicas > 1 else Worth.LAST


def _is_idle(core: Core, tree: Tree, run: Run) -> bool:
    """Whether nobody reads these pages or puts more of them."""
    if run.plans or max(run.leased_until_s, run.kept_until_s) > core.now:
        return False
    if tree.parts == 1 or core.now >= run.progress_s + core.tunables.put_timeout_base_s:
        return True
    # Parts of them may be on their way: else a put that wants room would drop what it has stored.
    return 0 not in run.readable(tree.parts, core.version)


def may_go(core: Core, tree: Tree, run: Run) -> bool:
    """Whether the last pages of `run` may leave the pool now."""
    return _is_idle(core, tree, run) and not tree.has_children(run) and not core.pins.is_hard(run)


def evict_tail(core: Core, segment: Segment, run: Run, goal_bytes: int) -> int:
    """Let go of as many last pages of `run` as `goal_bytes` asks for; the bytes that will be free.

    Where those in the segment lie elsewhere too, their copies there go alone; the pages stay.
    """
    here = [copy for copy in run.copies if copy.segment is segment]
    page_bytes = sum(size_class_of(copy.part_bytes) for copy in here) or 1
    pages = min(TAIL_PAGES_MAX, -(-goal_bytes // page_bytes))
    covered = _tail(run, segment, _may_leave(core, run, segment))
    if covered:
        return _evict_copies(core, segment, run, covered[-pages:])
    if core.tree(run.namespace).has_children(run):
        return 0
    first = max(0, (covered.stop or len(run)) - pages)
    return evict_pages(core, run, max(first, core.pins.kept_if_possible(run)))


def _evict_copies(core: Core, segment: Segment, run: Run, pages: range) -> int:
    core.counters[f"copies_evicted_{segment.tier}"] += len(pages)
    here = [copy for copy in run.copies if copy.segment is segment]
    before = _got(core, run, pages)
    freed = sum(retire_copy(core, run, copy, pages.start, len(pages)) for copy in here)
    after = _got(core, run, pages)
    fewer = [count for count, earlier in zip(after, before, strict=True) if count < earlier]
    if fewer:
        _thin(core, run, min(fewer))
    return freed


def _got(core: Core, run: Run, pages: range) -> bytes:
    """How many replicas each of these pages has; nobody need know where one host lends."""
    if core.domains < 2:
        return b""
    got = replica_counts.got(core, run, core.tree(run.namespace).parts)
    return got[pages.start : pages.stop]


def _thin(core: Core, run: Run, left: int) -> None:
    """What eviction takes is not made again before the run is used: its policy has decided."""
    if left >= replica_counts.asked(core, run):
        heat.let_go(core, run)
    elif not run.thinned:
        run.thinned = True
        core.counters["runs_thinned"] += 1


def evict_copy(core: Core, segment: Segment, run: Run, page: int) -> bool:
    """Let go of this page's copies in the segment alone, if it lies elsewhere too and is idle."""
    may_leave = _may_leave(core, run, segment)[page]
    if not may_leave or not _is_idle(core, core.tree(run.namespace), run):
        return False
    _evict_copies(core, segment, run, range(page, page + 1))
    return True


def evict_pages(core: Core, run: Run, first: int) -> int:
    """Let go of every page of a leaf run from `first` on; the bytes that will be free.

    Pages up to the last one that is pinned hard stay.
    """
    first = max(first, core.pins.kept(run))
    if first == len(run):
        return 0
    core.counters["pages_evicted"] += len(run) - first
    for copy in run.copies[:1]:  # the fastest: what leaves memory so was never copied down
        core.counters[f"pages_evicted_{copy.segment.tier}"] += len(run) - first
    core.eviction.evicted(run, run.keys[first * KEY_BYTES :], core.now)
    return retire_pages(core, core.tree(run.namespace), run, first, len(run) - first)
