"""Leases as readers were promised them: until when no byte of an extent may change (I9)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.limits import LEASE_MARGIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT_S: Final = 15.0
"""How long a lease that has ended is remembered: longer than any read that began under it."""


@dataclass
class Lease:
    """One leased extent."""

    offset: int
    size: int
    generation: int
    until_s: float
    """Grant plus TTL; the master adds the margin, the holder takes it off."""


class LeaseBook:
    """Every lease that a master has granted, by life of a segment."""

    def __init__(self) -> None:
        """None is granted."""
        self._by_life: dict[tuple[str, int], dict[tuple[int, int], Lease]] = defaultdict(dict)
        self._by_page: dict[tuple[bytes, int], Lease] = {}
        self.promised_s: dict[bytes, float] = defaultdict(float)
        """Until when some reader may believe that a page is leased, by key."""

    def grant(self, life: tuple[str, int], key: bytes, lease: Lease) -> None:
        """A lookup was answered with a lease."""
        held = self._by_life[life].setdefault((lease.offset, lease.generation), lease)
        held.until_s = max(held.until_s, lease.until_s)
        self._by_page[key, lease.generation] = held
        self.promised_s[key] = max(self.promised_s[key], lease.until_s)

    def renew(self, key: bytes, generation: int, until_s: float) -> None:
        """A renewal was answered with yes."""
        self.promised_s[key] = max(self.promised_s[key], until_s)
        held = self._by_page.get((key, generation))
        if held is not None:
            held.until_s = max(held.until_s, until_s)

    def _overlapping(self, life: tuple[str, int], offset: int, size: int) -> Iterator[Lease]:
        for lease in self._by_life[life].values():
            if lease.offset < offset + size and offset < lease.offset + lease.size:
                yield lease

    def running(self, life: tuple[str, int], offset: int, size: int, now: float) -> Lease | None:
        """A lease that a holder may still rely on, on any of these bytes."""
        for lease in self._overlapping(life, offset, size):
            if now < lease.until_s - LEASE_MARGIN_S:
                return lease
        return None

    def unreleased(self, life: tuple[str, int], offset: int, size: int, now: float) -> Lease | None:
        """A lease that the granter must still honour, its margin included."""
        for lease in self._overlapping(life, offset, size):
            if now < lease.until_s + LEASE_MARGIN_S:
                return lease
        return None

    def forget_ended(self, now: float) -> None:
        """Drop what is long over, to stay small."""
        for leases in self._by_life.values():
            for place in [p for p, each in leases.items() if each.until_s + KEPT_S < now]:
                del leases[place]
        pages = [p for p, each in self._by_page.items() if each.until_s + KEPT_S < now]
        for page in pages:
            del self._by_page[page]
