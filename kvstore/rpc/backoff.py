"""How long to wait between tries: doubling, bounded, and half of it random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Delays of one party that tries again and again. Pure but for the injected randomness.

    Seed it differently in every process: peers that lost the same master must not return in step.
    """

    def __init__(self, random: Random, longest_s: float = limits.RECONNECT_DELAY_MAX_S) -> None:
        """No failure yet. `longest_s` bounds the delay, but not what the peer asks for."""
        self.failures = 0
        """Failed tries since the last success."""
        self._random = random
        self._longest_s = longest_s

    def failed(self, wanted_s: float = 0.0) -> float:
        """Note a failure: seconds to wait before the next try. `wanted_s`: what the peer asked."""
        doublings = min(self.failures, 16)
        self.failures += 1
        longest = min(self._longest_s, limits.RECONNECT_DELAY_MIN_S * (1 << doublings))
        jittered = longest * (0.5 + 0.5 * self._random.random())
        return max(jittered, min(wanted_s, limits.RECONNECT_DELAY_MAX_S))

    def succeeded(self) -> None:
        """Start from the shortest delay again."""
        self.failures = 0
