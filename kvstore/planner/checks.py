"""Numbers that a plan can be made of: BadValue names the field, the value and what would do."""

from __future__ import annotations

from typing import Final

from kvstore.errors import BadValue
from kvstore.require import require

COUNT_MAX: Final = 1 << 40
LEAST: Final = 1e-9
"""With such bounds no product or quotient of a plan leaves the range of floats."""


def count(field: str, value: object) -> int:
    """A whole number from 1 on."""
    want = f"a whole number from 1 to {COUNT_MAX}"
    require(field, value, int, want)
    if not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
        raise BadValue(field, value, want)
    return value


def positive(field: str, value: float) -> float:
    """A number above 0; not NaN, not infinity."""
    return _within(field, value, LEAST)


def not_negative(field: str, value: float) -> float:
    """A number from 0 on; not NaN, not infinity."""
    return _within(field, value, 0)


def share(field: str, value: float) -> float:
    """Of a whole: from 0 to below 1, since something is always left to be computed."""
    want = "a number from 0 to below 1"
    require(field, value, int | float, want)
    if not 0 <= value < 1:
        raise BadValue(field, value, want)
    return value


def _within(field: str, value: float, least: float) -> float:
    want = f"a number from {least:g} to {COUNT_MAX}"
    require(field, value, int | float, want)
    # The comparison is also false for a NaN.
    if not least <= value <= COUNT_MAX:
        raise BadValue(field, value, want)
    return value
