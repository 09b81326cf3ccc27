"""What gateways and inference workers say to each other, and what of it is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.errors import BadValue
from workers.serve_messages import (
    DecodeAsk,
    Line,
    PrefillAsk,
    Sampling,
    check_tokens,
    decode,
    encode,
)

HOW = Sampling(0.0, 1.0, 0)
PREFILL = PrefillAsk(1, "r", (1, 2, 3), HOW, 10.0)
DECODING = DecodeAsk(1, 2, "r", 3, (1, 2, 3, 4), 2, HOW, 10.0, 1)
WRONG: list[tuple[PrefillAsk | DecodeAsk, str, object]] = [
    (PREFILL, "ticket", -1),
    (PREFILL, "ticket", "1"),
    (PREFILL, "request", 1),
    (PREFILL, "tokens", []),
    (PREFILL, "tokens", [1.5]),
    (PREFILL, "deadline_s", 0.0),
    (PREFILL, "sampling", {"temperature": -0.1, "top_p": 1.0, "seed": 0}),
    (PREFILL, "sampling", {"temperature": 1.0, "top_p": 0.0, "seed": 0}),
    (PREFILL, "sampling", {"temperature": 1.0, "top_p": 1.1, "seed": 0}),
    (PREFILL, "sampling", {"temperature": 1.0, "top_p": 1.0, "seed": -1}),
    (PREFILL, "sampling", {"temperature": 1.0, "top_p": 1.0, "seed": 1 << 63}),
    (DECODING, "route", -1),
    (DECODING, "prompt_tokens", 0),
    (DECODING, "tokens", []),
    (DECODING, "max_tokens", 0),
    (DECODING, "deadline_s", -1.0),
    (DECODING, "expected_tokens", 0),
]


def fields_of(ask: PrefillAsk | DecodeAsk) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(encode(ask))
    return found


@pytest.mark.parametrize("ask", [PREFILL, DECODING])
def test_what_is_right_comes_as_it_was_said(ask: PrefillAsk | DecodeAsk) -> None:
    assert decode(encode(ask), type(ask)) == ask
    check_tokens(ask, 5)


@pytest.mark.parametrize(("ask", "field", "value"), WRONG)
def test_a_wrong_field_is_named(ask: PrefillAsk | DecodeAsk, field: str, value: object) -> None:
    body = msgspec.json.encode(fields_of(ask) | {field: value})
    with pytest.raises(BadValue, match=rf"{type(ask).__name__}: .*\$\.{field}"):
        decode(body, type(ask))


@pytest.mark.parametrize("field", fields_of(DECODING))
def test_a_field_that_is_missing_is_named(field: str) -> None:
    fields = fields_of(DECODING)
    del fields[field]
    with pytest.raises(BadValue, match=f"`{field}`"):
        decode(msgspec.json.encode(fields), DecodeAsk)


@pytest.mark.parametrize("token", [-1, 5, 1 << 70])
def test_a_token_that_the_model_does_not_have_is_named(token: int) -> None:
    for ask in (PREFILL, DECODING):
        wrong = msgspec.structs.replace(ask, tokens=(*ask.tokens[1:], token))
        with pytest.raises(BadValue, match=f"tokens: got {token}, want 0 to 4"):
            check_tokens(wrong, 5)


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(5, 2), (2, 2), (3, 1)])
def test_an_answer_begins_behind_its_prompt_and_ends_in_time(
    prompt_tokens: int, max_tokens: int
) -> None:
    wrong = msgspec.structs.replace(DECODING, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    with pytest.raises(BadValue, match=f"prompt_tokens: got {prompt_tokens}"):
        check_tokens(wrong, 5)


def test_a_line_says_what_it_has_to() -> None:
    assert encode(Line(5)) == b'{"claim":5}'
    assert decode(encode(Line(5, 1, 7)), Line) == Line(5, 1, 7)
