"""How long parts of pages are once they are encoded, learned from workers' answers.

So that pages that move to a drive are planned in extents which they fit. Must not know moves.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.segment import size_class_of

SIZES_MAX: Final = 4096
SIZES_WINDOW: Final = 64
"""Answers after which what was seen before them is forgotten."""


class _Seen(msgspec.Struct, eq=False):
    """The longest encoded pages: of this window and of the one before."""

    longest: int = 0
    before: int = 0
    answers: int = 0


class StoredSizes:
    """How long the parts of a namespace are once they are encoded."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._seen: dict[tuple[int, int], _Seen] = {}

    def size_class(self, namespace: int, part: int, part_bytes: int) -> int:
        """The class that lately would have held all of them; the part's own while none is known."""
        seen = self._seen.get((namespace, part))
        longest = part_bytes if seen is None else max(seen.longest, seen.before)
        return size_class_of(min(longest, part_bytes))

    def note(self, namespace: int, part: int, stored_bytes: int) -> None:
        """The longest page of a request took so much."""
        seen = self._seen.get((namespace, part))
        if seen is None:
            if len(self._seen) >= SIZES_MAX:  # I7: those seen longest are moved as they are
                del self._seen[next(iter(self._seen))]
            seen = self._seen[namespace, part] = _Seen()
        seen.longest = max(seen.longest, stored_bytes)
        seen.answers += 1
        if seen.answers % SIZES_WINDOW == 0:
            seen.before, seen.longest = seen.longest, 0
