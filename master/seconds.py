"""Durations that peers name: a NaN or a negative one is refused before it reaches a clock."""

from __future__ import annotations

from kvstore.errors import BadValue


def check_seconds(field: str, value: float) -> None:
    """Raise BadValue unless `value` is a duration. Infinity is one; bounds are the caller's."""
    if not value >= 0.0:
        raise BadValue(field, value, "seconds, at least 0")
