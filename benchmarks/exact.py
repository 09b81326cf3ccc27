"""An eviction policy at its best: page by page, and always the page of lowest score among leaves.

The pool keeps runs of pages and looks at samples; what that costs in hits shows beside this. Time
stands still during a request, and only its own pages are safe.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import TYPE_CHECKING

from kvstore.hints import NO_HINTS
from kvstore.ids import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.hints import Hints
    from kvstore.request_trace import Trace
    from policies.eviction.protocol import EvictionPolicy


class Page:
    """One page that is held, as a policy sees it."""

    __slots__ = ("above", "below", "bias", "heat", "number", "stamp", "touched_s", "touches")

    def __init__(self, number: int, above: Page | None) -> None:
        """A page below another that is held, or at the root."""
        self.number = number
        self.above = above
        self.below = 0
        """Pages held right below."""
        self.stamp = 0
        """Number of its last use, which decides between equal scores."""
        self.heat = self.bias = 0.0
        self.touches = 0
        self.touched_s = 0.0

    def __len__(self) -> int:
        """It is one page."""
        return 1


class ExactPool:
    """Pages of one pool and who goes next."""

    def __init__(self, capacity_pages: int, policy: EvictionPolicy) -> None:
        """Start empty."""
        self.evictions = 0
        self._capacity = capacity_pages
        self._policy = policy
        self._held: dict[int, Page] = {}
        self._leaves: dict[int, Page] = {}
        self._stamps = 0

    def serve(self, chain: Sequence[int], now_s: float, hints: Hints = NO_HINTS) -> int:
        """One request for these pages from the root on; how many leading ones are hits."""
        found = [self._held[page] for page in chain if page in self._held]
        hits = len(found)  # without a hole: only leaves go
        chain = chain[: self._capacity]
        self._make_room(len(self._held) + len(chain) - hits - self._capacity, found, now_s)
        for number in chain[hits:]:
            above = found[-1] if found else None
            page = self._held[number] = self._leaves[number] = Page(number, above)
            if above is not None:
                above.below += 1
                self._leaves.pop(above.number, None)
            found.append(page)
        self._policy.resize(len(self._held))
        # From the end: of equal scores the older use goes first, and then a page is never older
        # than one below it.
        for i in range(len(found) - 1, -1, -1):
            page = found[i]
            if i < hits:
                self._policy.touched(page, now_s, hints)
            else:
                self._policy.entered(page, _key(page), now_s, hints)
            self._stamps += 1
            page.stamp = self._stamps
        return hits

    def _make_room(self, count: int, safe: Sequence[Page], now_s: float) -> None:
        """Evict so many pages; all leaves are asked anew, since scores may depend on the time."""
        if count <= 0:
            return
        score = self._policy.score
        spared = {page.number for page in safe}
        order = [
            (score(page, now_s), page.stamp, page)
            for page in self._leaves.values()
            if page.number not in spared
        ]
        heapify(order)
        while count > 0:
            page = heappop(order)[-1]
            if self._policy.spares(page, now_s):
                heappush(order, (score(page, now_s), page.stamp, page))
                continue
            self._evict(page, now_s)
            count -= 1
            above = page.above
            if above is not None and not above.below:
                self._leaves[above.number] = above
                if above.number not in spared:
                    heappush(order, (score(above, now_s), above.stamp, above))

    def _evict(self, page: Page, now_s: float) -> None:
        del self._held[page.number], self._leaves[page.number]
        self.evictions += 1
        self._policy.evicted(page, _key(page), now_s)
        if page.above is not None:
            page.above.below -= 1


def exact_hit_ratio(
    trace: Trace,
    capacity_pages: int,
    policy: EvictionPolicy,
    *,
    partial: bool = False,
    hints: Iterable[Hints] = repeat(NO_HINTS),
) -> float:
    """Token hit ratio, 0 to 1, from an empty pool.

    `partial` keeps partial last pages too; `hints` has one for each request.
    """
    pool = ExactPool(capacity_pages, policy)
    hit_tokens = 0
    for request, hint in zip(trace.requests, hints, strict=False):
        chain = request.pages if partial else trace.full_pages(request)
        hits = pool.serve(chain, request.at_s, hint)
        hit_tokens += min(hits * trace.page_tokens, request.tokens)
    return hit_tokens / (trace.tokens or 1)


def _key(page: Page) -> bytes:
    return page.number.to_bytes(KEY_BYTES, "little")
