"""Repair: copies for pages that have fewer replicas than they want; those that are too many go.

Pages that may lack some are noted by whoever took or made one; a look takes those that are due, the
scarcest first, and starts copies as far as lanes are free. What finds no room or worker waits, what
finds no host is found again when one comes. Nobody who reads or puts waits for any of this.
Must not know which copy is made (repairing), or which one goes (trimming). See the step
table "repair" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from master import moves, replica_counts, trimming
from master.awaited import Awaited
from master.census import Census
from master.lately import Lately
from master.plans import PlanPage
from master.repair_queue import Need, RepairQueue
from master.repairing import COPYING, RATE, RETRY_S, SURPLUS, WORKER, Work, make_replicas
from master.segments import SegmentState

if TYPE_CHECKING:
    from kvstore.replica import Tier
    from master.core import Core
    from master.directory import Tree
    from master.plans import Plan
    from master.run import Run
    from master.wheel import Wakeup

PARTS_RANKED: Final = 32
PARTS_SERVED: Final = 8
"""Of needs, in one look: what they cost goes with their parts. One need at least."""
SEGMENTS_FOR_PART: Final = 64
"""So many more segments to choose from cost as much as one part more."""
BLOCKED_MAX: Final = 4
"""Needs in a row that find no lane free: then others are not tried either."""
COPYING_S: Final = 0.25
"""Copies that were started are looked at again after it, and when they have ended."""
FAILED_S: Final = 1.0
JOINING_S: Final = 0.25
SCANS_MAX: Final = 64


class Replication:
    """What may lack replicas, and when somebody wants to look."""

    __slots__ = (
        "_wakeup",
        "awaited",
        "census",
        "copied",
        "domains",
        "full_until_s",
        "is_needed",
        "look_at_s",
        "patient_until_s",
        "queue",
        "scans",
        "wanted_bytes",
    )

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with nothing noted; `wakeup` hears of looks."""
        self._wakeup = wakeup
        self.queue = RepairQueue(wakeup)
        self.awaited = Awaited(wakeup)
        self.census = Census()
        self.copied = Lately()
        self.domains: frozenset[str] = frozenset()
        """Those that lend, and may be given more."""
        self.is_needed = False
        """Whether pages may have more than one replica: else nothing is noted and nothing looked
        through.
        """
        self.scans: dict[int, bool] = {}
        """Seconds at which all pages are to be looked through; whether room may be made for what is
        found then."""
        self.full_until_s = 0.0
        self.patient_until_s = 0.0
        """What a scan finds lacking may be back by then."""
        self.wanted_bytes: Counter[tuple[Tier, int]] = Counter()
        """For which the present look found no room, by tier and size class."""
        self.look_at_s = inf

    def look(self, at_s: float) -> None:
        """A look is wanted at `at_s`, if not sooner."""
        self.look_at_s = min(self.look_at_s, at_s)
        self._wakeup.by(at_s)

    def note(
        self,
        core: Core,
        tree: Tree,
        keys: bytes,
        due_s: float,
        *,
        presses: bool = False,
        is_awaited: bool = False,
    ) -> None:
        """These pages may lack replicas, or have too many, from `due_s` on."""
        if self.is_needed:
            need = Need(tree.namespace, keys, due_s, presses, is_awaited)
            if self.queue.note(need) is None:
                core.counters["repairs_put_off"] += 1

    def note_closed(self, core: Core, tree: Tree, plan: Plan, runs: list[Run]) -> None:
        """A plan was closed: what it sealed may want more replicas, what it failed still does."""
        if any(replica_counts.wanted(core, run) > 1 for run in runs):
            failed = PlanPage.FAILED in plan.states
            presses = plan.put.owner is not core.moves.owner
            due_s = core.now + (FAILED_S if failed else 0.0)
            self.note(core, tree, plan.keys, due_s, presses=presses)
        if self.awaited:
            self.awaited.wake(plan.namespace, plan.keys)
            self.look(core.now)

    def note_used(self, core: Core, run: Run) -> None:
        """A run that was thinned out is used: it may have its replicas again, if there is room."""
        if core.now >= self.full_until_s:
            run.thinned = False
            self.note(core, core.tree(run.namespace), run.keys, core.now)

    def note_loss(self, until_s: float) -> None:
        """A segment is lost; until then it may come back."""
        self.patient_until_s = max(self.patient_until_s, until_s)
        self.want_scan(until_s, presses=True)

    def want_scan(self, at_s: float, *, presses: bool = False) -> None:
        """All pages are to be looked through at `at_s`."""
        if not self.is_needed:
            return
        second = int(at_s) + 1
        if len(self.scans) >= SCANS_MAX:  # I7: an earlier one is late already
            second = max(self.scans)
        self.scans[second] = presses or self.scans.get(second, False)
        self.look(float(second))

    def segments_changed(self, core: Core) -> None:
        """Segments have come or gone: pages that lacked a host may have found one."""
        before, self.domains = self.domains, replica_counts.lending(core)
        core.domains = len(self.domains)
        self.is_needed = len(replica_counts.readers(core)) > 1
        back_s = core.started_s + core.tunables.repair_after_s
        if core.lenders.absent and core.now < back_s:  # most workers of the last master come back
            self.note_loss(back_s)
        if not self.domains <= before:
            self.want_scan(core.now)
        if self.awaited and not before <= self.domains:
            self.awaited.wake_all()
            self.look(core.now)

    def next_s(self) -> float:
        """When the next look is wanted."""
        queue_s, awaited_s = self.queue.next_s(), self.awaited.by_deadline.next_s()
        return min(self.look_at_s, queue_s, awaited_s, self.census.next_s)


