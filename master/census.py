"""Looking through all pages, in steps: how many replicas they have, and who lacks some.

One scan at a time. What it finds lacking, or too much, is noted for repair; what it counts answers
those who asked before it began. See the step table "repair" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from master import replica_counts
from master.repair_queue import NEEDS_MAX
from master.segments import SegmentState
from master.trimming import has_surplus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from master.core import Core
    from master.directory import Tree
    from master.replica_counts import Held
    from master.run import Run


RETRY_S: Final = 0.25
PARTS_PER_STEP: Final = 16
"""Of runs, each of which costs 10 us, or 100 us where it lacks replicas."""
COUNT_EVERY_S: Final = 600.0
"""For metrics: a scan takes a core 1 to 2 s a million pages in chains of 64 (benchmarks/scans.py),
16 s of single ones."""


class Count(msgspec.Struct, eq=False):
    """The pages of one namespace: all but the last count those that can be read."""

    pages: int = 0
    got: Counter[int] = msgspec.field(default_factory=Counter)
    """By replicas."""
    wanted: Counter[int] = msgspec.field(default_factory=Counter)
    lacking: int = 0
    without_host: int = 0
    thinned: int = 0
    unreadable: int = 0


class Census:
    """What the last scan found, and who waits for the next one."""

    __slots__ = ("_asked", "by_namespace", "counted_s", "is_running", "next_s", "number")

    def __init__(self) -> None:
        """Nothing was counted."""
        self.number = 0
        """Of the last scan that began."""
        self.is_running = False
        self.by_namespace: dict[int, Count] = {}
        """By ordinal."""
        self.counted_s = -inf
        """When that scan ended."""
        self.next_s = inf
        """When pages are counted anew though nobody asks."""
        self._asked: list[Callable[[], None]] = []

    def ask(self, core: Core, answer: Callable[[], None]) -> None:
        """Call `answer` at the end of the first scan that begins from now on."""
        self._asked.append(answer)
        core.replication.look(core.now)

    def look(self, core: Core) -> None:
        """Begin a scan that is due, once no inventory is under way."""
        state = core.replication
        due = [second for second in state.scans if second <= core.now]
        if due and any(s.state is SegmentState.JOINING for s in core.segments.values()):
            due = []
        is_drained = state.queue.is_cut and len(state.queue) <= NEEDS_MAX // 2
        is_time = core.now >= self.next_s
        if is_time:
            self.next_s = inf  # the scan that begins now, or is under way, sets it again
        if not self.is_running and (due or is_drained or is_time or self._asked):
            presses = True in [state.scans.pop(second) for second in due]
            state.queue.is_cut = False
            self.is_running = True
            self.number += 1
            asked, self._asked = self._asked, []
            core.start(self._scan(core, asked, presses=presses))
        if state.scans:
            state.look(max(float(min(state.scans)), core.now + RETRY_S))

    def _scan(
        self, core: Core, asked: list[Callable[[], None]], *, presses: bool
    ) -> Iterator[None]:
        """A job."""
        found: dict[int, Count] = {}
        for known in list(core.namespaces):
            count = Count()
            at_once = max(1, PARTS_PER_STEP // known.tree.parts)
            for runs in known.tree.in_steps(self.number, at_once):
                for run in runs:
                    _look_at(core, known.tree, run, count, presses=presses)
                yield
            found[known.ordinal] = count
        self.by_namespace, self.counted_s, self.is_running = found, core.now, False
        if core.replication.is_needed:
            self.next_s = core.now + COUNT_EVERY_S
        core.counters["replica_scans"] += 1
        core.replication.look(core.now)
        for answer in asked:
            answer()


def _look_at(core: Core, tree: Tree, run: Run, count: Count, *, presses: bool) -> None:
    """Count a run's pages; note it where they have too few or too many."""
    known = replica_counts.got(core, run, tree.parts)
    counts = known.replace(b"\0", b"")
    if len(counts) < len(known):
        count.unreadable += sum(_is_gone(run, page) for page in range(len(run)) if not known[page])
    wanted = replica_counts.wanted(core, run)
    count.pages += len(counts)
    count.wanted[wanted] += len(counts)
    count.got.update(counts)
    lacking = sum([each < wanted for each in counts])
    if lacking:
        count.lacking += lacking
        count.without_host += _some_part(core, tree, run, wanted, replica_counts.stuck).count(1)
        places = repairable(core, tree, run, wanted).count(1)
        if run.thinned:
            count.thinned += places
        elif places:
            due_s = max(core.now, core.replication.patient_until_s)
            core.replication.note(core, tree, run.keys, due_s, presses=presses)
    # Parity counts like a replica, but is none that could go.
    if any(each > wanted for each in counts) and has_surplus(core, run, tree.parts, wanted):
        core.replication.note(core, tree, run.keys, core.now)


def _is_gone(run: Run, page: int) -> bool:
    """Whether this page, which cannot be read, is not about to be."""
    key = run.key(page)
    return not any(plan.is_open(key) for plan in run.plans)


def repairable(core: Core, tree: Tree, run: Run, wanted: int) -> bytes:
    """One byte a page: 1 where some part lies in fewer domains than wanted, and has a place."""
    return _some_part(core, tree, run, wanted, replica_counts.scarce)


def _some_part(
    core: Core,
    tree: Tree,
    run: Run,
    wanted: int,
    judge: Callable[[Core, Run, int, Held, int], bytes],
) -> bytes:
    """One byte a page: 1 where that is so of some part."""
    merged = 0
    for part, copies in enumerate(replica_counts.by_part(run, tree.parts)):
        held = replica_counts.held(core, run, part, copies)
        merged |= int.from_bytes(judge(core, run, tree.parts, held, wanted), "little")
    return merged.to_bytes(len(run), "little")
