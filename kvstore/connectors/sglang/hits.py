"""Prefixes that can be restored, from which pages of each kind are there. Pure.

A prefix needs its KV pages from the first on, and of each other kind all of them, or those of a
window that ends with it. Windows make the lengths sparse: each is told, not the longest alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


class Kind(NamedTuple):
    """What is there of one kind of pages beside KV."""

    name: str
    there: Sequence[bool]
    window: int
    """How many last pages a prefix needs of it; 0 for all."""


def leading(there: Sequence[bool]) -> int:
    """How many are there from the first on."""
    return next((i for i, each in enumerate(there) if not each), len(there))


def lengths(pages: int, kind: Kind) -> list[int]:
    """Prefixes of up to so many pages for which there is enough of the kind, in pages."""
    if not kind.window:
        return list(range(1, min(pages, leading(kind.there)) + 1))
    found: list[int] = []
    run = 0
    for length in range(1, pages + 1):
        run = run + 1 if kind.there[length - 1] else 0
        if run >= min(kind.window, length):
            found.append(length)
    return found


class Restorable(NamedTuple):
    """What can be restored of a prefix."""

    lengths: list[int]
    """In pages, ascending; for each, all kinds are there."""
    longest: dict[str, int]
    """Of each kind by itself, where there is any."""


def restorable(kv_name: str, kv: Sequence[bool], kinds: Sequence[Kind]) -> Restorable:
    """Prefixes that all kinds can be restored for."""
    pages = leading(kv)
    left = set(range(1, pages + 1))
    longest = {kv_name: pages}
    for kind in kinds:
        own = lengths(pages, kind)
        longest[kind.name] = own[-1] if own else 0
        left &= set(own)
    return Restorable(sorted(left), {name: most for name, most in longest.items() if most})
