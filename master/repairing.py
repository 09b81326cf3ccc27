"""What is copied for pages that lack replicas: from where, to where, and what stands in the way.

Must not know when pages are looked at, or which come first (replication), nor how a copy is carried
out (moves) or what places are good (placing).
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.replica import ExtentState, Tier
from master import heat, moves, placing, replica_counts, tiering
from master.moves import MoveKind
from master.repair_queue import Need

if TYPE_CHECKING:
    from master.core import Core
    from master.run import Copy, Run
    from master.segments import Segment

RETRY_S: Final = 0.05
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

RATE: Final = "rate"
ROOM: Final = "room"
WORKER: Final = "worker"
COPYING: Final = "copying"
SURPLUS: Final = "surplus"
"""Why needs wait."""


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


def make_replicas(
    core: Core, run: Run, part: int, scarce: bytearray, held: bytes, work: Work
) -> bool:
    """Start copies of one part of these pages; False where something was in the way."""
    asked = replica_counts.asked(core, run)
    while (first := scarce.find(1)) >= 0:
        source = _source(core, run, part, first)
        pages = _stretch(run, scarce, source, first)
        presses = work.need.presses and held[first] < asked
        mark = _mark(core, is_for_heat=held[first] >= asked)
        done = _copy(core, run, source, pages, work, inf if presses else mark)
        if not done:
            return False
        scarce[first : first + done] = bytes(done)
    return True


def _mark(core: Core, *, is_for_heat: bool) -> float:
    """How far segments may be filled by replicas that nobody makes room for.

    What is used again would otherwise take the room that eviction has just made, and be thinned
    out again.
    """
    return core.tunables.watermark_high if is_for_heat else core.tunables.watermark_low


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


def _stretch(run: Run, scarce: bytearray, source: Copy, first: int) -> range:
    """Pages from `first` on that lie alike, this copy's among them, as many as go at once."""
    gap = scarce.find(0, first, first + moves.pages_at_once(source.part_bytes))
    stop = gap if gap >= 0 else min(len(scarce), first + moves.pages_at_once(source.part_bytes))
    return replica_counts.alike(run, source.part, range(first, stop))


def _copy(core: Core, run: Run, source: Copy, pages: range, work: Work, mark: float) -> int:
    """Start one copy of the first of these pages; of how many. To segments that are filled up to
    `mark`; infinity: room may be made.
    """
    tier = Tier.DRAM if source.segment.tier is Tier.HBM else source.segment.tier
    near = heat.near(core, run)
    targets = placing.apart(core, run, source.part, tier, near, pages=pages)
    if not targets:
        work.again(_later(core, work), WORKER)
        return 0
    room = {target: _room(core, run, source, target, mark) for target in targets}
    roomy = [target for target in targets if room[target]]
    if not roomy:
        _no_room(core, run, source, pages, targets, work, presses=mark == inf)
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
    if not planned:  # by the time it is looked at again something has changed there
        work.again(_later(core, work), ROOM)
        return 0
    core.replication.copied.add(planned * source.part_bytes, core.now)
    work.need.tries = 0
    return planned


def _room(core: Core, run: Run, source: Copy, target: Segment, mark: float) -> int:
    """How many pages find room there: to the last of a segment only where room may be made."""
    size_class = moves.class_for(core, run, source, target.tier)
    if mark == inf:
        return len(run) if placing.is_open(core, target, size_class) else 0
    return tiering.pages_with_room(core, target, size_class, mark)


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
