"""What a call's arguments must be, checked before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from struct import Struct
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.client.locations import Locations
from kvstore.client.namespaces import OpenedNamespace
from kvstore.errors import BadValue
from kvstore.hints import Hints
from kvstore.ids import KEY_BYTES
from kvstore.namespace import NAME_PART, NAME_PART_BYTES, check_part_sizes
from kvstore.page import PageChain
from kvstore.replica import check_tier
from kvstore.require import require, require_owner, require_replicas, require_ttl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.writes import PutWishes

LEASE_ID_MAX: Final = (1 << 63) - 1
_KEY: Final = Struct(f"{KEY_BYTES}s")


def part_number(part: int) -> int:
    """Any number of a part; what it may be depends on the namespace."""
    require("part", part, int, "a whole number")
    return part


def check_pin(owner: str, hard: bool, ttl_s: float) -> None:
    """Who pins how, and for how long."""
    require_owner(owner)
    require("hard", hard, bool, "True or False")
    require_ttl("ttl_s", ttl_s)


def part_size(opened: OpenedNamespace, part: int, size_bytes: int | None) -> int:
    """Bytes of a part: the layout's, or the caller's where a namespace has no layout.

    BadValue, or LayoutMismatch with both numbers.
    """
    part_number(part)
    namespace = opened.namespace
    if size_bytes is None:
        if namespace.is_opaque:
            raise BadValue("size_bytes", size_bytes, "the objects' size: this namespace is opaque")
        if not 0 <= part < len(namespace.parts):
            raise BadValue("part", part, f"0 to {len(namespace.parts) - 1}")
        return namespace.parts[part].size_bytes
    require("size_bytes", size_bytes, int, "a whole number")
    if namespace.keeps_names and part == NAME_PART:
        return NAME_PART_BYTES
    check_part_sizes(namespace, [part], [size_bytes])
    return size_bytes


def object_offsets(
    opened: OpenedNamespace, offsets: Sequence[int], name_offsets: Sequence[int] | None
) -> dict[int, Sequence[int]]:
    """Offsets by part: those of names are given where the namespace keeps them, and only there."""
    require("opened", opened, OpenedNamespace, "what `open_opaque` returned")
    if opened.namespace.keeps_names != (name_offsets is not None):
        want = "one for each object" if opened.namespace.keeps_names else "None: none are kept"
        raise BadValue("name_offsets", name_offsets, want)
    return {0: offsets} if name_offsets is None else {0: offsets, NAME_PART: name_offsets}


def check_put(opened: OpenedNamespace, chain: PageChain, wishes: PutWishes) -> None:
    """A put's pages are distinct, its wishes within the limits."""
    check_pages(opened, chain)
    require("wait", wishes.wait, bool, "True or False")
    pages = len(chain)
    if pages > 1 and len(set(_KEY.iter_unpack(chain.packed))) != pages:
        raise BadValue("chain", chain, "distinct pages")
    if wishes.ttl_s is not None:
        require_ttl("ttl_s", wishes.ttl_s)
    check_hints(wishes.hints)
    tier_name(wishes.tier)
    require_replicas("replicas", wishes.replicas)
    require("strict", wishes.strict, bool, "True or False")
    require("replicas_now", wishes.replicas_now, bool, "True or False")


def tier_name(tier: str) -> str:
    """The name of a tier, or none."""
    require("tier", tier, str, "the name of a tier")
    return check_tier(tier)


def check_hints(hints: Hints | None) -> None:
    """Hints whose values can be right, or none."""
    if hints is not None:
        require("hints", hints, Hints, "Hints")
        hints.check()


def check_query(
    opened: OpenedNamespace, chain: PageChain, parts: Sequence[int], lease: bool
) -> tuple[int, ...]:
    """The parts that a question is about; they are some of the namespace's."""
    check_pages(opened, chain)
    require("lease", lease, bool, "True or False")
    last = opened.namespace.parts_a_page - 1
    want = f"a list of 0 to {last}"
    require("parts", parts, Iterable, want)
    found = tuple(parts)
    for part in found:
        require("parts", part, int, want)
        if not 0 <= part <= last:
            raise BadValue("parts", part, want)
    return found


def check_lease_id(lease_id: int) -> None:
    """A number of 63 bits."""
    want = f"0 to {LEASE_ID_MAX}"
    require("lease_id", lease_id, int, want)
    if not 0 <= lease_id <= LEASE_ID_MAX:
        raise BadValue("lease_id", lease_id, want)


def check_pages(opened: OpenedNamespace, chain: PageChain) -> None:
    """A namespace and pages of it."""
    require("opened", opened, OpenedNamespace, "what `open` returned")
    require("chain", chain, PageChain, "a PageChain")


def texts(field: str, values: Sequence[str]) -> list[str]:
    """Several texts: one alone would count as a list of its letters."""
    want = "a list of texts"
    require(field, values, Iterable, want)
    if isinstance(values, str):
        raise BadValue(field, values, want)
    found = list(values)
    for each in found:
        require(field, each, str, want)
    return found


def master_addresses(masters: str | Sequence[str]) -> list[str]:
    """Addresses of masters, given as a list or as one text with commas between them."""
    return texts("masters", masters.split(",") if isinstance(masters, str) else masters)


def check_offsets(offsets: Sequence[int], pages: int) -> tuple[int, ...]:
    """One offset a page."""
    places = _whole(offsets)
    if len(places) != pages:
        raise BadValue("offsets", len(places), f"one for each of {pages} pages")
    return places


def _whole(offsets: Sequence[int]) -> tuple[int, ...]:
    """As plain integers: others would fail in mid-transfer, and leave a put's plans open."""
    try:
        return tuple(map(index, offsets))
    except TypeError as error:
        raise BadValue("offsets", offsets, "whole numbers") from error


def check_timeout(timeout_s: float) -> float:
    """A deadline that some clock can hold."""
    want = f"more than 0, up to {limits.CALL_TIMEOUT_MAX_S}"
    require("timeout_s", timeout_s, int | float, want)
    if not 0 < timeout_s <= limits.CALL_TIMEOUT_MAX_S:
        raise BadValue("timeout_s", timeout_s, want)
    return timeout_s


def check_read(locations: Locations, part: int, offsets: Sequence[int]) -> tuple[int, ...]:
    """At most one offset for each located page, of a part whose places were asked for."""
    _check_located(locations)
    part_number(part)
    last = locations.opened.namespace.parts_a_page - 1
    if not 0 <= part <= last or (locations.parts and part not in locations.parts):
        raise BadValue("part", part, f"one of {locations.parts or f'0 to {last}'}")
    places = _whole(offsets)
    if len(places) > locations.pages:
        raise BadValue("offsets", len(places), f"at most {locations.pages}, the located pages")
    return places


def view_places(locations: Locations, pages: int | None) -> range:
    """The pages to be viewed: as many as are told, or all that are located."""
    _check_located(locations)
    if pages is None:
        return range(locations.pages)
    want = f"0 to {locations.pages}, the located pages"
    require("pages", pages, int, want)
    if not 0 <= pages <= locations.pages:
        raise BadValue("pages", pages, want)
    return range(pages)


def _check_located(locations: Locations) -> None:
    require("locations", locations, Locations, "what a lookup returned")
