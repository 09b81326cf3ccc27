"""How many replicas a page is to have, and has: one for each host that can serve all its parts.

By host, or by worker where that was asked for (`replicas_apart`). Pure; decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from master.segments import SegmentState
from master.tunables import HOST

if TYPE_CHECKING:
    from master.core import Core
    from master.run import Run
    from master.segments import Segment


def domain(core: Core, segment: Segment) -> str:
    """What two replicas of a page must not have in common."""
    return segment.host if core.tunables.replicas_apart == HOST else segment.worker


def lending(core: Core) -> int:
    """How many domains lend something."""
    segments = (s for s in core.segments.values() if s.state is not SegmentState.LOST)
    return len({domain(core, segment) for segment in segments})


def wanted(core: Core, run: Run) -> int:
    """How many replicas each page of a run is to have.

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
    """One byte a page: in how many domains it can be read, counted for its scarcest part."""
    pages = len(run)
    counts = [_domains_with(core, run, part) for part in range(parts)]
    if parts == 1:
        return counts[0].to_bytes(pages, "little")
    columns = zip(*(count.to_bytes(pages, "little") for count in counts), strict=True)
    return bytes(min(column) for column in columns)


def _domains_with(core: Core, run: Run, part: int) -> int:
    """The same for one part, as one number: bytes do not overflow, for a mask is 0 or 1."""
    masks: dict[str, int] = {}
    for copy in run.copies_of(part):
        if copy.segment.readable:
            place = domain(core, copy.segment)
            mask = int.from_bytes(copy.present(0, len(run)), "little")
            masks[place] = masks.get(place, 0) | mask
    return sum(masks.values())
