"""Types that values of a caller must have, for callers that no type checker has seen.

Pure. A wrong type that is let through travels to a peer, which hangs up without naming it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from types import UnionType


def require(field: str, value: object, kind: type | UnionType, want: str) -> None:
    """BadValue unless `value` is of that type; True and False are no numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadValue(field, value, want)


def require_ttl(field: str, ttl_s: float) -> None:
    """BadValue unless pages, or pins, may live so many seconds; infinity is for ever."""
    want = f"{limits.PAGE_TTL_MIN_S} to {limits.PAGE_TTL_MAX_S} seconds, or inf"
    require(field, ttl_s, int | float, want)
    if not limits.PAGE_TTL_MIN_S <= ttl_s <= limits.PAGE_TTL_MAX_S and ttl_s != inf:
        raise BadValue(field, ttl_s, want)


def require_replicas(field: str, replicas: int) -> None:
    """BadValue unless so many can be asked for; 0 asks for no number."""
    want = f"1 to {limits.REPLICAS_MAX}, or 0 for as many as usual"
    require(field, replicas, int, want)
    if not 0 <= replicas <= limits.REPLICAS_MAX:
        raise BadValue(field, replicas, want)


def require_owner(owner: str) -> None:
    """BadValue unless pins can be held, listed and taken back by this name."""
    require_text("owner", owner)
    if not owner.isprintable() or not owner.strip():
        raise BadValue("owner", owner, "a name that can be printed")


def require_text(field: str, value: str, bytes_max: int = limits.NAME_BYTES_MAX) -> None:
    """BadValue unless `value` is text of at most so many bytes of UTF-8."""
    want = f"text of at most {bytes_max} bytes"
    require(field, value, str, want)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise BadValue(field, value, want) from error
    if size > bytes_max:
        raise BadValue(field, value, want)
