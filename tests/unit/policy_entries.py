"""Runs of pages as policies see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.hints import NO_HINTS
from kvstore.ids import KEY_BYTES

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from policies.eviction.protocol import EvictionPolicy


class Pages:
    """Pages that were used together."""

    def __init__(self, keys: bytes) -> None:
        """Not in any pool yet."""
        self.keys = keys
        self.heat = self.bias = self.touched_s = 0.0
        self.touches = 0

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES


def chain(name: str, pages: int = 1) -> bytes:
    """Packed keys that no chain of another name has."""
    return b"".join(f"{name}{page}".encode().ljust(KEY_BYTES, b".") for page in range(pages))


def put(
    policy: EvictionPolicy,
    now_s: float,
    name: str = "chain",
    pages: int = 1,
    hints: Hints = NO_HINTS,
) -> Pages:
    """Pages that have just entered; with one past for all of them."""
    entry = Pages(chain(name, pages))
    assert policy.entered(entry, entry.keys, now_s, hints) == pages
    return entry


def evict(policy: EvictionPolicy, entry: Pages, now_s: float) -> None:
    """All of these pages leave."""
    policy.evicted(entry, entry.keys, now_s)
