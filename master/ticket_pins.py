"""Pages that tickets hold: they stay as those that are pinned hard, for as long as a ticket wants.

In memory only, by key: whoever presents a ticket to the next master pins its pages anew. They
count against no tenant's pin_quota, and no request of a client ends them; what bounds them is the
staging budget and TICKET_PAGES_MAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.ids import KEY_BYTES
from master.packed import split_keys

if TYPE_CHECKING:
    from collections.abc import Mapping


class TicketPins:
    """How many tickets hold each page."""

    __slots__ = ("_by_page", "pages")

    def __init__(self) -> None:
        """Start with none."""
        self._by_page: dict[int, dict[bytes, int]] = {}
        self.pages = 0
        """Held, each as often as tickets hold it."""

    def of(self, namespace: int) -> Mapping[bytes, int]:
        """Pages held in the namespace of this ordinal, and by how many tickets."""
        return self._by_page.get(namespace, {})

    def has_room(self, keys: bytes) -> bool:
        """Whether one ticket more may hold these pages (I7)."""
        return self.pages + len(keys) // KEY_BYTES <= limits.TICKET_PAGES_MAX

    def hold(self, namespace: int, keys: bytes) -> None:
        """One ticket more holds these pages, whether they are there yet or not."""
        split = split_keys(keys)
        if not split:  # a prompt shorter than a page
            return
        held = self._by_page.setdefault(namespace, {})
        for key in split:
            held[key] = held.get(key, 0) + 1
        self.pages += len(split)

    def let_go(self, namespace: int, keys: bytes) -> None:
        """One that held them holds them no longer."""
        split = split_keys(keys)
        if not split:
            return
        held = self._by_page[namespace]
        for key in split:
            left = held[key] - 1
            if left:
                held[key] = left
            else:
                del held[key]
        if not held:
            del self._by_page[namespace]
        self.pages -= len(split)
