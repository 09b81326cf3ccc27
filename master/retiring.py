"""Taking pages out of the directory: the copies go at once, their extents when no lease runs.

For everything that drops pages of its own accord: expiry, eviction, incomplete puts, bad copies.
A remove that a peer asked for tells the holders first (master.removal).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvstore.replica import ExtentEvent
from master.orders import OrderKind
from master.packed import WORD, words
from master.puts import prune

if TYPE_CHECKING:
    from master.core import Core
    from master.directory import Tree
    from master.orders import Order
    from master.run import Copy, Run


def retire_pages(core: Core, tree: Tree, run: Run, first: int, count: int) -> int:
    """Drop every copy of these pages, and the pages where nothing hangs below; the bytes freed."""
    freed = sum(retire_copy(core, run, copy, first, count) for copy in run.copies)
    prune(core, tree, run)
    return freed


def retire_copy(core: Core, run: Run, copy: Copy, first: int, count: int) -> int:
    """Drop one copy of these pages, as far as it has them; the bytes that will be free.

    The extents are freed when the last lease has ended (I9); while their worker is away nothing
    is ordered, and its next inventory settles them.
    """
    if copy.segment is core.stripes.place:
        run.clear(copy, first, count)
        return 0
    a, b = first * WORD, (first + count) * WORD
    offsets, generations = words(copy.offsets[a:b]), words(copy.generations[a:b])
    if copy.absent:
        held = [i for i, generation in enumerate(generations) if generation]
        offsets = array("Q", [offsets[i] for i in held])
        generations = array("Q", [generations[i] for i in held])
    segment = copy.segment
    orders: dict[int, Order] = {}
    freed = at = 0
    for span in segment.allocator.spans_at(offsets):
        segment.allocator.apply(span, ExtentEvent.RETIRED)
        size_class = span.chunk.size_class
        order = orders.get(size_class)
        if order is None:
            order = orders[size_class] = core.orders.new(OrderKind.FREE, segment, size_class)
        order.offsets.extend(offsets[at : at + span.count])
        order.generations.extend(generations[at : at + span.count])
        at += span.count
        freed += span.count * size_class
    run.clear(copy, first, count)
    segment.demoted_bytes = max(0, segment.demoted_bytes - freed)
    segment.keep_until(run.free_from_s)
    for order in orders.values():
        if run.free_from_s > core.now:
            core.orders.give_at(order, run.free_from_s)
        else:
            core.orders.give(order)
    return freed
