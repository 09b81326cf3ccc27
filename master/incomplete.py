"""Pages that stay without some of their parts: what is there of them is given back in time.

A page is a hit only with all its parts (I15); the sealed ones of a writer group that fell apart
would take room for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from master.retiring import retire_pages
from master.segments import SegmentState

if TYPE_CHECKING:
    from master.core import Core
    from master.directory import Stretch, Tree

DUE_PER_TICK_MAX: Final = 16


def drop_incomplete(core: Core) -> None:
    """Drop the parts of pages that were still incomplete one put timeout after their progress."""
    for watched in core.incomplete.take_due(core.now, DUE_PER_TICK_MAX):
        tree = core.tree(watched.namespace)
        again_s = [
            _look(core, tree, stretch, watched.timeout_s)
            for stretch in tree.stretches(watched.keys)
            if stretch.run.keys
        ]
        due_s = [at_s for at_s in again_s if at_s is not None]
        if due_s:
            core.incomplete.place(watched, min(due_s))


def _look(core: Core, tree: Tree, stretch: Stretch, timeout_s: float) -> float | None:
    """Drop what is overdue; when to look again, None when nothing is left to look at."""
    run = stretch.run
    stop = min(stretch.page + stretch.count, len(run))
    mask = run.readable(tree.parts, core.version)
    pages = [page for page in range(stretch.page, stop) if not mask[page]]
    held = [page for page in pages if any(copy.generation(page) for copy in run.copies)]
    if not held:
        return None
    if any(copy.segment.state is SegmentState.JOINING for copy in run.copies):
        return core.now + timeout_s  # a holder is away, but not lost
    due_s = run.progress_s + timeout_s
    if due_s > core.now or run.plans:
        return max(due_s, core.now + timeout_s / 4)
    core.counters["pages_incomplete"] += len(held)
    for page in reversed(held):
        retire_pages(core, tree, run, page, 1)
    return None
