"""Which segments are tried for new extents, in which order, and why none would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.replica import ExtentState, Tier
from kvstore.wire.messages.common import Outcome
from master import degraded, replica_counts
from master.segments import Segment, SegmentState
from policies.placement.protocol import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from master.core import Core
    from master.run import Run

PUT_TIERS: Final = (Tier.DRAM, Tier.HBM, Tier.NVME)
"""Puts go to the first of these that the pool has; the others are filled by moves."""
_QUARANTINED: Final = int(ExtentState.QUARANTINED)
_RESERVED: Final = int(ExtentState.RESERVED)
STAND_INS: Final = {
    Tier.HBM: (Tier.DRAM, Tier.NVME),
    Tier.DRAM: (Tier.NVME,),
    Tier.NVME: (Tier.DRAM,),
}
"""Where a replica goes when its tier has no room; to a device's memory only if that was asked."""
RANKED_FOR_S: Final = 0.05
RANKED_FOR_USES: Final = 64
"""A ranking of many segments costs more than a put; it is made anew after either."""


class Ranking(msgspec.Struct, eq=False):
    """Segments that take puts, best first, while it is fresh; and where each put goes first."""

    segments: list[Segment] = []
    firsts: list[Segment] = []
    """Of the puts to come, the last one the next."""
    until_s: float = 0.0


class Rankings:
    """By the tier that is wished for (none: where puts go) and the host that writes."""

    __slots__ = ("_rankings", "hosts")

    def __init__(self) -> None:
        """Nobody lends."""
        self._rankings: dict[tuple[str, str], Ranking] = {}
        self.hosts: frozenset[str] = frozenset()
        """That lend: for others no segment is near."""

    def of(self, tier: str, host: str) -> Ranking:
        """That of puts from `host`."""
        key = tier, host if host in self.hosts else ""
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._rankings[key] = Ranking()
        return ranking

    def clear(self) -> None:
        """All are made anew."""
        self._rankings.clear()


def ranked(core: Core, wish: str = "", host: str = "") -> list[Segment]:
    """Segments to try for pages that `host` puts, best first; ask each whether it `is_open`.

    Those of the tier that is wished for come before those that every put may go to. One may come
    twice.
    """
    usual = _ranked(core, "", host)
    return usual if not wish else [*_ranked(core, wish, host), *usual]


def _ranked(core: Core, tier: str, host: str) -> list[Segment]:
    ranking = core.rankings.of(tier, host)
    if not ranking.firsts or core.now >= ranking.until_s:
        of_tier = [s for s in core.segments.values() if s.tier == tier]
        candidates = _candidates(of_tier if tier else put_segments(core), host)
        ranking.segments = _in_order(core, candidates)
        ranking.firsts = _firsts(core, candidates, RANKED_FOR_USES)
        ranking.until_s = core.now + RANKED_FOR_S
    if len(ranking.segments) < 2:
        return ranking.segments
    return [ranking.firsts.pop(), *ranking.segments]


def _candidates(segments: Iterable[Segment], near: str) -> list[Candidate]:
    """Those that take plans."""
    return [
        Candidate(
            segment.id,
            segment.host,
            segment.ref.tier,
            segment.allocator.capacity_bytes,
            segment.allocator.free_bytes,
            segment.allocator.bytes_in[_RESERVED],
            is_near=bool(near) and segment.host == near,
        )
        for segment in segments
        if segment.takes_plans
    ]


def _in_order(core: Core, candidates: list[Candidate]) -> list[Segment]:
    """Best first."""
    return [core.segments[each.segment] for each in core.placement.policy.ranked(candidates)]


def _firsts(core: Core, candidates: list[Candidate], count: int) -> list[Segment]:
    """Where each of so many copies goes first; one of nobody."""
    if not candidates:
        return []
    found = core.placement.policy.firsts(candidates, count, core.sample())
    return [core.segments[each.segment] for each in found]


def of_worker(core: Core, worker: str, tier: Tier) -> list[Segment]:
    """Segments of this tier that a worker can move pages to, best first."""
    segments = core.workers[worker].segments.values()
    of_tier = [segment for segment in segments if segment.tier is tier]
    return _in_order(core, _candidates(of_tier, ""))


