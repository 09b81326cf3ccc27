"""What becomes of each copy that a relocation names: it stays, is copied, or may go.

Judged by what lies where at that moment, so that other masters, repairs, evictions and puts may
come between. A copy goes only where another stays readable (I36), and nothing is copied twice at
once: a run with open plans waits. Must not know when looks are due, or how copies are carried out.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.replica import ExtentState, Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.relocation import RelocationKind
from master import moves, placing, replica_counts
from master.directory import Stretch
from master.relocations import Amount, begin_copy
from master.retiring import retire_copy
from master.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.relocation import StartRelocation
    from master.core import Core
    from master.directory import Tree
    from master.relocations import Relocation
    from master.run import Copy, Run
    from master.segments import Segment

EXTENTS_PER_STEP: Final = 128
RUNS_PER_STEP: Final = 8
"""Judged, which costs up to 0.1 ms each."""
KEYS_PER_STEP: Final = 256
COPYING_MAX: Final = 32
"""Of one relocation; lanes of workers bound it sooner where pages are large."""
_SEALED: Final = int(ExtentState.SEALED)


def away(core: Core, wish: StartRelocation) -> str:
    """The worker that it is between and that is not there; empty if all are."""
    for name in (wish.source, wish.target):
        worker = core.workers.get(name)
        if name and (worker is None or worker.lost or worker.session is None):
            return name
    return ""


class Visit:
    """One look at everything that a relocation names."""

    def __init__(self, core: Core, relocation: Relocation, *, is_first: bool) -> None:
        """Nothing was looked at yet."""
        self._core = core
        self._relocation = relocation
        self._is_first = is_first
        self.begun = False
        """Whether anything was copied or let go."""
        self.is_unfinished = False
        """Whether something has to be looked at again."""
        self.stuck = Amount()
        self.steps = 0
        """That it took."""
        self._has_targets = False

    def why_not(self, core: Core) -> str:
        """Why it does not get on, for people."""
        if name := away(core, self._relocation.wish):
            return f"worker {name} is not there"
        if not self.stuck.pages:
            return ""
        if self._has_targets:
            return "no room"
        return (
            "no other host"
            if self._relocation.kind == RelocationKind.DRAIN
            else "the target takes nothing"
        )

    def all(self) -> Iterator[float]:
        """In steps; when to go on, after each."""
        for at_s in self._everything():
            self.steps += 1
            yield at_s

    def _everything(self) -> Iterator[float]:
        if self._relocation.wish.keys:
            yield from self._named_pages()
            return
        segments = [s for s in self._core.segments.values() if self._is_source(s)]
        for segment in sorted(segments, key=lambda each: each.rank):  # what is fastest is hottest
            yield from self._segment(segment)

    def _is_source(self, segment: Segment) -> bool:
        wish = self._relocation.wish
        return segment.worker == wish.source if wish.source else segment.worker != wish.target

    def _named_pages(self) -> Iterator[float]:
        wish = self._relocation.wish
        tree = self._core.namespaces.get(wish.namespace).tree
        for first in range(0, len(wish.keys), KEYS_PER_STEP * KEY_BYTES):
            keys = wish.keys[first : first + KEYS_PER_STEP * KEY_BYTES]
            at_s = self._core.now
            for stretch in tree.stretches(keys):
                for copy in stretch.run.copies:
                    if self._is_source(copy.segment):
                        at_s = max(at_s, self.judge(stretch, copy))
            yield at_s

    def _segment(self, segment: Segment) -> Iterator[float]:
        wish, looked = self._relocation.wish, 0
        ordinal = self._core.namespaces.get(wish.namespace).ordinal if wish.namespace else None
        seen: set[tuple[Run, int]] = set()
        for chunk in list(segment.allocator.chunk_list):
            for slot in chunk.slots_in(ExtentState.SEALED):
                looked += 1
                if looked % EXTENTS_PER_STEP == 0 or len(seen) >= RUNS_PER_STEP:
                    seen.clear()
                    yield self._core.now
                    if chunk.states[slot] != _SEALED:
                        continue
                namespace, key = chunk.namespaces[slot], chunk.key(slot)
                if ordinal not in {None, namespace} or not segment.takes_orders:
                    continue
                tree = self._core.tree(namespace)
                run = tree.get(key)
                assert run is not None, (chunk.start, slot)
                copy = run.copy_at(segment, run.page_of(key), chunk.offset(slot))
                if (run, copy.part) not in seen:
                    seen.add((run, copy.part))
                    at_s = self.judge(Stretch(0, len(run), run, 0), copy)
                    if at_s > self._core.now:
                        yield at_s
        if not segment.takes_orders and segment.state is not SegmentState.LOST:
            self.is_unfinished = True

    def judge(self, stretch: Stretch, copy: Copy) -> float:
        """Do what can be done about this copy of these pages; when to go on."""
        core, relocation, run = self._core, self._relocation, stretch.run
        if len(relocation.copying) >= COPYING_MAX:
            self.is_unfinished = True
            return inf
        if not _may_go_now(core, run, copy):
            self.is_unfinished = True  # a put, a move or a repair is under way, or a loss
            return core.now
        lacking = _lacking(core, relocation, stretch, copy)
        if self._is_first:
            _count_passed(relocation, stretch, copy, sum(map(len, lacking)))
        if let_go(core, relocation, stretch, copy, copy.segment):
            self.begun = self.is_unfinished = True
        for pages in lacking:
            target, at_s = self._target(run, copy, pages)
            if at_s > core.now:
                self.is_unfinished = True
                return at_s
            if target is None:
                self._give_up(run, copy, pages)
            elif begin_copy(core, relocation, run, copy, pages, target):
                self.begun = self.is_unfinished = True
                break  # the others when that has ended
        return core.now

    def _target(self, run: Run, copy: Copy, pages: range) -> tuple[Segment | None, float]:
        """Where these pages may be copied to, and when."""
        core, wish = self._core, self._relocation.wish
        tier = Tier(wish.tier) if wish.tier else copy.segment.tier
        leaves = "" if wish.kind == RelocationKind.COPY else copy.segment.worker
        found = placing.apart(core, run, copy.part, tier, pages=pages, leaves=leaves)
        found = [each for each in found if wish.target in {"", each.worker}]
        self._has_targets = self._has_targets or bool(found)
        fitting = [
            each
            for each in found
            if placing.is_open(core, each, moves.class_for(core, run, copy, each.tier))
        ]
        if not fitting:
            return None, core.now
        free_s = [moves.copy_free_at_s(core, copy.segment, each) for each in fitting]
        earliest = min(free_s)
        return fitting[free_s.index(earliest)], earliest

    def _give_up(self, run: Run, copy: Copy, pages: range) -> None:
        """There is no better place: what lies elsewhere goes all the same, the rest stays."""
        core, relocation = self._core, self._relocation
        size_class = size_class_of(copy.part_bytes)
        self.is_unfinished = True
        is_drain = relocation.kind == RelocationKind.DRAIN
        if is_drain and replica_counts.staying(core, run, copy.part)[pages.start]:
            _retire(core, relocation, run, copy, pages)
            self.begun = True
            return
        self.stuck.add(len(pages), len(pages) * size_class)
        if is_drain and self._has_targets:
            core.want_room(size_class, len(pages) * size_class)


def _lacking(core: Core, relocation: Relocation, stretch: Stretch, copy: Copy) -> list[range]:
    """Pages of a stretch that have to be copied before this copy of them may go, if ever; those of
    one range lie in the same places.
    """
    run, wish = stretch.run, relocation.wish
    pages = range(stretch.page, min(len(run), stretch.page + stretch.count))
    here = copy.present(0, len(run))
    if wish.kind == RelocationKind.DRAIN:
        counts, goal = _elsewhere(core, run, copy.part), _goal(core, run)
    else:
        counts, goal = _at_target(core, relocation, run, copy), 1
    found: list[range] = []
    for page in pages:
        if not here[page] or counts[page] >= goal:
            continue
        last = found[-1] if found else range(0)
        if last and last.stop == page:
            found[-1] = range(last.start, page + 1)
        else:
            found.append(range(page, page + 1))
    return [alike for each in found for alike in _alike(run, copy.part, each)]


def _alike(run: Run, part: int, pages: range) -> Iterator[range]:
    while pages:
        first = replica_counts.alike(run, part, pages)
        yield first
        pages = pages[len(first) :]


def _may_go_now(core: Core, run: Run, copy: Copy) -> bool:
    """Not while a put, a move or a repair is under way, or a worker may be dead that has another
    copy.
    """
    return not run.plans and copy.segment.takes_orders and replica_counts.are_heard(core, run)


def _elsewhere(core: Core, run: Run, part: int, leaves: str = "") -> bytes:
    """One byte a page: how many replicas it has elsewhere that are to stay, at least one of them
    real: a stripe stands in for the others only.
    """
    there = replica_counts.staying(core, run, part, leaves)
    more = replica_counts.stood_for(core, run, part)
    if not more:
        return there
    return bytes(count and count + each for count, each in zip(there, more, strict=True))


def _goal(core: Core, run: Run) -> int:
    """How many replicas have to lie elsewhere before one may go, if there is where to."""
    return 1 if run.thinned else replica_counts.wanted(core, run)


def _at_target(core: Core, relocation: Relocation, run: Run, copy: Copy) -> bytes:
    """One byte a page: 1 where its part lies where this is to go; on that host, if hosts count."""
    target = core.workers.get(relocation.wish.target)
    if target is None or not target.segments:
        return bytes(len(run))
    place = replica_counts.domain(core, next(iter(target.segments.values())))
    goes = relocation.kind != RelocationKind.COPY  # else its host has it, and gets no other
    return run.held_by(
        each
        for each in run.copies_of(copy.part)
        if each.segment.readable
        and not each.segment.drained
        and replica_counts.domain(core, each.segment) == place
        and not (goes and each.segment.worker == copy.segment.worker)
    )


def want_kept(core: Core, tree: Tree, stretch: Stretch, part: int) -> None:
    """What an operator had copied is asked for from now on: else it would be one too many.

    Of these pages alone: their run is cut where others begin.
    """
    run, count = stretch.run, stretch.count
    held = replica_counts.staying(core, run, part)
    most = max(held[stretch.page : stretch.page + count], default=0)
    if most <= replica_counts.asked(core, run):
        return
    if stretch.page:
        _, run = tree.split(run, stretch.page)
    if count < len(run):
        run, _ = tree.split(run, count)
    run.replicas = min(most, limits.REPLICAS_MAX)
    core.replication.note(core, tree, run.keys, core.now)


def let_go(
    core: Core, relocation: Relocation, stretch: Stretch, copy: Copy, arrived: Segment
) -> bool:
    """Let those pages of a copy go that may; whether there were some.

    `arrived`: where they were copied to just now; the copy's own segment where they were not.
    """
    run = stretch.run
    if not _may_go_now(core, run, copy):
        return False
    going = _going(core, relocation, run, copy, arrived)
    pages = [p for p in range(stretch.page, stretch.page + stretch.count) if going[p]]
    for first, stop in _stretches(pages):
        _retire(core, relocation, run, copy, range(first, stop))
    return bool(pages)


def _going(
    core: Core, relocation: Relocation, run: Run, copy: Copy, arrived: Segment
) -> list[bool]:
    """For each page whether the copy of it may go: it has one, and another stays readable."""
    here, kind = copy.present(0, len(run)), relocation.kind
    leaves = copy.segment.worker
    others = _elsewhere(core, run, copy.part, leaves)
    match kind:
        case RelocationKind.DRAIN:
            there, least = others, _goal(core, run)
        case RelocationKind.MOVE:
            there = _at_target(core, relocation, run, copy)
            least = 1 if relocation.wish.source else replica_counts.wanted(core, run)
        case RelocationKind.REBALANCE:
            there = run.held_by(c for c in run.copies_of(copy.part) if c.segment is arrived)
            least = 1
        case _:
            there, least = bytes(len(run)), 1
    return [bool(here[page] and there[page] and others[page] >= least) for page in range(len(run))]


def _retire(core: Core, relocation: Relocation, run: Run, copy: Copy, pages: range) -> None:
    """Let a copy of these pages go: another stays readable (I36)."""
    if relocation.kind in {RelocationKind.DRAIN, RelocationKind.REBALANCE}:
        relocation.did(len(pages), len(pages) * size_class_of(copy.part_bytes), core.now)
    core.counters[f"copies_gone_by_{relocation.kind}"] += len(pages)
    retire_copy(core, run, copy, pages.start, len(pages))
    left = replica_counts.staying(core, run, copy.part)[pages.start : pages.stop]
    if min(left) < replica_counts.wanted(core, run):  # no better place, or that was wished
        core.replication.note(core, core.tree(run.namespace), run.keys, core.now)


def _stretches(pages: list[int]) -> Iterator[tuple[int, int]]:
    """(first, stop) of each row of neighbours."""
    first = 0
    for at in range(1, len(pages) + 1):
        if at == len(pages) or pages[at] != pages[at - 1] + 1:
            yield pages[first], pages[at - 1] + 1
            first = at


def _count_passed(relocation: Relocation, stretch: Stretch, copy: Copy, lacking: int) -> None:
    """What was right when it was seen first has not to be done."""
    if relocation.kind in {RelocationKind.COPY, RelocationKind.MOVE}:
        stop = stretch.page + stretch.count
        held = copy.present(0, len(stretch.run)).count(1, stretch.page, stop)
        passed = held - lacking
        relocation.passed.add(passed, passed * size_class_of(copy.part_bytes))