def look(core: Core) -> None:
    """Start what copies can be started now, the scarcest pages first."""
    state = core.replication
    if core.now < state.next_s():
        return
    state.look_at_s = inf
    state.wanted_bytes.clear()
    state.awaited.look(core)
    _rank_some(core)
    _serve_some(core)
    state.census.look(core)  # what found no place in the queue may find one now


def _serve_some(core: Core) -> None:
    state, queue = core.replication, core.replication.queue
    blocked, parts_left = 0, PARTS_SERVED
    while parts_left > 0:
        first = queue.take_ready(partial(moves.may_copy_from, core))
        if first is None:
            blocked = BLOCKED_MAX
            break
        parts = _serve(core, first)
        parts_left -= parts * (1 + len(core.segments) // SEGMENTS_FOR_PART)
        blocked = blocked + 1 if first.reason == RATE else 0
        if blocked == BLOCKED_MAX:
            break
    if queue.has_ready:
        state.look(core.now + RETRY_S if blocked == BLOCKED_MAX else core.now)


def _runs(core: Core, need: Need) -> list[Run]:
    stretches = core.tree(need.namespace).stretches(need.keys)
    return list(dict.fromkeys(stretch.run for stretch in stretches))


def _rank_some(core: Core) -> None:
    parts_left = PARTS_RANKED
    while parts_left > 0 and (due := core.replication.queue.take_due(core.now, 1)):
        parts_left -= _rank(core, due[0])


def _rank(core: Core, need: Need) -> int:
    """Find out how scarce it is; pages that cannot be read cannot be copied.

    But those wait whose worker is just being compared: it may have been away for a moment only.
    Returns how many parts they have.
    """
    parts = core.tree(need.namespace).parts
    rank, hottest, only_at = inf, -inf, ""
    for run in _runs(core, need):
        counts = replica_counts.got(core, run, parts).replace(b"\0", b"")
        if counts:
            if min(counts) == 1:
                only_at = next(c.segment.worker for c in run.copies if c.segment.readable)
            rank = min(rank, *counts)
            hottest = max(hottest, core.eviction.score(run, core.now))
    if rank == inf and any(_is_joining(run) for run in _runs(core, need)):
        core.replication.queue.wait(need, core.now + JOINING_S, WORKER)
    elif rank == inf:
        core.replication.queue.done(need)
    else:
        core.replication.queue.make_ready(need, int(rank), hottest, only_at)
    return parts


def _is_joining(run: Run) -> bool:
    return any(copy.segment.state is SegmentState.JOINING for copy in run.copies)


def _serve(core: Core, need: Need) -> int:
    """Do what can be done now; how many parts its pages have."""
    work = Work(need)
    tree = core.tree(need.namespace)
    for run in _runs(core, need):
        _serve_run(core, tree, run, work)
    if work.at_s == inf:
        core.replication.queue.done(need)
    else:
        core.counters[f"repairs_wait_{work.reason}"] += 1
        core.replication.queue.wait(need, work.at_s, work.reason)
    return tree.parts


def _serve_run(core: Core, tree: Tree, run: Run, work: Work) -> None:
    wanted = replica_counts.wanted(core, run)
    for part in range(tree.parts):
        if not run.keys:
            return  # it has made room itself
        held = replica_counts.held(core, run, part, run.copies_of(part))
        scarce = replica_counts.scarce(core, run, tree.parts, held, wanted)
        if 1 not in scarce or run.thinned:
            continue
        is_made = make_replicas(core, run, part, bytearray(scarce), held.counts, work)
        if not is_made and work.reason == RATE:
            break  # lanes that have no room for this part have none for the others
    if any(plan.put.owner is core.moves.owner for plan in run.plans):
        work.again(core.now + COPYING_S, COPYING)
    elif run.keys and trimming.has_surplus(core, run, tree.parts, wanted):
        _trim(core, run, tree.parts, wanted, work)


def _trim(core: Core, run: Run, parts: int, wanted: int, work: Work) -> None:
    """What is too much goes, once it has been so for a while: a worker may be about to go again,
    or gone and not lost yet.
    """
    need = work.need
    need.surplus_at_s = min(need.surplus_at_s, core.now)
    stable_s = need.surplus_at_s + core.tunables.repair_after_s
    if core.now < stable_s or run.plans or not replica_counts.are_heard(core, run):
        work.again(max(stable_s, core.now + COPYING_S), SURPLUS)
    else:
        trimming.trim(core, run, parts, wanted)
