"""Runs a trace against a pool and counts what it served, wrote, evicted and kept in vain."""

from __future__ import annotations

from collections import Counter, deque
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import msgspec

from master.replay.pool import PUT_WAIT_S, VirtualPool
from master.replay.trace import NO_PARENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from master.replay.trace import Trace

LAST_VICTIMS: Final = 10_000
"""Of which the effective TTL is the median."""
REACH_EVERY: Final = 500
"""Requests between two looks at what cannot be reached: each looks at every page."""


class Figures(msgspec.Struct, frozen=True):
    """What one pool did with one trace, from empty on. Ratios are 0 to 1."""

    policy: str
    capacity_pages: int
    requests: int
    tokens: int
    hit_ratio: float
    """Tokens of the pages that were there when a request came, of all its tokens."""
    hit_ratio_by_tier: dict[str, float]
    page_touches: int
    """Full pages of all requests."""
    pages_stored: int
    pages_refused: int
    """That found no room in time."""
    evictions: int
    """Pages."""
    expirations: int
    """Pages."""
    ghost_hits: int
    """Pages stored again after the pool had let them go: hits that a larger one would have had."""
    effective_ttl_s: float | None
    """How long the last pages that left had not been used, median; None where none left."""
    unreachable_share: float
    """Of the pages held, those that cannot be hit since one before them is missing; mean."""
    pages_written_by_tier: dict[str, int]


def replay(trace: Trace, pool: VirtualPool) -> Figures:
    """Serve every request of the trace by an empty pool: look up, then store what is missing.

    Answers are not stored, partial pages neither, and computing takes no time.
    """
    tally = _Tally(trace, pool)
    for request in trace.requests:
        # A put that has to wait is over before the next one comes.
        pool.advance(max(request.at_s, pool.now_s + PUT_WAIT_S))
        tally.serve(trace.full_pages(request))
    return tally.figures()


def unreachable_share(held: Iterable[int], parents: Mapping[int, int]) -> float:
    """The share of the pages held of which some page before is not held; 0 of none."""
    reached: dict[int, bool] = dict.fromkeys(held, False)
    known = {NO_PARENT: True}
    for page in reached:
        path: list[int] = []
        while page not in known:
            path.append(page)
            if page not in reached:
                known[page] = False
                break
            page = parents[page]
        known.update(dict.fromkeys(path, known[page]))
    return sum(not known[page] for page in reached) / len(reached) if reached else 0.0


class _Tally:
    """Counts of one replay so far."""

    def __init__(self, trace: Trace, pool: VirtualPool) -> None:
        self._trace = trace
        self._pool = pool
        self._hits: Counter[str] = Counter()
        self._touches = self._stored = self._refused = self._ghost_hits = self._served = 0
        self._last_use_s: dict[int, float] = {}
        self._gone: set[int] = set()
        self._unused_s: deque[float] = deque(maxlen=LAST_VICTIMS)
        self._unreachable: list[float] = []

    def serve(self, pages: Sequence[int]) -> None:
        """One request."""
        pool = self._pool
        if pages:
            hits = pool.match(pages)
            count = hits.total()
            missing = pages[count:]
            stored = pool.put(missing, pages[count - 1] if count else None) if missing else 0
            self._hits += hits
            self._touches += len(pages)
            self._stored += stored
            self._refused += len(missing) - stored
            self._ghost_hits += len(self._gone.intersection(missing[:stored]))
        # Before the pages of this request are noted: a victim was last used before it.
        self._note_freed()
        self._last_use_s.update(dict.fromkeys(pages, pool.now_s))
        self._served += 1
        if self._served % REACH_EVERY == 0:
            self._look()

    def _look(self) -> None:
        share = unreachable_share(self._pool.held.values(), self._trace.parents)
        self._unreachable.append(share)

    def _note_freed(self) -> None:
        pool = self._pool
        for page in pool.freed:
            # Of a chain longer than the pool, pages go within the request that brought them.
            self._unused_s.append(pool.now_s - self._last_use_s.get(page, pool.now_s))
        self._gone.update(pool.freed)
        pool.freed.clear()

    def figures(self) -> Figures:
        """The counts as figures."""
        trace, pool = self._trace, self._pool
        self._look()
        tokens = trace.tokens or 1
        counters = pool.master.core.counters
        by_tier = {
            tier: count * trace.page_tokens / tokens for tier, count in sorted(self._hits.items())
        }
        return Figures(
            pool.setting.policy,
            pool.setting.capacity_pages,
            len(trace.requests),
            trace.tokens,
            sum(by_tier.values()),
            by_tier,
            self._touches,
            self._stored,
            self._refused,
            counters["pages_evicted"],
            counters["pages_expired"],
            self._ghost_hits,
            median(self._unused_s) if self._unused_s else None,
            fmean(self._unreachable),
            dict(sorted(pool.written.items())),
        )
