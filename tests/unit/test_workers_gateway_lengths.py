"""How long answers are expected to be."""

from __future__ import annotations

import pytest

from kvstore import limits
from workers.gateway_lengths import KEPT, LEAST, AnswerLengths, left


def test_before_enough_have_ended_as_many_are_expected_as_may_come() -> None:
    lengths = AnswerLengths()
    for _ in range(LEAST - 1):
        lengths.ended(3)
        assert lengths.expected(500) == 500
    lengths.ended(3)
    assert lengths.expected(500) == 3
    assert lengths.expected(2) == 2


def test_nine_of_ten_answers_are_no_longer_and_old_ones_are_forgotten() -> None:
    lengths = AnswerLengths()
    for tokens in range(100):
        lengths.ended(tokens)
    assert lengths.expected(10**6) == 90
    for _ in range(KEPT):
        lengths.ended(7)
    assert lengths.expected(10**6) == 7
    for _ in range(KEPT):
        lengths.ended(0)
    assert lengths.expected(10**6) == 1


@pytest.mark.parametrize(
    ("expected", "generated", "most", "follow"),
    [
        (100, 0, 500, 100),
        (100, 10, 500, 90),
        (100, 99, 500, limits.OVERGROWN_TOKENS),
        (5, 500, 1000, limits.OVERGROWN_TOKENS),
        (5, 499, 500, 1),
        (500, 0, 500, 500),
    ],
)
def test_of_an_answer_that_is_longer_more_is_expected(
    expected: int, generated: int, most: int, follow: int
) -> None:
    assert left(expected, generated, most) == follow
