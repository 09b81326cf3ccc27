"""The choice of the next token from a model's logits: the most likely one, or a draw.

A draw depends on the request's seed and the token's position alone: a request that goes on in
another process, or beside other requests, draws the same.
"""

from __future__ import annotations

import random
from typing import Final

import torch

SEED_BITS: Final = 64


def pick(
    logits: torch.Tensor, *, temperature: float, top_p: float, seed: int, position: int
) -> int:
    """The token after `logits` [vocabulary], at index `position` of its request's tokens.

    `temperature` 0 takes the most likely; else one is drawn among the most likely tokens that
    together have the probability `top_p`.
    """
    if temperature == 0:
        return int(logits.argmax())
    odds = torch.softmax(logits.double() / temperature, dim=-1)
    falling, tokens = odds.sort(descending=True, stable=True)
    sums = falling.cumsum(dim=-1)
    kept = int((sums < top_p * sums[-1]).sum()) + 1
    drawn = random.Random(position << SEED_BITS | seed).random() * sums[kept - 1]
    return int(tokens[min(int((sums <= drawn).sum()), kept - 1)])
