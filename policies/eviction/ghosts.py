"""What a policy remembers of pages that left: the numbers of their runs, oldest forgotten first.

Without it frequency is worth nothing: what is used again has often been away in between. Pages
that left together are one ghost; where only some of them come back, those do.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from kvstore.ids import KEY_BYTES
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.eviction.protocol import Entry

PAGES_MIN: Final = 1024
"""Remembered however small the pool is."""
GHOSTS_MAX: Final = 1 << 18
"""Bound of their number, about 80 MB with runs of single pages."""


class Ghost(msgspec.Struct, frozen=True, gc=False):
    """The numbers that pages left with."""

    keys: bytes
    heat: float
    touches: int
    touched_s: float

    @property
    def pages(self) -> int:
        """How many pages left together."""
        return len(self.keys) // KEY_BYTES


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
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()  # by the first page's key

    def __len__(self) -> int:
        return len(self._ghosts)

    def resize(self, pages: float) -> None:
        """Remember so many pages from now on, PAGES_MIN at least."""
        self.pages_max = max(PAGES_MIN, int(pages))
        self._forget()

    def keep(self, keys: bytes, entry: Entry) -> None:
        """Pages of a chain, with these packed keys, have left with the numbers of `entry`."""
        self._put(Ghost(keys, entry.heat, entry.touches, entry.touched_s))
        self._forget()

    def take(self, keys: bytes) -> Ghost | None:
        """What is remembered of the first of these pages and those that left with it, once.

        The ghost's keys are then a prefix of `keys`; pages beyond them are asked for apart.
        """
        ghost = self._ghosts.pop(keys[:KEY_BYTES], None)
        if ghost is None:
            return None
        self.pages -= ghost.pages
        common = _common_pages(ghost.keys, keys) * KEY_BYTES
        if common == len(ghost.keys):
            return ghost
        self._put(msgspec.structs.replace(ghost, keys=ghost.keys[common:]))
        return msgspec.structs.replace(ghost, keys=ghost.keys[:common])

    def _put(self, ghost: Ghost) -> None:
        key = ghost.keys[:KEY_BYTES]
        old = self._ghosts.pop(key, None)
        self.pages += ghost.pages - (old.pages if old else 0)
        self._ghosts[key] = ghost

    def _forget(self) -> None:
        while self.pages > self.pages_max or len(self._ghosts) > GHOSTS_MAX:
            self.pages -= self._ghosts.popitem(last=False)[1].pages


def _common_pages(some: bytes, other: bytes) -> int:
    """How many leading pages two chains share: those before the first that differ."""
    shared, differs = 0, min(len(some), len(other)) // KEY_BYTES + 1
    while differs - shared > 1:
        middle = (shared + differs) // 2
        if some[: middle * KEY_BYTES] == other[: middle * KEY_BYTES]:
            shared = middle
        else:
            differs = middle
    return shared
