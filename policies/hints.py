"""What a caller, or the pool itself, believes of a chain's future. Every part may be absent.

Hints move pages forward or back in the order of eviction and admission; they are never a promise:
a page with the best hints may go, one with the worst may stay.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.errors import BadValue

SECONDS_MAX: Final = 86_400.0
"""Longest time that a hint may name: what lies further ahead is no reason to keep a page."""
TURN_MAX: Final = 1 << 20


class Hints(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Hints of one request for all pages of its chain. Times in seconds from the request on."""

    reuse_probability: float | None = None
    """Probability, 0 to 1, that this chain is used again."""
    session_closed: bool = False
    """The session says that it will not come back."""
    tool_call_s: float | None = None
    """A tool call is pending and is expected to return, with this chain, in so many seconds."""
    turn: int | None = None
    """Which request of its session this is, from 1."""

    def check(self) -> None:
        """Raise BadValue for the first field whose value is never right."""
        chance = self.reuse_probability
        if chance is not None and not 0.0 <= chance <= 1.0:
            raise BadValue("reuse_probability", chance, "0 to 1")
        pending_s = self.tool_call_s
        if pending_s is not None and not 0.0 <= pending_s <= SECONDS_MAX:
            raise BadValue("tool_call_s", pending_s, f"0 to {SECONDS_MAX:g} seconds")
        if self.turn is not None and not 1 <= self.turn <= TURN_MAX:
            raise BadValue("turn", self.turn, f"1 to {TURN_MAX}")


NO_HINTS: Final = Hints()
