"""What a gateway and the inference workers say to each other: HTTP, JSON, a line a token.

Owns paths, fields and their form. The pool is not in between: these carry tokens, never KV.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from kvstore.errors import BadValue
from kvstore.namespace import Content, Layout

ABOUT: Final = "/about"
PREFILL: Final = "/prefill"
DECODE: Final = "/decode"
BODY_BYTES_MAX: Final = 16 << 20
"""A prompt of a million tokens fits."""
LINE_BYTES_MAX: Final = 1 << 16

T = TypeVar("T")


class About(msgspec.Struct, frozen=True):
    """What an inference worker runs: what a gateway has to know of a fleet."""

    model: str
    content: Content
    layout: Layout
    context_tokens: int
    """Of prompt and answer together."""
    tokenizer: str
    """Folder of tokenizer and chat template; empty: a token is a byte."""


class Sampling(msgspec.Struct, frozen=True):
    """How each next token is chosen."""

    temperature: float
    top_p: float
    seed: int


class PrefillAsk(msgspec.Struct, frozen=True):
    """Compute this prompt, stage its pages for the ticket."""

    ticket: int
    request: str
    tokens: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    """Time from now after which nobody wants it."""


class PrefillDone(msgspec.Struct, frozen=True):
    """It is staged."""

    first: int
    """The first token of the answer."""
    reused_tokens: int
    """Whose KV the pool had."""
    queue_s: float
    compute_s: float


class DecodeAsk(msgspec.Struct, frozen=True):
    """Claim the ticket and go on."""

    ticket: int
    route: int
    request: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    """Prompt, and what of the answer the client has."""
    max_tokens: int
    """Of the whole answer."""
    sampling: Sampling
    deadline_s: float


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a decode worker's answer."""

    claim: int
    """The claim's fencing token: of two workers the higher one has the ticket."""
    index: int = -1
    """Of `token` in the answer, from 0; -1: no token in this line."""
    token: int = -1
    install_s: float = 0.0
    """In the first line: from the question to the KV's being there."""
    finish: str = ""
    """stop or length: the answer is complete. A stream that ends without it goes on elsewhere."""


class Trouble(msgspec.Struct, frozen=True):
    """Why it was not done."""

    code: str
    text: str


def encode(value: msgspec.Struct) -> bytes:
    """As one line of JSON, without its end."""
    return msgspec.json.encode(value)


def decode(body: bytes, kind: type[T]) -> T:
    """What a peer sent. BadValue for what is not of this kind, naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadValue("body", bytes(body[:40]), f"{kind.__name__}: {error}") from error
