"""Runs a trace against a pool and counts what it served, wrote, evicted and kept in vain."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import chain, repeat
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.hints import NO_HINTS
from kvstore.replica import Tier
from kvstore.request_trace import NO_PARENT
from master.replay.pool import PUT_WAIT_S, VirtualPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstore.hints import Hints
    from kvstore.request_trace import Trace

LAST_VICTIMS: Final = 10_000
"""Of a tier, of which the effective TTL is the median."""
REACH_EVERY: Final = 500
"""Requests between two looks at what cannot be reached: each looks at every page."""


class Figures(msgspec.Struct, frozen=True):
    """What one pool did with one trace, from empty on. Ratios are 0 to 1."""

    policy: str
    capacity_pages: int
    nvme_pages: int
    admission: str
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
    """Pages that left the pool for want of room."""
    expirations: int
    """Pages whose time was up."""
    copies_evicted: int
    """Of pages that left memory for want of room, and stayed on a drive."""
    demotions_refused: int
    """Times that the admission policy refused pages of a run; the same may be asked for again."""
    promotions: int
    """Pages copied to memory."""
    ghost_hits: int
    """Pages stored again after the pool had let them go: hits that a larger one would have had."""
    effective_ttl_s_by_tier: dict[str, float]
    """How long the last pages that left a tier had not been used, median."""
    unreachable_share: float
    """Of the pages held, those that cannot be hit since one before them is missing; mean."""
    pages_written_by_tier: dict[str, int]
    """By puts and moves."""
    nvme_pages_per_s: float
    """Written, over the time of the trace."""


def replay(trace: Trace, pool: VirtualPool, hints: Iterable[Hints] = repeat(NO_HINTS)) -> Figures:
    """Serve every request of the trace by an empty pool: look up, then store what is missing.

    Answers are not stored, partial pages neither, and computing takes no time. `hints` has one for
    each request.
    """
    tally = _Tally(trace, pool)
    for request, hint in zip(trace.requests, hints, strict=False):
        # A put that has to wait is over before the next one comes.
        pool.advance(max(request.at_s, pool.now_s + PUT_WAIT_S))
        tally.serve(trace.full_pages(request), hint)
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
        self._unused_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LAST_VICTIMS))
        self._unreachable: list[float] = []

    def serve(self, pages: Sequence[int], hints: Hints) -> None:
        """One request."""
        pool = self._pool
        if pages:
            hits = pool.match(pages, hints)
            count = hits.total()
            missing = pages[count:]
            above = pages[count - 1] if count else None
            stored = pool.put(missing, above, hints) if missing else 0
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
        held = chain.from_iterable(each.values() for each in self._pool.held.values())
        share = unreachable_share(held, self._trace.parents)
        self._unreachable.append(share)

    def _note_freed(self) -> None:
        pool = self._pool
        for tier, page in pool.freed:
            # Of a chain longer than the pool, pages go within the request that brought them.
            self._unused_s[tier].append(pool.now_s - self._last_use_s.get(page, pool.now_s))
            if not pool.holds(page):
                self._gone.add(page)
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
        written = dict(sorted(pool.written.items()))
        return Figures(
            pool.setting.policy,
            pool.setting.capacity_pages,
            pool.setting.nvme_pages,
            pool.setting.admission,
            len(trace.requests),
            trace.tokens,
            sum(by_tier.values()),
            by_tier,
            self._touches,
            self._stored,
            self._refused,
            counters["pages_evicted"],
            counters["pages_expired"],
            counters[f"copies_evicted_{Tier.DRAM}"],
            counters[f"demotions_refused_{pool.master.core.admission.name}"],
            counters[f"moved_pages_{Tier.DRAM}"],
            self._ghost_hits,
            {tier: median(unused_s) for tier, unused_s in sorted(self._unused_s.items())},
            fmean(self._unreachable),
            written,
            written.get(Tier.NVME, 0) / (trace.seconds or 1.0),
        )
