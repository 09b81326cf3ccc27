"""How long to wait between tries: doubling, bounded, and half of it random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Delays of one party that tries again and again. Pure but for the injected randomness.

    The bound is short: a master that starts, or wins an election, is to be found at once, and to
    be refused a connection costs nobody anything. A peer may ask for more. Seed it differently in
    every process: those that lost the same master must not return in step.
    """

    def __init__(self, random: Random) -> None:
        """No failure yet."""
        self.failures = 0
        """Failed tries since the last success."""
        self._random = random

    def failed(self, wanted_s: float = 0.0) -> float:
        """Note a failure: seconds to wait before the next try. `wanted_s`: what the peer asked."""
        doublings = min(self.failures, 16)
        self.failures += 1
        longest = min(limits.RECONNECT_DELAY_MAX_S, limits.RECONNECT_DELAY_MIN_S * (1 << doublings))
        jittered = longest * (0.5 + 0.5 * self._random.random())
        return max(jittered, min(wanted_s, limits.RETRY_AFTER_MAX_S))

    def succeeded(self) -> None:
        """Start from the shortest delay again."""
        self.failures = 0
