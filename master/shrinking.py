"""Segments of devices that give memory back: chunks are emptied, then their worker is told.

Of a chunk that goes nothing is planned any more, and its pages leave lookups: those that lie
nowhere below once they are copied down, or at once where there is no room for them. Their extents
are freed when the last lease has ended, as ever; a chunk without extents is withheld until the
segment's next life. Must not know how pages are copied.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.replica import ExtentState, Tier
from kvstore.wire.messages.membership import ReleaseChunks
from kvstore.wire.messages.operator import SegmentShrinks, ShrinkSegment
from master import moves, placing, tiering, victims
from master.events import Command
from master.moves import MoveKind
from master.puts import prune
from master.retiring import retire_copy
from master.run import Run
from master.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from master.chunks import Chunk
    from master.core import Core
    from master.run import Copy
    from master.segments import Segment
    from master.sessions import Caller
    from master.wheel import Wakeup

LOOK_S: Final = 0.05
SLOTS_PER_LOOK: Final = 256
TRIES_MAX: Final = 2
"""Moves of the same pages before they are let go as they are."""


class Shrink(msgspec.Struct, eq=False):
    """One segment on its way to fewer chunks."""

    keep: int
    starts: list[int] = []
    """Of the chunks that are being emptied: payload offsets."""
    tries: Counter[Run] = msgspec.field(default_factory=Counter)
    """Moves that were begun, by run."""


class Shrinking:
    """Which segments shrink, and when somebody looks at them again."""

    def __init__(self, wakeup: Wakeup) -> None:
        """None does; `wakeup` hears of looks."""
        self._wakeup = wakeup
        self.open: dict[Segment, Shrink] = {}
        self.look_at_s = inf

    def look(self, at_s: float) -> None:
        """A look is wanted at `at_s`, if not sooner."""
        self.look_at_s = min(self.look_at_s, at_s)
        self._wakeup.by(at_s)


def shrink_segment(core: Core, caller: Caller, message: ShrinkSegment) -> None:
    """Begin to give memory of a segment back; answer SegmentShrinks. Safe to repeat."""
    caller.session.must_be_operator()
    segment = core.segments.get(message.segment)
    if segment is None or segment.tier is not Tier.HBM:
        names = sorted(each.id for each in core.segments.values() if each.tier is Tier.HBM)
        raise BadValue("segment", message.segment, f"one on a device: {', '.join(names) or 'none'}")
    length = segment.geometry.chunk_bytes
    shrink = core.shrinking.open.get(segment)
    most = segment.allocator.capacity_bytes // length if shrink is None else shrink.keep
    if not 0 <= message.size_bytes // length <= most:
        want = f"0 to {most * length}; memory comes back when its worker starts anew"
        raise BadValue("size_bytes", message.size_bytes, want)
    keep = message.size_bytes // length
    if shrink is None:
        shrink = core.shrinking.open[segment] = Shrink(keep)
    shrink.keep = keep
    core.shrinking.look(core.now)
    core.note(f"segment {segment.id} shrinks to {keep * length} bytes, as an operator wishes")
    left = segment.allocator.capacity_bytes - keep * length
    core.reply(caller, SegmentShrinks(segment.id, keep * length, left))


def joined(core: Core, segment: Segment, released: Iterable[int], *, is_new_life: bool) -> None:
    """Its worker has registered, and says which chunks have no memory in this life."""
    allocator, known = segment.allocator, set(released)
    if is_new_life:
        allocator.frame_map.restore()
        core.shrinking.open.pop(segment, None)
    for number in known:
        allocator.frame_map.withhold(number)
    _tell(
        core, segment, [each for each in allocator.frame_map.withheld_chunks if each not in known]
    )


def look(core: Core) -> None:
    """Bring every segment that shrinks a little further."""
    if core.now < core.shrinking.look_at_s:
        return
    core.shrinking.look_at_s = inf
    for segment, shrink in list(core.shrinking.open.items()):
        if segment.state is SegmentState.LOST or _is_done(core, segment, shrink):
            del core.shrinking.open[segment]
        else:
            core.shrinking.look(core.now + LOOK_S)


def _is_done(core: Core, segment: Segment, shrink: Shrink) -> bool:
    if not segment.takes_orders:
        return False
    allocator, length = segment.allocator, segment.geometry.chunk_bytes
    _choose(segment, shrink)
    slots = SLOTS_PER_LOOK
    for start in list(shrink.starts):
        for chunk in allocator.chunks_within(start, length):
            if not chunk.closed:
                allocator.close(chunk)
            if not segment.drained:  # else they are copied to other workers
                slots = _empty(core, segment, shrink, chunk, slots)
        if allocator.frame_map.withhold(start // length):
            shrink.starts.remove(start)
            _tell(core, segment, [start // length])
            placing.segments_changed(core)
    return not shrink.starts


def _choose(segment: Segment, shrink: Shrink) -> None:
    """Have as many chunks emptied as are too many: those in which the least lies, the last ones."""
    allocator, length = segment.allocator, segment.geometry.chunk_bytes
    wanted = allocator.capacity_bytes // length - shrink.keep - len(shrink.starts)
    taken = {number * length for number in allocator.frame_map.withheld_chunks} | set(shrink.starts)
    if wanted > 0:
        starts = range(0, segment.geometry.payload_bytes, length)
        used = {
            start: sum(chunk.slots - chunk.free for chunk in allocator.chunks_within(start, length))
            for start in reversed(starts)
            if start not in taken
        }
        shrink.starts += sorted(used, key=used.__getitem__)[:wanted]


def _empty(core: Core, segment: Segment, shrink: Shrink, chunk: Chunk, slots: int) -> int:
    """Let go of up to so many of a chunk's pages; how many may still be looked at."""
    for slot in reversed(list(chunk.slots_in(ExtentState.SEALED))):
        if not slots:
            return 0
        slots -= 1
        if chunk.states[slot] == ExtentState.SEALED:
            _let_go(core, segment, shrink, chunk, slot)
    return slots


