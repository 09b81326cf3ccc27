"""What a call's arguments must be, checked before anything is sent. Pure."""

from __future__ import annotations

from operator import index
from struct import Struct
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.namespace import check_part_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.locations import Locations
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.page import PageChain

_KEY: Final = Struct(f"{KEY_BYTES}s")


def part_size(opened: OpenedNamespace, part: int, size_bytes: int | None) -> int:
    """Bytes of a part: the layout's, or the caller's where a namespace has no layout.

    BadValue, or LayoutMismatch with both numbers.
    """
    namespace = opened.namespace
    if size_bytes is None:
        if namespace.is_opaque:
            raise BadValue("size_bytes", size_bytes, "the objects' size: this namespace is opaque")
        if not 0 <= part < len(namespace.parts):
            raise BadValue("part", part, f"0 to {len(namespace.parts) - 1}")
        return namespace.parts[part].size_bytes
    if not isinstance(size_bytes, int):  # no master decodes it, and says so by hanging up
        raise BadValue("size_bytes", size_bytes, "a whole number")
    check_part_sizes(namespace, [part], [size_bytes])
    return size_bytes


def check_put(chain: PageChain, ttl_s: float | None) -> None:
    """A put's pages are distinct, its wishes within the limits."""
    pages = len(chain)
    if pages > 1 and len(set(_KEY.iter_unpack(chain.packed))) != pages:
        raise BadValue("chain", chain, "distinct pages")
    if ttl_s is not None and not limits.PAGE_TTL_MIN_S <= ttl_s <= limits.PAGE_TTL_MAX_S:
        raise BadValue("ttl_s", ttl_s, f"{limits.PAGE_TTL_MIN_S} to {limits.PAGE_TTL_MAX_S}")


def check_offsets(offsets: Sequence[int], pages: int) -> tuple[int, ...]:
    """One offset a page."""
    if len(offsets) != pages:
        raise BadValue("offsets", len(offsets), f"one for each of {pages} pages")
    return _whole(offsets)


def _whole(offsets: Sequence[int]) -> tuple[int, ...]:
    """As plain integers: others would fail in mid-transfer, and leave a put's plans open."""
    try:
        return tuple(map(index, offsets))
    except TypeError as error:
        raise BadValue("offsets", offsets, "whole numbers") from error


def check_timeout(timeout_s: float) -> float:
    """A deadline that some clock can hold."""
    if not 0 < timeout_s <= limits.CALL_TIMEOUT_MAX_S:
        raise BadValue("timeout_s", timeout_s, f"more than 0, up to {limits.CALL_TIMEOUT_MAX_S}")
    return timeout_s


def check_read(locations: Locations, part: int, offsets: Sequence[int]) -> tuple[int, ...]:
    """At most one offset for each located page, of a part whose places were asked for."""
    namespace = locations.opened.namespace
    parts = 1 if namespace.is_opaque else len(namespace.parts)
    if not 0 <= part < parts or (locations.parts and part not in locations.parts):
        raise BadValue("part", part, f"one of {locations.parts or f'0 to {parts - 1}'}")
    if len(offsets) > locations.pages:
        raise BadValue("offsets", len(offsets), f"at most {locations.pages}, the located pages")
    return _whole(offsets)
