"""Pins: pages that somebody wants to stay in the pool, in whatever tier, until a deadline.

Asked by engines for their tenant's pages and by operators for anybody's. A hard pin keeps pages
from eviction and expiry, and with all that is above them they count against the tenant's quota; a
soft one makes them go last under pressure. Neither outlives a removal, nor brings a page back that
is lost with its worker.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.messages.base import Message


class PinPages(Message, frozen=True, tag=68):
    """Keep these pages for `owner` -> PagesPinned. Safe to repeat: the last one counts.

    Every page is pinned that is readable, or none (OutOfSpace). An earlier pin of the same owner
    on one of them ends.
    """

    namespace: bytes
    keys: bytes
    owner: str
    """Any name: who may take the pin back, within the tenant."""
    hard: bool
    ttl_s: float
    """Until the pin ends by itself; infinity for never."""


class PagesPinned(Message, frozen=True, tag=69):
    """One byte a page: 1 pinned, durably; 0 not readable."""

    pinned: bytes


class UnpinPages(Message, frozen=True, tag=70):
    """Take pins of `owner` back, of these pages or, without keys, of all -> PagesUnpinned."""

    namespace: bytes
    keys: bytes
    owner: str


class PagesUnpinned(Message, frozen=True, tag=71):
    """How many of the pages the owner had pinned."""

    pages: int


class ListPins(Message, frozen=True, tag=72):
    """The pins of the caller's tenant, for an operator all -> PinList."""


class PinRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one PinPages has left. `left_s` is the time until it ends by itself."""

    namespace: bytes
    tenant: str
    model: str
    owner: str
    hard: bool
    left_s: float
    pages: int
    size_bytes: int
    """Of a hard pin with the pages that it holds above these."""


class PinList(Message, frozen=True, tag=73):
    """Oldest first."""

    pins: tuple[PinRow, ...]
