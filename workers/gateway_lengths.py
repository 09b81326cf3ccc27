"""How long answers are likely to become: what admission counts on, and workers set room aside for.

Pure. `max_tokens` says how long an answer may be, and most are far shorter. Where one is longer
than was expected, a worker that lacks room for it hands a request on.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvstore import limits

KEPT: Final = 256
"""Answers that are looked at, the latest."""
LEAST: Final = 16
"""Of fewer nothing is concluded."""
SHARE: Final = 0.9
"""Of the answers that do not become longer than is expected."""


class AnswerLengths:
    """Those of one gateway."""

    def __init__(self) -> None:
        """None has ended yet."""
        self._lengths: deque[int] = deque(maxlen=KEPT)

    def ended(self, tokens: int) -> None:
        """An answer is complete, with so many tokens."""
        self._lengths.append(tokens)

    def expected(self, max_tokens: int) -> int:
        """Of an answer that may have so many."""
        if len(self._lengths) < LEAST:
            return max_tokens
        long = sorted(self._lengths)[int(len(self._lengths) * SHARE)]
        return min(max_tokens, max(1, long))


def left(expected: int, generated: int, max_tokens: int) -> int:
    """Of an answer with so many tokens, how many are likely to follow; one at least."""
    return min(max(expected - generated, limits.OVERGROWN_TOKENS), max_tokens - generated)
