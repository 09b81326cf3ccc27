"""Runs of pages as policies see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.hints import NO_HINTS

if TYPE_CHECKING:
    from policies.eviction.protocol import EvictionPolicy
    from policies.hints import Hints


class Pages:
    """`pages` pages that were used together."""

    def __init__(self, key: bytes = b"key", pages: int = 1) -> None:
        """Not in any pool yet."""
        self.key = key
        self.pages = pages
        self.heat = self.bias = self.touched_s = 0.0
        self.touches = 0

    def __len__(self) -> int:
        return self.pages


def put(
    policy: EvictionPolicy,
    now_s: float,
    key: bytes = b"key",
    pages: int = 1,
    hints: Hints = NO_HINTS,
) -> Pages:
    """Pages that have just entered."""
    entry = Pages(key, pages)
    policy.entered(entry, key, pages, now_s, hints)
    return entry


def evict(policy: EvictionPolicy, entry: Pages, now_s: float) -> None:
    """All of these pages leave."""
    policy.evicted(entry, entry.key, entry.pages, now_s)