def _let_go(core: Core, segment: Segment, shrink: Shrink, chunk: Chunk, slot: int) -> None:
    tree, key, offset = core.tree(chunk.namespaces[slot]), chunk.key(slot), chunk.offset(slot)
    run = tree.get(key)
    assert run is not None, (chunk.start, slot)
    if run.plans:
        return  # it is being copied, or put
    page = run.page_of(key)
    copy = next(
        c
        for c in run.copies
        if c.segment is segment and c.generation(page) and c.offset(page) == offset
    )
    if victims.unsafe_pages(core, run, copy)[page]:
        if _copy_down(core, segment, shrink, run, copy):
            return
        if page < core.pins.kept(run):
            return  # until there is room below, or the pin ends
    retire_copy(core, run, copy, page, 1)
    core.counters["copies_given_up"] += 1
    prune(core, tree, run)
    if run.keys:
        core.replication.note(core, tree, run.keys, core.now)


def _copy_down(core: Core, segment: Segment, shrink: Shrink, run: Run, copy: Copy) -> bool:
    """Copy what lies nowhere below, before it goes; False where that is no use."""
    targets = tiering.below(core, segment)
    tries = TRIES_MAX * ceil(len(run) / moves.pages_at_once(copy.part_bytes))
    if not targets or shrink.tries[run] >= tries:
        return False
    if moves.free_at_s(core, moves.lane_of(core, segment)) > core.now:
        return True
    size_class = moves.class_for(core, run, copy, targets[0].tier)
    target = next((s for s in targets if placing.is_open(core, s, size_class)), None)
    if target is None:
        return False
    shrink.tries[run] += 1
    pages = tiering.last_unsafe(core, run, copy)
    moves.start(core, MoveKind.DEMOTE, run, copy, pages, target)
    return True


def _tell(core: Core, segment: Segment, numbers: list[int]) -> None:
    """Have the worker give memory back. What is not answered is told at its next registration."""
    if numbers and segment.session is not None:
        message = ReleaseChunks(core.epoch, segment.id, segment.incarnation, tuple(numbers))
        core.actions.append(Command(core.orders.new_command(), segment.session, message))
