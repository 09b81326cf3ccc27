"""What OpenAI's clients ask for, checked: completions and chats become one kind of wish.

Pure. Owns which fields are taken and what is said of one that is wrong: BadValue naming field,
value and what would be right. A field that would change the answer and that we do not know is
refused rather than ignored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.hints import Hints
from kvstore.require import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.chat_formats import ChatFormat

COMPLETION_TOKENS: Final = 16
"""As OpenAI's."""
CHAT_TOKENS: Final = 256
TEMPERATURE: Final = 1.0
TEMPERATURE_MAX: Final = 2.0
STOPS_MAX: Final = 4
SEED_MAX: Final = (1 << 63) - 1
ROLES: Final = ("system", "developer", "user", "assistant")
HARMLESS: Final = frozenset({"user", "metadata", "store", "service_tier"})
"""Fields that change no token."""
NEUTRAL: Final[dict[str, object]] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
}
"""Fields of which only the value that does nothing is taken; null does nothing, too."""
COMMON: Final = frozenset(
    {"model", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "max_tokens"}
    | {"kvharbor_timings", "kvharbor_hints"}
)
COMPLETION_FIELDS: Final = COMMON | {"prompt"}
CHAT_FIELDS: Final = COMMON | {"messages", "max_completion_tokens"}


class Wish(msgspec.Struct, frozen=True):
    """One request, in tokens."""

    is_chat: bool
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    """None: any."""
    stop: tuple[str, ...]
    stream: bool
    usage_at_end: bool
    """A stream's last event tells the usage."""
    timings: bool
    hints: Hints | None = None
    """What the client knows of the chain's future."""


def completion(body: object, model: str, chat: ChatFormat, context_tokens: int) -> Wish:
    """The wish of POST /v1/completions. BadValue naming what is wrong."""
    fields = _fields(body, COMPLETION_FIELDS)
    tokens = _prompt(fields.get("prompt"), chat)
    return _wish(fields, model, tokens, context_tokens, is_chat=False)


def chat_completion(body: object, model: str, chat: ChatFormat, context_tokens: int) -> Wish:
    """The wish of POST /v1/chat/completions. BadValue naming what is wrong."""
    fields = _fields(body, CHAT_FIELDS)
    tokens = chat.conversation(_messages(fields.get("messages")))
    return _wish(fields, model, tokens, context_tokens, is_chat=True)


def _fields(body: object, known: frozenset[str]) -> dict[str, Any]:
    """The body's fields but for nulls, which mean what leaving them out means."""
    if not isinstance(body, dict):
        raise BadValue("body", body, "a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL:
            if value != NEUTRAL[name]:
                raise BadValue(name, value, f"{NEUTRAL[name]!r}: nothing else is offered")
        elif name not in known and name not in HARMLESS:
            raise BadValue("field", name, f"one of {', '.join(sorted(known))}")
    return given


def _wish(
    fields: Mapping[str, Any], model: str, tokens: list[int], context_tokens: int, *, is_chat: bool
) -> Wish:
    named = fields.get("model", model)
    if named != model:
        raise BadValue("model", named, f"{model!r}, the one that is served here")
    options = fields.get("stream_options", {})
    require("stream_options", options, dict, "an object")
    return Wish(
        is_chat=is_chat,
        tokens=tuple(tokens),
        max_tokens=_max_tokens(fields, len(tokens), context_tokens, is_chat=is_chat),
        temperature=_number(fields, "temperature", TEMPERATURE, 0, TEMPERATURE_MAX),
        top_p=_top_p(fields),
        seed=_seed(fields.get("seed")),
        stop=_stops(fields.get("stop", [])),
        stream=_flag(fields, "stream"),
        usage_at_end=_flag(options, "include_usage"),
        timings=_flag(fields, "kvharbor_timings"),
        hints=Hints.of(fields["kvharbor_hints"]) if "kvharbor_hints" in fields else None,
    )


def _prompt(prompt: object, chat: ChatFormat) -> list[int]:
    want = "text, or a list of tokens of the model's vocabulary, and not empty"
    if isinstance(prompt, str) and prompt:
        return chat.encode(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise BadValue("prompt", prompt, want)
    for token in prompt:
        if type(token) is not int or not 0 <= token < chat.vocabulary:
            raise BadValue("prompt", token, want)
    return prompt


def _messages(messages: object) -> list[tuple[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise BadValue("messages", messages, "a list of one message or more")
    return [_message(f"messages[{i}]", each) for i, each in enumerate(messages)]


def _message(field: str, message: object) -> tuple[str, str]:
    require(field, message, dict, "an object with role and content")
    assert isinstance(message, dict)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadValue(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_text_part(f"{field}.content", part) for part in content)
    require(f"{field}.content", content, str, "text, or a list of text parts")
    return ("system" if role == "developer" else str(role)), str(content)


def _text_part(field: str, part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise BadValue(field, part, 'parts as {"type": "text", "text": "..."}')


def _max_tokens(
    fields: Mapping[str, Any], prompt_tokens: int, context_tokens: int, *, is_chat: bool
) -> int:
    room = context_tokens - prompt_tokens
    if room < 1:
        field = "messages" if is_chat else "prompt"
        raise BadValue(field, f"{prompt_tokens} tokens", f"fewer than {context_tokens} tokens")
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    default = min(room, CHAT_TOKENS if is_chat else COMPLETION_TOKENS)
    value = fields.get(name, default)
    want = f"1 to {room}: what the prompt's {prompt_tokens} tokens leave of {context_tokens}"
    require(name, value, int, want)
    if not 1 <= value <= room:
        raise BadValue(name, value, want)
    return int(value)


def _number(
    fields: Mapping[str, Any], name: str, default: float, lowest: float, highest: float
) -> float:
    value = fields.get(name, default)
    want = f"a number from {lowest} to {highest}"
    require(name, value, int | float, want)
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise BadValue(name, value, want)
    return float(value)


def _top_p(fields: Mapping[str, Any]) -> float:
    value = _number(fields, "top_p", 1.0, 0, 1)
    if value == 0:
        raise BadValue("top_p", value, "above 0, at most 1")
    return value


def _seed(seed: object) -> int | None:
    if seed is None:
        return None
    want = f"an integer from 0 to {SEED_MAX}"
    require("seed", seed, int, want)
    assert isinstance(seed, int)
    if not 0 <= seed <= SEED_MAX:
        raise BadValue("seed", seed, want)
    return seed


def _stops(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    want = f"text, or a list of at most {STOPS_MAX}, none empty"
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise BadValue("stop", stop, want)
    if not all(isinstance(each, str) and each for each in stops):
        raise BadValue("stop", stop, want)
    return tuple(stops)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    require(name, value, bool, "true or false")
    return bool(value)
