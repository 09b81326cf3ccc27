"""When relocations are looked at, and when they are over.

Each look does one step of one relocation. A relocation looks at all that its wish names, again and
again until nothing is left to do. Must not know requests, or what becomes of a copy (relocating,
rebalancing). See the step tables "drain", "copy and move" and "rebalance" in ARCHITECTURE.md.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.wire.messages.relocation import RelocationKind, RelocationState
from master import rebalancing
from master.plans import PlanPage
from master.relocating import Visit, let_go, want_kept
from master.relocations import end, is_empty
from master.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.relocations import Relocation

AGAIN_S: Final = 0.05
REST_S: Final = 1.0
"""After a look at everything that began nothing, and of what waits for an event."""
REST_OF_STEP_S: Final = 0.01
"""Besides, for each step that it took: so what is stuck is no burden, however much it is."""
_RUNNING: Final = RelocationState.RUNNING


def look(core: Core) -> None:
    """One step of the relocation that has waited longest for it."""
    book = core.relocations
    if core.now < book.look_at_s:
        return
    book.look_at_s = inf
    if core.now >= book.balance_at_s:
        book.balance_at_s = inf
        rebalancing.begin(core)
    due = [each for each in book.open.values() if each.state is _RUNNING]
    due.sort(key=lambda each: each.next_s)
    if due and due[0].next_s <= core.now:
        _step(core, due[0])
    for each in due:
        if each.state is _RUNNING:
            book.look(max(core.now, each.next_s))
    book.look(book.balance_at_s)


def _step(core: Core, relocation: Relocation) -> None:
    _settle(core, relocation)
    if _is_without_workers(core, relocation):
        end(core, relocation, RelocationState.CANCELLED, "a worker that it names was forgotten")
        return
    if relocation.walk is None:
        relocation.walk = (
            rebalancing.walk(core, relocation)
            if relocation.kind == RelocationKind.REBALANCE
            else _walk(core, relocation)
        )
    relocation.next_s = min(next(relocation.walk, inf), core.now + REST_S)


def _is_without_workers(core: Core, relocation: Relocation) -> bool:
    """Whether one of its workers will never come back: neither here nor lent from before."""
    lenders = set(core.lenders.absent.values())
    named = {relocation.wish.source, relocation.wish.target} - {""}
    return any(name not in core.workers and name not in lenders for name in named)


def _settle(core: Core, relocation: Relocation) -> None:
    """Let what was copied go where it lay."""
    for each in [each for each in relocation.copying if not each.plan.open]:
        relocation.copying.remove(each)
        plan = each.plan
        sealed = plan.states.count(PlanPage.SEALED)
        if relocation.kind in {RelocationKind.COPY, RelocationKind.MOVE}:
            relocation.did(sealed, sealed * plan.size_class, core.now)
        core.counters["relocated_pages"] += sealed
        core.counters["relocated_bytes"] += sealed * plan.size_class
        if sealed < len(plan):
            core.counters["relocations_cut_short"] += 1
        tree = core.tree(plan.namespace)
        for stretch in tree.stretches(plan.keys):
            if relocation.kind == RelocationKind.COPY:
                want_kept(core, tree, stretch, plan.part)
                continue
            for copy in list(stretch.run.copies_of(plan.part)):
                if copy.segment is each.source:
                    let_go(core, relocation, stretch, copy, plan.segment)


def _walk(core: Core, relocation: Relocation) -> Iterator[float]:
    """Look at all that is named until nothing is left to do; when to go on, after each step."""
    is_first = True
    while True:
        visit = Visit(core, relocation, is_first=is_first)
        yield from visit.all()
        relocation.stuck, is_first = visit.stuck, False
        relocation.reason = visit.why_not(core)
        if not visit.is_unfinished and _is_done(core, relocation):
            relocation.reason = ""
            if relocation.kind != RelocationKind.DRAIN:
                end(core, relocation, RelocationState.DONE)
                return
            relocation.state, relocation.walk = RelocationState.DONE, None
            core.note(f"worker {relocation.wish.source} is drained: nothing lies there any more")
            return
        rest_s = REST_S + visit.steps * REST_OF_STEP_S
        again_s = core.now + (AGAIN_S if visit.begun else rest_s)
        while core.now < again_s:  # it is woken by what it has begun before, too
            yield again_s


def _is_done(core: Core, relocation: Relocation) -> bool:
    """Whether a look that found nothing to do has seen all that there is."""
    if relocation.copying:
        return False
    if relocation.kind == RelocationKind.DRAIN:
        worker = core.workers.get(relocation.wish.source)
        return worker is not None and all(map(is_empty, worker.segments.values()))
    if core.lenders.absent and core.now < core.started_s + core.tunables.worker_lost_after_s:
        return False  # workers of the last master come back
    return all(
        segment.state is SegmentState.LOST or segment.takes_orders
        for segment in core.segments.values()
    )
