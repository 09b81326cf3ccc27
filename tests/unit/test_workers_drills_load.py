"""What the clients of a drill ask."""

from __future__ import annotations

from workers.drills.load import CHATS, LONG_EVERY, LONG_TOKENS, QUESTIONS, question


def test_questions_follow_from_the_seed() -> None:
    first, again, other = ([question(seed, i) for i in range(QUESTIONS)] for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == QUESTIONS


def test_questions_are_of_every_kind() -> None:
    asked = [question(7, number) for number in range(QUESTIONS)]
    assert len({each.prompt.partition(":")[0] for each in asked}) == CHATS
    assert {each.temperature for each in asked} == {0.0, 0.8}
    assert sum(each.max_tokens == LONG_TOKENS for each in asked) == QUESTIONS // LONG_EVERY
    # More than a page of 64 tokens is alike, and what follows is not.
    same = [each.prompt for each in asked if each.prompt.startswith("chat 0: ")]
    assert len({each[:100] for each in same}) == 1
    assert len(set(same)) == len(same)
