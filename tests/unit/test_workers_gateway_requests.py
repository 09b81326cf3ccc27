"""What OpenAI's clients may ask a gateway for, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import BadValue
from kvstore.hints import Hints
from workers.chat_formats import ASSISTANT, END, USER, VOCABULARY, ByteChat
from workers.gateway_requests import Wish, chat_completion, completion

MODEL = "m"
CONTEXT = 100
CHAT = ByteChat()


def asked(**fields: object) -> Wish:
    return completion({"prompt": "hello", **fields}, MODEL, CHAT, CONTEXT)


def chatted(*messages: object, **fields: object) -> Wish:
    return chat_completion({"messages": list(messages), **fields}, MODEL, CHAT, CONTEXT)


def test_a_plain_completion_has_openais_defaults() -> None:
    assert asked() == Wish(
        is_chat=False, tokens=tuple(b"hello"), max_tokens=16, temperature=1.0, top_p=1.0,
        seed=None, stop=(), stream=False, usage_at_end=False, timings=False,
    )  # fmt: skip


def test_every_field_of_a_completion_is_heard() -> None:
    wish = asked(
        model=MODEL, prompt=[1, 2, 3], max_tokens=7, temperature=0, top_p=0.5, seed=9,
        stop=["a", "b"], stream=True, stream_options={"include_usage": True},
        kvharbor_timings=True, kvharbor_hints={"priority": 2}, user="me", n=1, logit_bias=None,
    )  # fmt: skip
    assert wish == Wish(
        is_chat=False, tokens=(1, 2, 3), max_tokens=7, temperature=0.0, top_p=0.5, seed=9,
        stop=("a", "b"), stream=True, usage_at_end=True, timings=True, hints=Hints(priority=2),
    )  # fmt: skip


def test_a_chat_is_tokenised_by_the_models_format() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    wish = chatted(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "d"},
        max_completion_tokens=3,
        stop="x",
    )
    a, b, c, d = b"abcd"
    said = (USER, a, END, ASSISTANT, b, c, END, USER, d, END, ASSISTANT)
    assert (wish.is_chat, wish.tokens, wish.max_tokens, wish.stop) == (True, said, 3, ("x",))


def test_an_answer_has_at_most_what_the_context_leaves() -> None:
    assert asked(prompt=[1] * 90).max_tokens == 10
    assert chatted({"role": "user", "content": "a"}).max_tokens == CONTEXT - 4
    assert asked(prompt=[1] * 90, max_tokens=10).max_tokens == 10


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ["two", "prompts"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [VOCABULARY]}),
    ("prompt", {"prompt": [1] * CONTEXT}),
    ("model", {"model": "another"}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 96}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 1 << 63}),
    ("seed", {"seed": 1.5}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["a"] * 5}),
    ("stop", {"stop": 3}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": True}),
    ("include_usage", {"stream_options": {"include_usage": 1}}),
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": 5}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("field", {"tools": []}),
    ("hints", {"kvharbor_hints": "important"}),
    ("hints", {"kvharbor_hints": {"urgency": 1}}),
    ("priority", {"kvharbor_hints": {"priority": 9}}),
]


@pytest.mark.parametrize(("field", "fields"), WRONG)
def test_a_wrong_field_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadValue) as caught:
        asked(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages", []),
        ("messages[0]", ["hello"]),
        ("messages[0].role", [{"content": "hello"}]),
        ("messages[0].role", [{"role": "tool", "content": "hello"}]),
        ("messages[1].content", [{"role": "user", "content": "a"}, {"role": "assistant"}]),
        ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", [{"role": "user", "content": "a" * CONTEXT}]),
    ],
)
def test_a_wrong_message_is_named(field: str, messages: list[object]) -> None:
    with pytest.raises(BadValue) as caught:
        chatted(*messages)
    assert caught.value.field == field


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(BadValue, match="body"):
        completion(body, MODEL, CHAT, CONTEXT)