def apart(
    core: Core,
    run: Run,
    part: int,
    tier: Tier,
    near: str = "",
    *,
    pages: range | None = None,
    leaves: str = "",
) -> list[Segment]:
    """Where one more replica of this part of these pages of a run may go, best first.

    On hosts that have none of it and no open plan for it (I33); of this tier, and after those of
    the tier that stands in for it. Host `near` comes first, then zones and racks that have none.
    What worker `leaves` has does not count, nor what drained ones have: it is about to go. Ask each
    whether it `is_open`.
    """
    holders = _holders(run, part, pages or range(len(run)))
    holders = [s for s in holders if s.worker != leaves and not s.drained]
    taken = {replica_counts.domain(core, segment) for segment in holders}
    found: list[Segment] = []
    for each in (tier, *STAND_INS[tier]):
        fitting = [
            segment
            for segment in core.segments.values()
            if segment.tier is each
            and segment.worker != leaves
            and replica_counts.domain(core, segment) not in taken
        ]
        candidates = _candidates(fitting, near)
        ordered = dict.fromkeys((*_firsts(core, candidates, 1), *_in_order(core, candidates)))
        found += sorted(ordered, key=lambda s: (s.host != near, _closeness(s, holders)))
    beside = degraded.beside(core, run, part, pages or range(len(run)))
    if beside:  # two shards of a stripe would be lost together
        found.sort(key=lambda segment: replica_counts.domain(core, segment) in beside)
    return found


def _holders(run: Run, part: int, pages: range) -> list[Segment]:
    """Segments in which some of these pages' part lies, or is being written, as far as is known."""
    copies = [c for c in run.copies_of(part) if 1 in c.present(pages.start, pages.stop)]
    lying = [copy.segment for copy in copies if copy.segment.state is not SegmentState.LOST]
    plans = (plan for plan in run.plans if plan.part == part)
    return lying + [
        plan.segment
        for plan in plans
        if 1 in replica_counts.open_pages(run, plan)[pages.start : pages.stop]
    ]


def _closeness(segment: Segment, holders: Iterable[Segment]) -> int:
    """How much a segment could be lost together with: 2 its rack, 1 its zone, 0 as far as is known
    nothing.
    """
    return max([_in_common(segment, holder) for holder in holders], default=0)


def _in_common(one: Segment, other: Segment) -> int:
    if one.zone != other.zone:
        return 0
    if one.rack and one.rack == other.rack:
        return 2
    return 1 if one.zone else 0


def put_segments(core: Core) -> list[Segment]:
    """The segments of the tier that puts go to, whatever their state."""
    segments = [s for s in core.segments.values() if s.state is not SegmentState.LOST]
    tiers = {segment.tier for segment in segments}
    tier = next((each for each in PUT_TIERS if each in tiers), None)
    return [segment for segment in segments if segment.tier is tier]


def segments_changed(core: Core) -> None:
    """Segments have come or gone: they are ranked anew, and drives hold more or less."""
    core.rankings.clear()
    core.rankings.hosts = frozenset([segment.host for segment in core.segments.values()])
    core.replication.segments_changed(core)
    core.stripes.look(core.now)
    drives = [s for s in core.segments.values() if s.tier is Tier.NVME and s.takes_plans]
    core.moves.has_drives = bool(drives)
    core.admission.resize(sum(segment.geometry.payload_bytes for segment in drives))


def hosts_for(core: Core, size_class: int) -> int:
    """How many hosts take pages of this class now: so many replicas that count can be made."""
    taking = (s for s in core.segments.values() if s.takes_plans)
    fitting = (s for s in taking if size_class <= s.geometry.chunk_bytes)
    return len({replica_counts.domain(core, segment) for segment in fitting})


def is_quarantine_full(core: Core, segment: Segment) -> bool:
    """Whether too much of the segment waits for fences, but for what a reader's lock holds."""
    waiting = segment.allocator.bytes_in[_QUARANTINED]
    if not waiting:
        return False
    waiting -= sum(segment.held.values())
    return waiting > core.tunables.quarantine_fraction_max * segment.geometry.payload_bytes


def is_open(core: Core, segment: Segment, size_class: int) -> bool:
    """Whether an extent of this class may be planned in this segment now, and finds room."""
    allocator = segment.allocator
    return (
        segment.takes_plans
        and size_class <= allocator.geometry.chunk_bytes
        and allocator.has_room(size_class)
        and not is_quarantine_full(core, segment)
    )


def refusal(core: Core, size_class: int) -> Outcome:
    """Why no segment has room. BadValue where none could ever have."""
    segments = put_segments(core)
    fitting = [s for s in segments if size_class <= s.geometry.chunk_bytes]
    if segments and not fitting:
        largest = max(segment.geometry.chunk_bytes for segment in segments)
        raise BadValue("part_bytes", size_class, f"at most a chunk of {largest} bytes")
    taking = [segment for segment in fitting if segment.takes_plans]
    if taking and all(is_quarantine_full(core, segment) for segment in taking):
        return Outcome.TOO_MANY_QUARANTINED
    return Outcome.OUT_OF_SPACE
