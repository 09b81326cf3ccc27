"""The remove operation: invisible at once, REMOVED at the holders, then answered, later freed.

See the step table "remove" in ARCHITECTURE.md. Where a holder cannot write the record now, or a
put of the page is open, a tombstone is durable before the answer (I29).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, OutOfSpace
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.replica import ExtentEvent, ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.reads import Remove, Removed
from master import pinning
from master.orders import OrderKind
from master.packed import NOT_THERE, WORD, index_of, split_keys, words
from master.puts import fail_pages, prune
from master.seconds import check_seconds
from master.segments import SegmentState
from master.sessions import Caller
from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.directory import Stretch, Tree
    from master.namespaces import KnownNamespace
    from master.orders import Order
    from master.run import Copy, Run
    from master.segments import Segment

PAGES_PER_STEP: Final = 256
_UNLISTED: Final = (ExtentState.QUARANTINED, ExtentState.RETIRED)
"""Extents that the tree does not list and whose record may be SEALED until its worker is told:
puts that failed after their seal, and pages that were evicted or expired."""
GRAIN_S: Final = 0.05


class Removal(msgspec.Struct, eq=False):
    """One Remove that is not answered yet."""

    caller: Caller
    namespace: int
    keys: bytes
    removed: bytearray
    open_steps: int = 1
    """Records to be written, tombstones to be stored, earlier removals to end; the job itself."""
    followers: list[Removal] = []
    """Repeated calls that wait for this one."""
    bucket: int = NOWHERE


class Retiring(msgspec.Struct, eq=False):
    """An extent whose record is to be written REMOVED."""

    key: bytes
    generation: int
    size_class: int
    free_at_s: float
    removal: Removal | None
    """Who waits for it; None once a tombstone stands in for the record."""


class Removals:
    """All removals that are not answered yet."""

    __slots__ = ("_by_page", "_storing", "deadlines", "retiring")

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self._by_page: dict[tuple[int, bytes], Removal] = {}
        self.retiring: dict[Segment, dict[int, Retiring]] = {}
        """Extents whose records are being written, by offset."""
        self.deadlines: Wheel[Removal] = Wheel(GRAIN_S, wakeup)
        self._storing: list[Removal] = []

    def __len__(self) -> int:
        return len(self.deadlines)

    def pending(self, namespace: int, key: bytes) -> Removal | None:
        """The removal of this page that is not answered yet."""
        return self._by_page.get((namespace, key))

    def note(self, removal: Removal, key: bytes) -> None:
        """`removal` takes this page out."""
        self._by_page[removal.namespace, key] = removal

    def forget(self, removal: Removal) -> None:
        """It is answered."""
        self.deadlines.discard(removal)
        for at in range(0, len(removal.keys), KEY_BYTES):
            page = removal.namespace, removal.keys[at : at + KEY_BYTES]
            if self._by_page.get(page) is removal:
                del self._by_page[page]

    def store(self, removal: Removal) -> None:
        """`removal` waits for the tombstones of this event to be durable."""
        removal.open_steps += 1
        self._storing.append(removal)

    @property
    def is_storing(self) -> bool:
        """Whether some removal waits for what is stored now."""
        return bool(self._storing)

    def take_storing(self) -> list[Removal]:
        """The removals that wait for what is stored now."""
        storing, self._storing = self._storing, []
        return storing


def remove(core: Core, caller: Caller, message: Remove) -> None:
    """Take pages out for good; answer Removed when no holder will ever offer them again."""
    known = core.namespaces.get(message.namespace)
    caller.session.must_own(known.namespace.content)
    check_seconds("timeout_s", message.timeout_s)
    pages = len(message.keys) // KEY_BYTES
    if len(message.keys) % KEY_BYTES or pages > limits.BATCH_PAGES_MAX:
        raise BadValue("keys", len(message.keys), f"at most {limits.BATCH_PAGES_MAX} whole keys")
    if index_of(message.keys, ROOT_PARENT) != NOT_THERE:
        raise BadValue("keys", ROOT_PARENT, "keys of pages, not the root's")
    rows_a_page = known.tree.parts + len(_unknown_holders(core))
    if not core.tombstones.has_room(pages, pages * rows_a_page):
        raise OutOfSpace(f"{len(core.tombstones)} tombstones wait for absent workers")
    removal = Removal(caller, known.ordinal, message.keys, bytearray(pages), followers=[])
    timeout_s = min(message.timeout_s, limits.CALL_TIMEOUT_MAX_S)
    core.removals.deadlines.place(removal, core.now + timeout_s)
    removal.open_steps += 1
    pinning.override(core, known, message.keys, lambda: step_done(core, removal))
    core.start(_take_out(core, known, removal))


def _take_out(core: Core, known: KnownNamespace, removal: Removal) -> Iterator[None]:
    """A job: make the pages invisible, tell the holders."""
    for first in range(0, len(removal.removed), PAGES_PER_STEP):
        if first:
            yield
        at = slice(first * KEY_BYTES, (first + PAGES_PER_STEP) * KEY_BYTES)
        _join_earlier(core, removal, first, removal.keys[at])
        _cover_unknown(core, removal, removal.keys[at])
        for stretch in known.tree.stretches(removal.keys[at]):
            if stretch.run.keys:
                _take_out_stretch(core, known.tree, removal, first, stretch)
    step_done(core, removal)


def _unknown_holders(core: Core) -> list[str]:
    """Segments that may hold pages which the tree does not list: their inventory is still to come.

    Lost ones, whose copies were cleaned away; those of earlier masters; and those under way.
    """
    known = (s.id for s in core.segments.values() if s.state is not SegmentState.LIVE)
    return [*known, *core.lenders.absent]


def _cover_unknown(core: Core, removal: Removal, keys: bytes) -> None:
    """Store tombstones where the tree cannot tell what is sealed (I29)."""
    holders = _unknown_holders(core)
    pages = split_keys(keys)
    added = len(holders) * len(pages)
    if added:
        # Whatever lies there was handed out before; a later put gets a higher generation.
        generation = core.new_generation()
        for holder in holders:
            for key in pages:
                core.tombstones.add(holder, key, generation)
    for segment in core.segments.values():
        for state in _UNLISTED:
            if segment.allocator.bytes_in[state]:
                added += _cover_unlisted(core, segment, state, set(pages))
    if added:
        core.removals.store(removal)


def _cover_unlisted(core: Core, segment: Segment, state: ExtentState, pages: set[bytes]) -> int:
    """Tombstones for extents of these pages in that state; how many."""
    added = 0
    for chunk in segment.allocator.chunk_list:
        for slot in chunk.slots_in(state):
            if chunk.key(slot) in pages:
                core.tombstones.add(segment.id, chunk.key(slot), chunk.generations[slot])
                added += 1
    return added


def _join_earlier(core: Core, removal: Removal, first: int, keys: bytes) -> None:
    """A repeated call waits for the first one, and gives the same answer."""
    for i in range(len(keys) // KEY_BYTES):
        earlier = core.removals.pending(
            removal.namespace, keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        )
        if earlier is not None and earlier is not removal:
            removal.removed[first + i] = 1
            if removal not in earlier.followers:
                earlier.followers.append(removal)
                removal.open_steps += 1


def _take_out_stretch(
    core: Core, tree: Tree, removal: Removal, first: int, stretch: Stretch
) -> None:
    run, page = stretch.run, stretch.page
    # Pages before this one may have been what kept holes at its end in the tree.
    count = min(stretch.count, len(run) - page)
    keys = [run.key(page + i) for i in range(count)]
    at = first + stretch.first
    for copy in run.copies:
        for i, there in enumerate(copy.present(page, page + count)):
            removal.removed[at + i] |= there
        _retire(core, removal, run, copy, page, count)
    for plan in run.plans:
        for i, key in enumerate(keys):
            if plan.is_open(key):
                removal.removed[at + i] = 1
                core.tombstones.add(plan.segment.id, key, plan.generation)
                core.removals.store(removal)
                fail_pages(core, plan, plan.page_of(key), 1)
    for i, key in enumerate(keys):
        if removal.removed[at + i]:
            core.removals.note(removal, key)
    if run.keys:
        prune(core, tree, run)


def _retire(core: Core, removal: Removal, run: Run, copy: Copy, page: int, count: int) -> None:
    """Take a copy out of the directory, and have its records written or tombstones stored."""
    segment = copy.segment
    if segment is core.stripes.place:
        run.clear(copy, page, count)
        return
    a, b = page * WORD, (page + count) * WORD
    offsets, generations = words(copy.offsets[a:b]), words(copy.generations[a:b])
    orders: dict[int, Order] = {}
    for i, generation in enumerate(generations):
        if not generation:
            continue
        key, offset = run.key(page + i), offsets[i]
        span = segment.allocator.locate(offset)
        assert span is not None, (segment.id, offset)
        size_class = span.chunk.size_class
        segment.allocator.apply(span, ExtentEvent.RETIRED)
        if segment.takes_orders:
            core.saving.hurry(segment.id, span.chunk.start)
            retiring = Retiring(key, generation, size_class, run.free_from_s, removal)
            core.removals.retiring.setdefault(segment, {})[offset] = retiring
            removal.open_steps += 1
            order = orders.get(size_class)
            if order is None:
                order = orders[size_class] = core.orders.new(OrderKind.RETIRE, segment, size_class)
            order.offsets.append(offset)
            order.generations.append(generation)
        else:
            core.tombstones.add(segment.id, key, generation)
            core.removals.store(removal)
    segment.keep_until(run.free_from_s)
    for order in orders.values():
        core.orders.give(order)
    run.clear(copy, page, count)


def step_done(core: Core, removal: Removal) -> None:
    """One of the things that a removal waits for has happened; the last one answers it."""
    removal.open_steps -= 1
    assert removal.open_steps >= 0, removal.keys
    if not removal.open_steps:
        core.removals.forget(removal)
        core.counters["pages_removed"] += removal.removed.count(1)
        core.reply(removal.caller, Removed(bytes(removal.removed)))
        for follower in removal.followers:
            step_done(core, follower)


def record_written(core: Core, order: Order, outcomes: bytes) -> None:
    """What a worker answered to RetireExtents: written, or it cannot be written now."""
    segment = order.segment
    held = core.removals.retiring.get(segment, {})
    frees: dict[float, Order] = {}
    for offset, outcome in zip(order.offsets, outcomes, strict=True):
        retiring = held.pop(offset, None)
        assert retiring is not None, (segment.id, offset)
        if outcome != Outcome.OK:
            _store_tombstone(core, segment, retiring)
        free = frees.get(retiring.free_at_s)
        if free is None:
            free = core.orders.new(OrderKind.FREE, segment, order.size_class)
            frees[retiring.free_at_s] = free
        free.offsets.append(offset)
        free.generations.append(retiring.generation)
        if retiring.removal is not None:
            step_done(core, retiring.removal)
    for free_at_s, free in frees.items():
        core.orders.give_at(free, max(core.now, free_at_s))


def holder_away(core: Core, segment: Segment) -> None:
    """The segment's worker cannot be told any more: tombstones stand in for its records (I29)."""
    for retiring in core.removals.retiring.pop(segment, {}).values():
        _store_tombstone(core, segment, retiring)
        if retiring.removal is not None:
            step_done(core, retiring.removal)


def _store_tombstone(core: Core, segment: Segment, retiring: Retiring) -> None:
    core.tombstones.add(segment.id, retiring.key, retiring.generation)
    if retiring.removal is not None:
        core.removals.store(retiring.removal)


def answer_overdue_removals(core: Core) -> None:
    """Holders that are slow are not waited for any longer: tombstones stand in."""
    for removal in core.removals.deadlines.take_due(core.now, 1):
        for segment, held in core.removals.retiring.items():
            for retiring in held.values():
                if retiring.removal is removal:
                    _store_tombstone(core, segment, retiring)
                    retiring.removal = None
                    step_done(core, removal)


def store_tombstones(core: Core) -> None:
    """Make this event's tombstones durable; the removals that wait for them go on then."""
    if not core.tombstones.is_dirty and not core.removals.is_storing:
        return
    values, deletes = core.tombstones.take_dirty()
    waiting = core.removals.take_storing()

    def stored() -> None:
        for removal in waiting:
            step_done(core, removal)

    if values or deletes:
        core.persist(values, deletes, then=stored)
    else:
        stored()
