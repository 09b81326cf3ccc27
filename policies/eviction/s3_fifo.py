"""S3-FIFO: a small queue that new pages must be used in, a main queue with second chances.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023). The queues are not
kept: a run carries the time at which it joined its queue, and the caller's candidates stand for
the heads. Good where most pages are used once and others very often; a conversation that comes
back once, minutes later, is demoted too soon. Takes no hints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from policies.eviction.ghosts import GhostParameters, Ghosts
from policies.eviction.protocol import EvictionPolicy, is_new_use, page_count

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.eviction.protocol import Entry

USES_MAX: Final = 3
MAIN: Final = 8.0
"""Added to the uses of a run in the main queue; both are kept in `bias`."""
OTHER_QUEUE_S: Final = 1e8
"""Longer than any two times of a clock lie apart."""


class S3FifoParameters(GhostParameters, frozen=True):
    """Parameters of `s3-fifo`. Its authors remember about as many pages as the main queue has."""

    ghost_factor: Annotated[float, Meta(ge=0, le=64)] = 0.9
    small_share: Annotated[float, Meta(ge=0.01, le=0.99)] = 0.1
    """Share of the pool's pages that the small queue may hold."""
    promote_uses: Annotated[int, Meta(ge=1, le=USES_MAX)] = 2
    """Uses after the put that move a run from the small queue to the main one."""


class S3Fifo(EvictionPolicy):
    """Two queues by time of joining; `heat` is that time, `bias` uses since and the queue."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = S3FifoParameters()
        self._ghosts = Ghosts()
        self._pages = 0
        self._small_pages = 0

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        """Into the main queue what is remembered, all else into the small one."""
        ghost = self._ghosts.take(keys)
        entry.heat = entry.touched_s = now_s
        entry.touches = 1
        entry.bias = 0.0
        if ghost is not None:
            entry.touches += ghost.touches
            entry.bias = MAIN
            return ghost.pages
        pages = page_count(keys)
        self._small_pages += pages
        return pages

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """Counts, and changes no order."""
        if is_new_use(entry, now_s) and entry.bias % MAIN < USES_MAX:
            entry.bias += 1.0

    def score(self, entry: Entry, now_s: float) -> float:
        """Oldest first, from the small queue while it is longer than its share."""
        goes_first = (entry.bias < MAIN) == self._is_small_full()
        return entry.heat - OTHER_QUEUE_S * goes_first

    def spares(self, entry: Entry, now_s: float) -> bool:
        """To the end of the main queue, what was used."""
        if entry.bias < MAIN:
            if entry.bias < self.parameters.promote_uses:
                return False
            self._leave_small(len(entry))
            entry.bias = MAIN
        elif entry.bias > MAIN:
            entry.bias -= 1.0
        else:
            return False
        entry.heat = now_s
        return True

    def evicted(self, entry: Entry, keys: bytes, now_s: float) -> None:
        """Remember what left the small queue."""
        if entry.bias < MAIN:
            self._ghosts.keep(keys, entry)
        if entry.bias < MAIN or self._is_small_full():
            # While that queue is long it is shorter than counted if nothing of it was there to
            # go: pages also leave by expiry and removal, of which nobody tells.
            self._leave_small(page_count(keys))

    def resize(self, pages: int) -> None:
        """Both queues and the ghosts are shares of it."""
        self._pages = pages
        self._small_pages = min(self._small_pages, pages)
        self._ghosts.resize(pages * self.parameters.ghost_factor)

    def _is_small_full(self) -> bool:
        return self._small_pages >= self.parameters.small_share * self._pages

    def _leave_small(self, pages: int) -> None:
        self._small_pages = max(0, self._small_pages - pages)
