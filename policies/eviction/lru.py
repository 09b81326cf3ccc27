"""Least recently used: what others are measured against. Takes no hints, remembers nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.eviction.protocol import EvictionPolicy, is_new_use, page_count
from policies.parameters import Parameters

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.eviction.protocol import Entry


class Lru(EvictionPolicy):
    """The score is the time of the last access."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        """The first access."""
        entry.bias = 0.0
        entry.touches = 1
        entry.heat = entry.touched_s = now_s
        return page_count(keys)

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        """Another one."""
        is_new_use(entry, now_s)
        entry.heat = now_s

    def score(self, entry: Entry, now_s: float) -> float:
        """Time of the last access."""
        return entry.heat
