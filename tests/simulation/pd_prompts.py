"""What simulated gateways ask, and the one right answer: each token follows from all before it."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Final

from tests.simulation.pages import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

STEMS: Final = 4
STEM_PAGES: Final = 5
FRESH_MAX: Final = 2 * PAGE_TOKENS
"""Tokens of a prompt that nobody else has."""


class Prompts:
    """Prompts of few pages, that begin alike."""

    def __init__(self, random: Random) -> None:
        """Draw the stems."""
        length = STEM_PAGES * PAGE_TOKENS
        self._stems = [_drawn(random, length) for _ in range(STEMS)]

    def draw(self, random: Random) -> tuple[int, ...]:
        """Some of a stem, then tokens of its own: one at least."""
        stem = random.choice(self._stems)
        shared = stem[: random.randint(0, len(stem))]
        return shared + _drawn(random, random.randint(1, FRESH_MAX))


def _drawn(random: Random, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(1 << 16) for _ in range(length))


def next_token(tokens: Sequence[int]) -> int:
    """What the model of the simulation says next."""
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=2).digest()
    return int.from_bytes(digest, "little")


def go_on(prompt: Sequence[int], generated: Sequence[int], count: int) -> tuple[int, ...]:
    """The generated tokens, and more of them until there are `count`."""
    tokens = [*prompt, *generated]
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])
