"""The choice of a token from logits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from workers.sampling import FEW_TOKENS, pick

LOGITS = torch.tensor([0.5, 0.2, 0.25, 0.05]).log()


def draws(count: int = 2000, temperature: float = 1.0, top_p: float = 1.0) -> Counter[int]:
    return Counter(
        pick(LOGITS, temperature=temperature, top_p=top_p, seed=3, position=i) for i in range(count)
    )


def test_without_temperature_the_most_likely_token_is_taken() -> None:
    assert draws(50, temperature=0.0) == {0: 50}


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    counts = draws()
    for token, odds in enumerate((0.5, 0.2, 0.25, 0.05)):
        assert counts[token] / 2000 == pytest.approx(odds, abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(0.01, {0}), (0.49, {0}), (0.7, {0, 2}), (0.9, {0, 1, 2})]
)
def test_only_the_most_likely_tokens_are_drawn(top_p: float, tokens: set[int]) -> None:
    assert set(draws(top_p=top_p)) == tokens


def test_more_tokens_than_are_looked_at_first_may_be_kept() -> None:
    flat = torch.zeros(4 * FEW_TOKENS)
    drawn = {pick(flat, temperature=1.0, top_p=0.5, seed=3, position=i) for i in range(4000)}
    assert FEW_TOKENS < len(drawn) <= 2 * FEW_TOKENS


def test_a_low_temperature_prefers_the_most_likely_token() -> None:
    assert draws(200, temperature=0.05)[0] == 200
    assert draws(temperature=100.0)[3] > 400


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    flat = torch.zeros(1000)

    def drawn(seed: int, position: int) -> int:
        return pick(flat, temperature=1.0, top_p=1.0, seed=seed, position=position)

    assert drawn(1, 2) == drawn(1, 2)
    assert len({drawn(1, 2), drawn(2, 1), drawn(1, 3), drawn(2, 2)}) == 4
