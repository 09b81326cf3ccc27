"""Repair: copies for pages that have fewer replicas than they want; those that are too many go.

Pages that may lack some are noted by whoever took or made one; a look takes those that are due, the
scarcest first, and starts copies as far as lanes are free. What finds no room or worker waits, what
finds no host is found again when one comes. Nobody who reads or puts waits for any of this.
Must not know how a copy is carried out (moves) or what places are good (placing). See the step
table "repair" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.replica import ExtentState, Tier
from master import heat, moves, placing, replica_counts, tiering, trimming, write_budget
from master.awaited import Awaited
from master.census import Census
from master.lately import Lately
from master.moves import MoveKind
from master.plans import PlanPage
from master.repair_queue import Need, RepairQueue

if TYPE_CHECKING:
    from master.core import Core
    from master.directory import Tree
    from master.plans import Plan
    from master.run import Copy, Run
    from master.segments import Segment
    from master.wheel import Wakeup

RANKED_PER_LOOK: Final = 32
SERVED_PER_LOOK: Final = 8
BLOCKED_MAX: Final = 4
"""Needs in a row that find no lane free: then others are not tried either."""
RETRY_S: Final = 0.05
COPYING_S: Final = 0.25
"""Copies that were started are looked at again after it, and when they have ended."""
FAILED_S: Final = 1.0
BACK_OFF_S: Final = 0.25
BACK_OFF_MAX_S: Final = 30.0
TRIES_MAX: Final = 6
"""Searches for room, the last one when the leases of the first have ended: then it counts as
thinned out."""
DOUBLINGS_MAX: Final = 8
"""Of BACK_OFF_S, which are more than BACK_OFF_MAX_S."""
COMING_S: Final = 2.0
"""What is about to be freed is there by then, unless it is leased."""
FULL_S: Final = 1.0
"""Pages that are used again are not noted so long after there was no room for such."""
SCANS_MAX: Final = 64

RATE: Final = "rate"
ROOM: Final = "room"
WORKER: Final = "worker"
COPYING: Final = "copying"
SURPLUS: Final = "surplus"
"""Why needs wait."""


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
        self.patient_until_s = until_s
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
        if not self.domains <= before:
            self.want_scan(core.now)

    def next_s(self) -> float:
        """When the next look is wanted."""
        return min(self.look_at_s, self.queue.next_s(), self.awaited.by_deadline.next_s())


def look(core: Core) -> None:
    """Start what copies can be started now, the scarcest pages first."""
    state = core.replication
    if core.now < state.next_s():
        return
    state.look_at_s = inf
    state.wanted_bytes.clear()
    state.census.look(core)
    state.awaited.look(core)
    queue = state.queue
    for need in queue.take_due(core.now, RANKED_PER_LOOK):
        _rank(core, need)
    blocked = 0
    for _ in range(SERVED_PER_LOOK):
        first = queue.take_ready()
        if first is None:
            return
        _serve(core, first)
        blocked = blocked + 1 if first.reason == RATE else 0
        if blocked == BLOCKED_MAX:
            break
    if queue.has_ready:
        state.look(core.now + RETRY_S if blocked == BLOCKED_MAX else core.now)


def _runs(core: Core, need: Need) -> list[Run]:
    stretches = core.tree(need.namespace).stretches(need.keys)
    return list(dict.fromkeys(stretch.run for stretch in stretches))


def _rank(core: Core, need: Need) -> None:
    """Find out how scarce it is; pages that cannot be read cannot be copied."""
    parts = core.tree(need.namespace).parts
    rank, hottest = inf, -inf
    for run in _runs(core, need):
        counts = replica_counts.got(core, run, parts).replace(b"\0", b"")
        if counts:
            rank = min(rank, *counts)
            hottest = max(hottest, core.eviction.score(run, core.now))
    if rank == inf:
        core.replication.queue.done(need)
    else:
        core.replication.queue.make_ready(need, int(rank), hottest)


class Work(msgspec.Struct, eq=False):
    """What is done about one need, and when it is to be looked at again; infinity: never."""

    need: Need
    at_s: float = inf
    reason: str = ""
    is_counted: bool = False
    """As one more try in vain, however many of its parts and runs found nothing."""

    def again(self, at_s: float, reason: str) -> None:
        """Look at it again by then."""
        if at_s < self.at_s:
            self.at_s, self.reason = at_s, reason


def _serve(core: Core, need: Need) -> None:
    work = Work(need)
    tree = core.tree(need.namespace)
    for run in _runs(core, need):
        _serve_run(core, tree, run, work)
    if work.at_s == inf:
        core.replication.queue.done(need)
    else:
        core.counters[f"repairs_wait_{work.reason}"] += 1
        core.replication.queue.wait(need, work.at_s, work.reason)


def _serve_run(core: Core, tree: Tree, run: Run, work: Work) -> None:
    wanted = replica_counts.wanted(core, run)
    for part in range(tree.parts):
        if not run.keys:
            return  # it has made room itself
        held = replica_counts.held(core, run, part)
        scarce = replica_counts.scarce(core, run, tree.parts, held, wanted)
        if 1 in scarce and not run.thinned:
            _make(core, run, part, bytearray(scarce), held.counts, work)
    if any(plan.put.owner is core.moves.owner for plan in run.plans):
        work.again(core.now + COPYING_S, COPYING)
    elif run.keys and trimming.has_surplus(core, run, tree.parts, wanted):
        _trim(core, run, tree.parts, wanted, work)


def _trim(core: Core, run: Run, parts: int, wanted: int, work: Work) -> None:
    """What is too much goes, once it has been so for a while: a worker may be about to go again."""
    need = work.need
    need.surplus_at_s = min(need.surplus_at_s, core.now)
    stable_s = need.surplus_at_s + core.tunables.repair_after_s
    if core.now < stable_s or run.plans:
        work.again(max(stable_s, core.now + COPYING_S), SURPLUS)
    else:
        trimming.trim(core, run, parts, wanted)


def _make(core: Core, run: Run, part: int, scarce: bytearray, held: bytes, work: Work) -> None:
    """Start copies of one part of these pages, until something is in the way."""
    asked = replica_counts.asked(core, run)
    while (first := scarce.find(1)) >= 0:
        source = _source(core, run, part, first)
        pages = _stretch(scarce, held, source, first)
        presses = work.need.presses and held[first] < asked
        done = _copy(core, run, source, pages, work, presses=presses)
        if not done:
            return
        scarce[first : first + done] = bytes(done)


def _source(core: Core, run: Run, part: int, page: int) -> Copy:
    """The copy to read this page from: of a worker that is there, of the fastest tier, where least
    is asked for.
    """

    def cost(copy: Copy) -> tuple[bool, int, int]:
        worker = core.workers.get(copy.segment.worker)
        if worker is None:  # it is decoded from others
            return True, copy.segment.rank, 0
        return worker.session is None, copy.segment.rank, worker.copies.size_bytes

    readable = (c for c in run.copies_of(part) if c.segment.readable and c.generation(page))
    return min(readable, key=cost)


def _stretch(scarce: bytearray, held: bytes, source: Copy, first: int) -> range:
    """Pages from `first` on that stand alike, and that this copy has, as many as go at once."""
    stop = min(len(scarce), first + moves.pages_at_once(source.part_bytes))
    here = source.present(first, stop)
    page = first + 1
    while page < stop and scarce[page] and here[page - first] and held[page] == held[first]:
        page += 1
    return range(first, page)


def _copy(core: Core, run: Run, source: Copy, pages: range, work: Work, *, presses: bool) -> int:
    """Start one copy of the first of these pages; of how many."""
    tier = Tier.DRAM if source.segment.tier is Tier.HBM else source.segment.tier
    near = heat.near(core, run)
    targets = placing.apart(core, run, source.part, tier, near, pages=pages)
    if not targets:
        work.again(_later(core, work), WORKER)
        return 0
    room = {target: _room(core, run, source, target, presses=presses) for target in targets}
    roomy = [target for target in targets if room[target]]
    if not roomy:
        _no_room(core, run, source, pages, targets, work, presses=presses)
        return 0
    holders = {copy.segment for copy in run.copies} | {plan.segment for plan in run.plans}
    roomy.sort(key=lambda target: target not in holders)  # what is read together lies together
    free_at_s, target = min(
        ((moves.copy_free_at_s(core, source.segment, each), each) for each in roomy),
        key=lambda found: found[0],
    )
    if free_at_s > core.now:
        work.again(core.now + RETRY_S if free_at_s == inf else free_at_s, RATE)
        return 0
    pages = pages[: room[target]]
    planned = moves.start(core, MoveKind.COPY, run, source, pages, target)
    if target.tier is Tier.NVME:
        size_class = moves.class_for(core, run, source, target.tier)
        write_budget.spend(core, planned * size_class)
    if not planned:  # by the time it is looked at again something has changed there
        work.again(_later(core, work), ROOM)
        return 0
    core.replication.copied.add(planned * source.part_bytes, core.now)
    work.need.tries = 0
    return planned


def _room(core: Core, run: Run, source: Copy, target: Segment, *, presses: bool) -> int:
    """How many pages find room there: to the last of a segment only where room may be made."""
    size_class = moves.class_for(core, run, source, target.tier)
    if presses:
        return len(run) if placing.is_open(core, target, size_class) else 0
    return tiering.pages_with_room(core, target, size_class)


def _later(core: Core, work: Work) -> float:
    """Ever later, the more often it was tried in vain."""
    need = work.need
    if not work.is_counted:
        need.tries += 1
        work.is_counted = True
    return core.now + min(BACK_OFF_MAX_S, BACK_OFF_S * 2.0 ** min(need.tries, DOUBLINGS_MAX))


def _no_room(
    core: Core,
    run: Run,
    source: Copy,
    pages: range,
    targets: list[Segment],
    work: Work,
    *,
    presses: bool,
) -> None:
    """Make some, for pages that were put or lost; others go without until they are used again."""
    if presses and (work.is_counted or work.need.tries < TRIES_MAX):
        tier = targets[0].tier
        size_class = moves.class_for(core, run, source, tier)
        like = [target for target in targets if target.tier is tier]
        is_coming = _press(core, like, size_class, len(pages) * size_class)
        at_s = _later(core, work)
        work.again(min(at_s, core.now + COMING_S) if is_coming else at_s, ROOM)
        return
    run.thinned = True
    core.counters["replicas_without_room"] += 1
    core.replication.full_until_s = core.now + FULL_S
    if core.replication.awaited:
        core.replication.awaited.wake(run.namespace, run.keys)
        core.replication.look(core.now)


def _press(core: Core, like: list[Segment], size_class: int, size_bytes: int) -> bool:
    """Make so much room, as far as what is about to be freed will not do for all of this look;
    whether some is coming.
    """
    wanted = core.replication.wanted_bytes
    place, coming = (like[0].tier, size_class), _retired_bytes(like)
    wanted[place] += size_bytes
    lacking = min(size_bytes, wanted[place] - coming)
    if lacking > 0:
        tiering.make_room(core, like, Counter({size_class: lacking}))
    return bool(_retired_bytes(like))


def _retired_bytes(segments: list[Segment]) -> int:
    return sum(segment.allocator.bytes_in[ExtentState.RETIRED] for segment in segments)
