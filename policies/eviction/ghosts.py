"""What a policy remembers of pages that left: the numbers of their runs, oldest forgotten first.

Without it frequency is worth nothing: what is used again has often been away in between. One
ghost stands for all pages that left together, and counts as many.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.eviction.protocol import Entry

PAGES_MIN: Final = 1024
"""Remembered however small the pool is."""
GHOSTS_MAX: Final = 1 << 18
"""Bound of their number, about 80 MB: a pool of a million pages in runs of 16 is below it."""


class Ghost(msgspec.Struct, frozen=True, gc=False):
    """The numbers that pages left with."""

    heat: float
    touches: int
    touched_s: float
    pages: int


class GhostParameters(Parameters, frozen=True):
    """What policies with a memory have in common."""

    ghost_factor: Annotated[float, msgspec.Meta(ge=0, le=64)] = 4.0
    """Pages remembered, as a multiple of those in the pool; 1 is too few, beyond 4 nothing more
    is gained."""


class Ghosts:
    """A bounded memory, first in, first out."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.pages = 0
        self.pages_max = PAGES_MIN
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def resize(self, pages: float) -> None:
        """Remember so many pages from now on, PAGES_MIN at least."""
        self.pages_max = max(PAGES_MIN, int(pages))
        self._forget()

    def keep(self, key: bytes, entry: Entry, pages: int) -> None:
        """`pages` pages from `key` on have left with the numbers of `entry`."""
        self.take(key)
        self._ghosts[key] = Ghost(entry.heat, entry.touches, entry.touched_s, pages)
        self.pages += pages
        self._forget()

    def take(self, key: bytes) -> Ghost | None:
        """What is remembered of `key`, once."""
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self.pages -= ghost.pages
        return ghost

    def _forget(self) -> None:
        while self.pages > self.pages_max or len(self._ghosts) > GHOSTS_MAX:
            self.pages -= self._ghosts.popitem(last=False)[1].pages
