"""One answer put together from workers that take turns, die and are fenced."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.errors import Fenced, MalformedMessage
from workers.gateway_merge import Answer
from workers.serve_messages import Line

END = 99


def test_tokens_count_once_whoever_sends_them() -> None:
    answer = Answer(4, END)
    assert answer.begin(10)
    assert not answer.begin(10)
    assert answer.hear(Line(5, 1, 11))
    assert not answer.hear(Line(6, 0, 10))
    assert not answer.hear(Line(6, 1, 11))
    assert answer.hear(Line(6, 2, 12))
    assert (answer.tokens, answer.claim, answer.finish) == ([10, 11, 12], 6, "")
    assert answer.hear(Line(6, 3, 13))
    assert answer.finish == "length"


def test_a_lower_claim_is_not_heard() -> None:
    answer = Answer(4, END)
    answer.begin(10)
    answer.hear(Line(6))
    with pytest.raises(Fenced):
        answer.hear(Line(5, 1, 11))
    assert answer.tokens == [10]


def test_a_token_that_is_left_out_is_noticed() -> None:
    answer = Answer(4, END)
    answer.begin(10)
    with pytest.raises(MalformedMessage, match="token 2"):
        answer.hear(Line(6, 2, 12))
    assert answer.tokens == [10]


def test_the_end_token_ends_it() -> None:
    answer = Answer(4, END)
    answer.begin(END)
    assert answer.finish == "stop"


def test_any_turns_give_the_same_answer() -> None:
    for seed in range(200):
        dice = Random(seed)
        answer, wanted, claim = Answer(8, END), list(range(20, 28)), 0
        answer.begin(wanted[0])
        while not answer.finish:
            claim += dice.randint(1, 3)
            first = dice.randint(0, len(answer.tokens))
            for index in range(first, dice.randint(first, 8)):
                answer.hear(Line(claim, index, wanted[index]))
        assert answer.tokens == wanted, seed
