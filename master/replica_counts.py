"""How many replicas a page is to have, and has: one for each host that can serve all its parts.

By host, or by worker where that was asked for (`replicas_apart`). Pure; decides nothing.
"""

from __future__ import annotations

from functools import cache
from operator import add
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.ids import KEY_BYTES
from master.packed import NOT_THERE, index_of
from master.plans import OPEN
from master.segments import SegmentState
from master.tunables import HOST

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

    from master.core import Core
    from master.plans import Plan
    from master.run import Copy, Run
    from master.segments import Segment

BEATS_MISSED: Final = 2
"""Heartbeats after which a worker may well be dead."""
_IS_OPEN: Final = bytes(int(state == OPEN) for state in range(256))


def domain(core: Core, segment: Segment) -> str:
    """What two replicas of a page must not have in common."""
    return segment.host if core.tunables.replicas_apart == HOST else segment.worker


def lending(core: Core) -> frozenset[str]:
    """The domains that lend something that is not to be emptied."""
    lost = SegmentState.LOST
    segments = (s for s in core.segments.values() if s.state is not lost and not s.drained)
    return frozenset(domain(core, segment) for segment in segments)


def readers(core: Core) -> frozenset[str]:
    """The domains that pages may be read from: those that are to be emptied, too."""
    segments = (s for s in core.segments.values() if s.state is not SegmentState.LOST)
    return frozenset(domain(core, segment) for segment in segments)


def wanted(core: Core, run: Run) -> int:
    """How many replicas each page of a run is to have."""
    return asked(core, run) + for_heat(core, run)


def asked(core: Core, run: Run) -> int:
    """How many of them however little it is read.

    What nobody asked for is bounded by the domains that there are; what was asked for is not.
    """
    known = core.namespaces.by_ordinal(run.namespace)
    assert known is not None, run.namespace
    said = run.replicas or known.replicas
    return said or min(core.tunables.replicas, max(1, core.domains))


def for_heat(core: Core, run: Run) -> int:
    """How many of them because many read it: none where that is only observed."""
    return run.extra if core.replica_policy.policy.acts else 0


def got(core: Core, run: Run, parts: int) -> bytes:
    """One byte a page: in how many domains it can be read, counted for its scarcest part.

    And how many more it may lose for its stripe's sake.
    """
    counts = {
        _plus(got_at(core, run, copies), core.stripes.spare(run.namespace, part, run.keys))
        for part, copies in enumerate(by_part(run, parts))
    }
    if len(counts) == 1:
        return counts.pop()
    return bytes(map(min, *counts))


def by_part(run: Run, parts: int) -> list[list[Copy]]:
    """The copies of each part: in one go, for there may be hundreds."""
    found: list[list[Copy]] = [[] for _ in range(parts)]
    for copy in run.copies:
        found[copy.part].append(copy)
    return found


def got_of(core: Core, run: Run, part: int) -> bytes:
    """One byte a page: in how many domains this part can be read."""
    return got_at(core, run, run.copies_of(part))


def got_at(core: Core, run: Run, copies: Iterable[Copy]) -> bytes:
    """One byte a page: in how many domains one of these copies can be read."""
    there = [copy for copy in copies if copy.segment.readable]
    if not any(copy.absent for copy in there):  # the usual case
        return bytes([len({domain(core, copy.segment) for copy in there})]) * len(run)
    return _sum(run, _masks(core, run, there))


def staying(core: Core, run: Run, part: int, leaves: str = "") -> bytes:
    """One byte a page: in how many domains this part can be read that is to stay there.

    Not what worker `leaves` has, nor what lies where everything is to go.
    """
    copies = (
        copy
        for copy in run.copies_of(part)
        if copy.segment.readable and not copy.segment.drained and copy.segment.worker != leaves
    )
    return _sum(run, _masks(core, run, copies))


def are_heard(core: Core, run: Run) -> bool:
    """Whether all whose copies of a run can be read were heard of lately.

    Nothing is to be let go for the sake of a copy whose worker may be dead, and not lost yet.
    """
    readable = {copy.segment: None for copy in run.copies if copy.segment.readable}
    return all(is_heard(core, segment) for segment in readable)


def is_heard(core: Core, segment: Segment) -> bool:
    """Whether its worker was heard of lately; where stripes' parity counts, nobody has to be."""
    if segment is core.stripes.place:
        return True
    since_s = core.now - BEATS_MISSED * core.tunables.heartbeat_interval_s
    return segment.session is not None and core.workers[segment.worker].heard_s >= since_s


def _plus(counts: bytes, more: bytes) -> bytes:
    """The sum of each page's."""
    return bytes(map(add, counts, more)) if more else counts


