"""Answers and errors in the form that OpenAI's clients read. Pure: dictionaries, and SSE events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvstore.errors import (
    BadValue,
    DeadlineExceeded,
    Fenced,
    KVStoreError,
    OutOfSpace,
    StaleEpoch,
    Throttled,
    Unavailable,
    UnknownTicket,
)

if TYPE_CHECKING:
    from workers.gateway_relay import Passage, Stages
    from workers.gateway_requests import Wish

DONE: Final = b"data: [DONE]\n\n"
BAD_REQUEST: Final = 400
TOO_MANY: Final = 429
INTERNAL: Final = 500
UNAVAILABLE: Final = 503
TIMEOUT: Final = 504


class Answering:
    """The bodies of one answer."""

    def __init__(self, wish: Wish, request_id: str, model: str, created: int) -> None:
        """`created` is seconds since 1970, for the reader."""
        self._wish = wish
        kind = "chat.completion" if wish.is_chat else "text_completion"
        self._kind = kind
        prefix = "chatcmpl" if wish.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": created, "model": model}

    def whole(self, text: str, finish: str, passage: Passage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        said: dict[str, Any] = {"text": text}
        if self._wish.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return {
            **self._head, "object": self._kind, "choices": [choice],
            "usage": usage(self._wish, passage),
        }  # fmt: skip

    def chunk(self, text: str, finish: str | None = None, *, is_first: bool = False) -> bytes:
        """An event with a piece of the text."""
        said: dict[str, Any] = {"text": text}
        if self._wish.is_chat:
            role = {"role": "assistant"} if is_first else {}
            said = {"delta": {**role, **({"content": text} if text or is_first else {})}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return event({**self._head, "object": self._event_kind, "choices": [choice]})

    def usage_chunk(self, passage: Passage) -> bytes:
        """The event with the usage, which has no choices."""
        body = {**self._head, "object": self._event_kind, "choices": []}
        return event({**body, "usage": usage(self._wish, passage)})

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self._wish.is_chat else self._kind


def usage(wish: Wish, passage: Passage) -> dict[str, Any]:
    """Token counts; and where the time went, if that was asked for."""
    prompt, answer = len(wish.tokens), len(passage.answer.tokens)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": passage.stages.reused_tokens},
    }
    return found | ({"kvharbor_timings": _rounded(passage.stages)} if wish.timings else {})


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def status_of(error: KVStoreError) -> int:
    """The HTTP status of what keeps a request from being answered.

    UNAVAILABLE is for what a request that begins anew may be spared: also for those that the pool
    has lost, with a master or to somebody else.
    """
    for kind, status in (
        (BadValue, BAD_REQUEST),
        (Throttled, TOO_MANY),
        (DeadlineExceeded, TIMEOUT),
        (Unavailable, UNAVAILABLE),
        (OutOfSpace, UNAVAILABLE),
        (StaleEpoch, UNAVAILABLE),
        (Fenced, UNAVAILABLE),
        (UnknownTicket, UNAVAILABLE),
    ):
        if isinstance(error, kind):
            return status
    return INTERNAL


def error_body(error: KVStoreError) -> dict[str, Any]:
    """OpenAI's form of an error; `param` is the field that was wrong."""
    kinds = {BAD_REQUEST: "invalid_request_error", TOO_MANY: "rate_limit_error"}
    kind = kinds.get(status_of(error), "server_error")
    code = error.reason if isinstance(error, Throttled) else error.code
    param = error.field or None if isinstance(error, BadValue) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _rounded(stages: Stages) -> dict[str, Any]:
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in msgspec.structs.asdict(stages).items()
    }
