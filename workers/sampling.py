"""The choice of the next token from a model's logits: the most likely one, or a draw.

A draw depends on the request's seed and the token's position alone (E3): a request that goes on in
another process, or beside other requests, draws the same.
"""

from __future__ import annotations

import random
from typing import Final

import torch

SEED_BITS: Final = 64
FEW_TOKENS: Final = 1024
"""Among so many the draw mostly is: sorting a whole vocabulary costs as much as a row's step."""


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
    tokens = _likeliest(odds, top_p) if top_p < 1 else torch.arange(len(odds), device=odds.device)
    sums = odds[tokens].cumsum(dim=-1)
    drawn = random.Random(position << SEED_BITS | seed).random() * sums[-1]
    return int(tokens[min(int((sums <= drawn).sum()), len(tokens) - 1)])


def _likeliest(odds: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest tokens that together have the probability `top_p`, most likely first."""
    tokens = torch.empty(0)
    for count in (FEW_TOKENS, len(odds)):
        falling, tokens = odds.topk(min(count, len(odds)))
        enough = int((falling.cumsum(dim=-1) < top_p).sum()) + 1
        if enough <= len(tokens):
            return tokens[:enough]
    return tokens
