"""What an eviction policy decides: scores. The caller finds victims and obeys leases and leaves.

The caller keeps a policy's four numbers with each run of pages, hands them in with every
notification and otherwise lets them be: a run that is split gives both halves the same numbers.
It, not the policy, sees to it that nothing leased, pinned or half written goes, and that tails go
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from kvstore.ids import KEY_BYTES

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.parameters import Parameters

SAME_USE_S: Final = 1.0
"""Accesses within so many seconds of one that counted are the same use.

What follows at once says nothing of later (O'Neil et al., "The LRU-K page replacement algorithm",
SIGMOD 1993, call it the correlated reference period); agents do come back within seconds.
"""
SAME_REQUEST_S: Final = 10.0
"""For so many seconds accesses may be of one request, which looks pages up, puts what follows and
has a decode worker read it all again: what it hinted at first stands for all of them."""


class Entry(Protocol):
    """A run of pages as a policy sees it. Only the policy writes these."""

    heat: float
    """Whatever the policy needs; most keep what they order by."""
    bias: float
    """Another such number: what hints or a queue add to the order until the next use."""
    touches: int
    """Uses, as far as they are remembered; the put is the first. Admission reads them."""
    touched_s: float
    """Time of the last use that counted (see `SAME_USE_S`)."""

    def __len__(self) -> int:
        """How many pages."""
        ...


class EvictionPolicy(Protocol):
    """Order of runs of pages; the lowest score goes first. Times in seconds of a monotonic clock.

    Told of what happens, it proposes; it reads no clock and sees no page. One pool, one policy:
    what it learns is state of its own.
    """

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        """Pages of a chain, with these packed keys, were just put; sets the numbers of `entry`.

        Returns for how many of the leading pages they hold, at least 1: where the past of the
        pages differs the caller asks again for the rest. The length of `entry` says nothing yet.
        """
        ...

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """All pages of `entry` were used again."""
        ...

    def hinted(self, _entry: Entry, _now_s: float, _hints: Hints) -> None:
        """Its future was told, without a use; a policy that takes no hints lets it be."""
        return

    def score(self, entry: Entry, now_s: float) -> float:
        """Where it stands now. Asked for candidates only, so that it may depend on the time."""
        ...

    def spares(self, _entry: Entry, _now_s: float) -> bool:
        """Whether the chosen victim is moved on in the order instead (and was, if so)."""
        return False

    def reuse_probability(self, _entry: Entry, _now_s: float) -> float | None:
        """How likely another use is, by what is known; None where nothing is."""
        return None

    def evicted(self, entry: Entry, keys: bytes, now_s: float) -> None:
        """The last pages of `entry`, with these packed keys, left; they may come back."""
        return

    def resize(self, pages: int) -> None:
        """So many pages are in the pool now: what is remembered of others is bounded by it."""
        return


def page_count(keys: bytes) -> int:
    """How many pages these packed keys name."""
    return len(keys) // KEY_BYTES


def is_new_use(entry: Entry, now_s: float, after_s: float = SAME_USE_S) -> bool:
    """Whether an access now counts as a use of its own; if so it is counted."""
    if now_s - entry.touched_s < after_s:
        return False
    entry.touches += 1
    entry.touched_s = now_s
    return True