def _sum(run: Run, masks: dict[str, int]) -> bytes:
    """Bytes do not overflow, for a mask is 0 or 1."""
    return sum(masks.values()).to_bytes(len(run), "little")


def _masks(core: Core, run: Run, copies: Iterable[Copy]) -> dict[str, int]:
    """By domain: one byte a page, 1 where one of these copies has it, as one number."""
    masks: dict[str, int] = {}
    for copy in copies:
        place = domain(core, copy.segment)
        mask = int.from_bytes(copy.present(0, len(run)), "little")
        masks[place] = masks.get(place, 0) | mask
    return masks


class Held(msgspec.Struct, frozen=True):
    """In which domains one part of a run's pages lies, or is about to; one byte a page.

    Those count that cannot be read for now, because what their worker has is being compared, and
    those into which it is being copied.
    """

    counts: bytes
    everywhere: bytes
    """1 where every domain that lends has it: there is no place for another one."""


def held(core: Core, run: Run, part: int, copies: Iterable[Copy]) -> Held:
    """Where this part, of which these are the copies, lies, or is about to."""
    there = (copy for copy in copies if copy.segment.state is not SegmentState.LOST)
    masks = _masks(core, run, there)
    for plan in run.plans:
        if plan.part == part:
            place = domain(core, plan.segment)
            mask = int.from_bytes(open_pages(run, plan), "little")
            masks[place] = masks.get(place, 0) | mask
    everywhere = int.from_bytes(b"\1" * len(run), "little")
    for place in core.replication.domains:
        everywhere &= masks.get(place, 0)
    counts = _plus(_sum(run, masks), stood_for(core, run, part))
    return Held(counts, everywhere.to_bytes(len(run), "little"))


def stood_for(core: Core, run: Run, part: int) -> bytes:
    """One byte a page: for how many replicas its stripe stands; empty where it stands for none.

    For those that make a page last, but one that is read, and none of those that share its reads.
    """
    spare = core.stripes.spare(run.namespace, part, run.keys)
    if not spare:
        return b""
    lasting = asked(core, run) - 1
    return bytes(min(each, lasting) for each in spare)


def alike(run: Run, part: int, pages: range) -> range:
    """The first of these pages in a row whose part lies, or is about to lie, in the same places:
    where one more of them may go, all may.
    """
    columns = [c.present(pages.start, pages.stop) for c in run.copies_of(part) if c.absent]
    opened = (open_pages(run, plan) for plan in run.plans if plan.part == part)
    columns += [each[pages.start : pages.stop] for each in opened if each]
    for page in range(1, len(pages)):
        if any(column[page] != column[0] for column in columns):
            return pages[:page]
    return pages


@cache
def _below(wanted: int) -> bytes:
    """To translate counts: 1 where they are lower."""
    return bytes(int(count < wanted) for count in range(256))


def scarce(core: Core, run: Run, parts: int, held_of_part: Held, wanted: int) -> bytes:
    """One byte a page: 1 where it can be read, and has a place for more of a part than it lies in.

    Thinned or not.
    """
    everywhere = int.from_bytes(held_of_part.everywhere, "little")
    return (_few(core, run, parts, held_of_part, wanted) & ~everywhere).to_bytes(len(run), "little")


def stuck(core: Core, run: Run, parts: int, held_of_part: Held, wanted: int) -> bytes:
    """One byte a page: 1 where it can be read, and lies in too few domains, but in all."""
    everywhere = int.from_bytes(held_of_part.everywhere, "little")
    return (_few(core, run, parts, held_of_part, wanted) & everywhere).to_bytes(len(run), "little")


def _few(core: Core, run: Run, parts: int, held_of_part: Held, wanted: int) -> int:
    there = int.from_bytes(run.readable(parts, core.version), "little")
    return there & int.from_bytes(held_of_part.counts.translate(_below(wanted)), "little")


def column(counts: Counter[int]) -> tuple[int, ...]:
    """How often 1, 2 and so on."""
    most = max((number for number, count in counts.items() if count), default=0)
    return tuple(counts[number] for number in range(1, most + 1))


def open_pages(run: Run, plan: Plan) -> bytes:
    """One byte a page of the run: 1 where `plan` has it open."""
    pages, states = len(run), bytes(plan.states.translate(_IS_OPEN))
    first = index_of(run.keys, plan.keys[:KEY_BYTES])
    if first == NOT_THERE:
        begin = plan.page_of(run.keys[:KEY_BYTES])
        return b"" if begin == NOT_THERE else states[begin : begin + pages].ljust(pages, b"\0")
    return (bytes(first) + states)[:pages].ljust(pages, b"\0")
