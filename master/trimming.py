"""Replicas that are too many: of a worker that came back, or because fewer are wanted by now.

Those of one host (or worker) go at a time: of one that is drained, else of the slowest tier, of
what has fewest pages of the run, and of the fullest segment. Never the last ones; leases are
honoured as by anybody who lets go. See the step table "trim" in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from master import replica_counts
from master.retiring import retire_copy

if TYPE_CHECKING:
    from master.core import Core
    from master.run import Copy, Run


def has_surplus(core: Core, run: Run, parts: int, wanted: int) -> bool:
    """Whether some part of some page lies in more domains than it is to."""
    return any(max(replica_counts.got_of(core, run, part)) > wanted for part in range(parts))


def trim(core: Core, run: Run, parts: int, wanted: int) -> None:
    """Let go of what is too much of each part, one domain after the other."""
    assert wanted >= 1, wanted  # so none of them is the last
    for part in range(parts):
        counts = replica_counts.got_of(core, run, part)
        while max(counts) > wanted:
            pages = _first_above(counts, wanted)
            domain = _least_useful(core, run, part, pages.start)
            _let_go(core, run, part, domain, pages)
            counts = replica_counts.got_of(core, run, part)


def _first_above(counts: bytes, wanted: int) -> range:
    """The first pages in a row that have equally many, more than they are to."""
    first = next(page for page, count in enumerate(counts) if count > wanted)
    stop = first
    while stop < len(counts) and counts[stop] == counts[first]:
        stop += 1
    return range(first, stop)


def _least_useful(core: Core, run: Run, part: int, page: int) -> str:
    """The domain that a page is read from with least profit."""
    domains: dict[str, tuple[bool, int, int, float]] = {}
    for copy in _readable(run, part, page):
        allocator = copy.segment.allocator
        share = allocator.used_bytes / max(1, allocator.capacity_bytes)
        cost = copy.segment.drained, copy.segment.rank, copy.absent, share
        place = replica_counts.domain(core, copy.segment)
        domains[place] = min(domains.get(place, cost), cost)  # by its fastest copy
    return max(domains, key=domains.__getitem__)


def _readable(run: Run, part: int, page: int) -> list[Copy]:
    return [c for c in run.copies_of(part) if c.segment.readable and c.generation(page)]


def _let_go(core: Core, run: Run, part: int, domain: str, pages: range) -> None:
    """Drop what a domain has of these pages, as far as the first of them lies where they do."""
    for copy in _readable(run, part, pages.start):
        if replica_counts.domain(core, copy.segment) == domain:
            held = copy.present(pages.start, pages.stop)
            gap = held.find(0)
            count = len(held) if gap < 0 else gap
            retire_copy(core, run, copy, pages.start, count)
            core.counters["replicas_trimmed"] += count
