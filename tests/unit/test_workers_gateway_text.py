"""What of an answer's text is shown as its tokens come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gateway_text import AnswerText

if TYPE_CHECKING:
    from collections.abc import Sequence


class Utf8:
    """A token a byte of UTF-8, shown as decoders of real models show them."""

    end_token = 256
    vocabulary = 257

    def conversation(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return self.encode("".join(text for _, text in messages))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def shown(text: str, *stops: str) -> tuple[list[str], AnswerText]:
    answer = AnswerText(Utf8(), stops)
    pieces = []
    for token in text.encode():
        pieces.append(answer.add(token))
        if answer.is_stopped:
            return pieces, answer
    return [*pieces, answer.end()], answer


def test_a_character_is_shown_once_it_is_complete() -> None:
    pieces, _ = shown("aé€")
    assert pieces == ["a", "", "é", "", "", "€", ""]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "is_stopped"),
    [
        ("abc", ("bx",), "abc", False),
        ("abc", ("b",), "a", True),
        ("aabab", ("abab",), "a", True),
        ("one END two", ("END", "two"), "one ", True),
        ("abcab", ("abx",), "abcab", False),
        ("stop", ("stop",), "", True),
    ],
)
def test_text_ends_before_a_stop(
    text: str, stops: tuple[str, ...], expected: str, is_stopped: bool
) -> None:
    pieces, answer = shown(text, *stops)
    assert ("".join(pieces), answer.is_stopped) == (expected, is_stopped)


def test_nothing_follows_a_stop() -> None:
    pieces, answer = shown("ab", "b")
    assert [*pieces, answer.add(ord("c")), answer.end()] == ["a", "", "", ""]


@given(st.text("abé", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_what_was_shown_is_the_text_before_its_first_stop(text: str, stops: list[str]) -> None:
    pieces, _ = shown(text, *stops)
    # A stop counts as soon as it is complete, though another may begin before it.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    cut = text if not ends else text[: min(ends)]
    places = [cut.find(stop) for stop in stops if stop in cut]
    assert "".join(pieces) == (cut[: min(places)] if places else text)
