"""What a caller, or the pool itself, believes of a chain's future. Every part may be absent.

Hints move pages forward or back in the order of eviction and admission; they are never a promise:
a page with the best hints may go, one with the worst may stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvstore.errors import BadValue
from kvstore.require import require

SECONDS_MAX: Final = 86_400.0
"""Longest time that a hint may name: what lies further ahead is no reason to keep a page."""
TURN_MAX: Final = 1 << 20
PRIORITY_MAX: Final = 4
"""Each step counts twice as much as the one below: beyond this a page is pinned, or not stored."""


class Hints(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Hints of one request for all pages of its chain. Times in seconds from the request on."""

    reuse_probability: float | None = None
    """Probability, 0 to 1, that this chain is used again."""
    session_closed: bool = False
    """The session says that it will not come back."""
    tool_call_s: float | None = None
    """A tool call is pending and is expected to return, with this chain, in so many seconds."""
    turn: int | None = None
    """Which request of its session this is, from 1."""
    priority: int = 0
    """How much a hit on this chain is worth: with each step twice as much, below 0 half as much."""

    @classmethod
    def of(cls, written: object) -> Hints:
        """Hints by their names, as they come with an engine's request.

        BadValue names the hint that there is not, or whose value is never right.
        """
        require("hints", written, Mapping, "hints by their names")
        assert isinstance(written, Mapping)
        for name in written:
            if name not in cls.__struct_fields__:
                raise BadValue("hints", name, f"one of {', '.join(cls.__struct_fields__)}")
        hints = cls(**written)
        hints.check()
        return hints

    def check(self) -> None:
        """Raise BadValue for the first field whose value is never right."""
        _check("reuse_probability", self.reuse_probability, 0.0, 1.0)
        require("session_closed", self.session_closed, bool, "True or False")
        _check("tool_call_s", self.tool_call_s, 0.0, SECONDS_MAX)
        if self.turn is not None:
            require("turn", self.turn, int, f"1 to {TURN_MAX}")
        _check("turn", self.turn, 1, TURN_MAX)
        require("priority", self.priority, int, f"{-PRIORITY_MAX} to {PRIORITY_MAX}")
        _check("priority", self.priority, -PRIORITY_MAX, PRIORITY_MAX)


def _check(field: str, value: float | None, least: float, most: float) -> None:
    want = f"{least:g} to {most:.15g}"
    if value is not None:
        require(field, value, int | float, want)
        if not least <= value <= most:
            raise BadValue(field, value, want)


NO_HINTS: Final = Hints()
