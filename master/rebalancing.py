"""Which pages go from the fullest segments of a tier to the emptiest, until they are filled alike.

Cold pages, as far as samples tell: who reads a page finds it meanwhile where it was. Only to
workers below the watermark, so that nothing is evicted for it. Must not know how copies are carried
out, or why a relocation ends otherwise.
"""

from __future__ import annotations

from heapq import nlargest
from itertools import product
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.replica import ExtentState, Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.relocation import RelocationKind, RelocationState, StartRelocation
from master import moves, placing, replica_counts, victims
from master.relocations import Amount, Relocation, begin_copy, end
from master.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.run import Copy, Run

GAP: Final = 0.1
"""Shares that differ by less are alike."""
SHIFTS_MAX: Final = 8
"""Tried, one after the other, until pages are found that can go."""
SHIFTS_SHOWN: Final = 3
RETRY_S: Final = 0.25
FRUITLESS_MAX: Final = 16
"""Searches in a row that may find nothing before the rest is left as it is."""
_RETIRED: Final = int(ExtentState.RETIRED)


class Shift(msgspec.Struct, frozen=True):
    """From the one to the other, of one tier, pages may go."""

    source: Segment
    target: Segment
    size_bytes: int
    """At most: then the two are filled alike."""


def shifts(core: Core, relocation: Relocation | None = None) -> list[Shift]:
    """The widest gaps of all tiers, widest first, as if all that is on its way had arrived."""
    found: list[tuple[float, Shift]] = []
    for tier in Tier:
        segments = [s for s in core.segments.values() if s.tier is tier and s.takes_plans]
        shares = {segment: _share(segment, relocation) for segment in segments}
        for source, target in product(segments, repeat=2):
            gap = shares[source] - shares[target]
            if gap > GAP and source.worker != target.worker and _has_room(core, target):
                capacities = source.allocator.capacity_bytes, target.allocator.capacity_bytes
                found.append((gap, Shift(source, target, int(gap / 2 * min(capacities)))))
    return [shift for _, shift in nlargest(SHIFTS_MAX, found, key=lambda each: each[0])]


def _share(segment: Segment, relocation: Relocation | None) -> float:
    """How full it is, without what goes as soon as its leases or its copying end."""
    copying = () if relocation is None else relocation.copying
    going = sum(
        len(each.plan) * size_class_of(each.plan.part_bytes)
        for each in copying
        if each.source is segment
    )
    allocator = segment.allocator
    used = allocator.used_bytes - allocator.bytes_in[_RETIRED] - going
    return used / max(1, allocator.capacity_bytes)


def _has_room(core: Core, segment: Segment) -> bool:
    """Whether it may be filled further without anything being evicted for it."""
    allocator = segment.allocator
    return allocator.used_bytes < core.tunables.watermark_low * allocator.capacity_bytes


def planned(core: Core) -> Amount:
    """How much there is to do, at least: what the widest gap of each tier asks for."""
    widest = {each.source.tier: each for each in reversed(shifts(core))}
    return Amount(0, sum(shift.size_bytes for shift in widest.values()))


def why(core: Core) -> str:
    """Which segments are filled how unevenly, for people."""
    return "; ".join(
        f"{each.source.id} is {_share(each.source, None):.0%} full, "
        f"{each.target.id} {_share(each.target, None):.0%}"
        for each in shifts(core)[:SHIFTS_SHOWN]
    )


def begin(core: Core) -> None:
    """A worker has come: start one of the master's own, unless one runs or there is none to do."""
    book = core.relocations
    wish = StartRelocation(RelocationKind.REBALANCE)
    if book.like(wish) is None and not book.is_full and shifts(core):
        book.add(Relocation(book.new_id(), wish, by_operator=False), core.now)
        core.note(f"segments are filled unevenly: {why(core)}")


def walk(core: Core, relocation: Relocation) -> Iterator[float]:
    """Even segments out; when to go on, after each step."""
    fruitless = 0
    while (found := shifts(core, relocation)) or relocation.copying:
        free_s = [moves.copy_free_at_s(core, each.source, each.target) for each in found]
        if not found or min(free_s) > core.now:
            yield min(free_s, default=core.now + RETRY_S)
            continue
        begun = any(_shift(core, relocation, each) for each in found)
        fruitless = 0 if begun else fruitless + 1
        if fruitless >= FRUITLESS_MAX and not relocation.copying:
            reason = "what is left is in use, or lies on the other hosts already"
            end(core, relocation, RelocationState.DONE, reason)
            return
        yield core.now if begun else core.now + RETRY_S
    end(core, relocation, RelocationState.DONE)


def _shift(core: Core, relocation: Relocation, shift: Shift) -> bool:
    """Have some of the coldest pages of the fuller segment copied; whether there were any."""
    left = shift.size_bytes
    for run in victims.coldest(core, shift.source):
        for copy in run.copies:
            if copy.segment is not shift.source or run.plans:
                continue
            if moves.copy_free_at_s(core, shift.source, shift.target) > core.now or left <= 0:
                return left < shift.size_bytes
            pages = _movable(core, run, copy, shift.target)
            size_class = size_class_of(copy.part_bytes)
            pages = pages[: max(1, left // size_class)]
            if pages and placing.is_open(core, shift.target, size_class):
                count = begin_copy(core, relocation, run, copy, pages, shift.target)
                left -= count * size_class
    return left < shift.size_bytes


def _movable(core: Core, run: Run, copy: Copy, target: Segment) -> range:
    """The last pages of a copy whose part is in no other domain of the target's."""
    place = replica_counts.domain(core, target)
    there = run.held_by(
        each
        for each in run.copies_of(copy.part)
        if replica_counts.domain(core, each.segment) == place and each is not copy
    )
    here = copy.present(0, len(run))
    free = bytes(here[page] and not there[page] for page in range(len(run)))
    stop = free.rfind(1) + 1
    return range(free.rfind(0, 0, stop) + 1, stop)
