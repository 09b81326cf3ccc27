"""What clients were told, and what that promises about every later answer.

Owns no opinion about how the pool works: only what was stored, removed and read, and when.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.record import Record


@dataclass(frozen=True)
class Place:
    """Where one part of a page was sealed, and when."""

    segment: str
    offset: int
    size_class: int
    part: int
    generation: int
    at_s: float


@dataclass
class PageHistory:
    """One page's past."""

    sealed: list[Place] = field(default_factory=list)
    stored_s: float | None = None
    """When a client was last told that the page is stored and visible."""
    remove_began_s: float = float("-inf")
    """When the last remove was first sent, whether or not it was answered."""
    removed_up_to: int = 0
    """Highest generation that an answered remove has taken out for good (I29)."""
    pins: dict[str, float] = field(default_factory=dict)
    """By owner: until when the page is pinned hard, as the owner was told."""
    versions: dict[int, None] = field(default_factory=dict)
    """Versions of a named object that clients have tried to store."""


class History:
    """All pages' pasts."""

    def __init__(self) -> None:
        """Nothing has happened."""
        self.pages: dict[bytes, PageHistory] = defaultdict(PageHistory)

    def sealed(self, segment: str, record: Record, at_s: float) -> None:
        """A worker has written a SEALED record."""
        place = Place(
            segment, record.offset, record.size_class, record.part, record.generation, at_s
        )
        self.pages[record.key].sealed.append(place)

    def put_begins(self, key: bytes, version: int) -> None:
        """A client tries to store these bytes."""
        self.pages[key].versions[version] = None

    def stored(self, key: bytes, at_s: float) -> None:
        """A client was told Stored(visible=True)."""
        self.pages[key].stored_s = at_s

    def pin_asked(self, keys: list[bytes], owner: str) -> None:
        """The master hears that an owner's pins of these pages are to be others, or none."""
        for page in [self.pages[key] for key in keys] if keys else self.pages.values():
            page.pins.pop(owner, None)

    def is_pinned(self, key: bytes, now_s: float) -> bool:
        """Whether somebody was told that the page stays."""
        return any(now_s < until_s for until_s in self.pages[key].pins.values())

    def remove_begins(self, key: bytes, at_s: float) -> None:
        """A client is about to ask for a removal."""
        self.pages[key].remove_began_s = at_s
        self.pages[key].pins.clear()

    def removed(self, key: bytes, began_s: float) -> None:
        """A removal that was first sent at `began_s` was answered.

        Whatever was sealed before it was sent is gone from now on.
        """
        page = self.pages[key]
        gone = (place.generation for place in page.sealed if place.at_s < began_s)
        page.removed_up_to = max([page.removed_up_to, *gone])
