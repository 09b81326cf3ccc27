"""What the clients of a drill ask."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import pytest

from workers.drills.load import (
    CHATS,
    LONG_EVERY,
    LONG_TOKENS,
    QUESTIONS,
    Asked,
    Target,
    ask,
    question,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


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


class Link:
    """A connection on which that comes."""

    def __init__(self, status: int, *lines: bytes) -> None:
        self.status = status
        self.headers = http.client.HTTPMessage()
        self._lines = lines

    def request(self, *_: object) -> None:
        """Nobody reads it."""

    def getresponse(self) -> Link:
        return self

    def close(self) -> None:
        """Nothing."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._lines)


@pytest.mark.parametrize(
    ("link", "trouble"),
    [
        (Link(429), "TypeError"),
        (Link(200, b"data: {"), "JSONDecodeError"),
        (Link(200, b"data: {}"), "KeyError"),
        (Link(200, b'data: {"choices": []}'), "the stream ended without [DONE]"),
    ],
)
def test_what_is_no_answer_is_a_failed_one(
    monkeypatch: pytest.MonkeyPatch, link: Link, trouble: str
) -> None:
    monkeypatch.setattr(http.client, "HTTPConnection", lambda *_, **__: link)
    asked = Asked(question(1, 0), Target("gateway", "tiny"), 0.0)
    assert ask(asked) is None
    assert asked.trouble.startswith(trouble)
