"""What a gateway and the inference workers say to each other: HTTP, JSON, a line a token.

Owns paths, fields and their form. The pool is not in between: these carry tokens, never KV.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from kvstore.block_hashes import OWN_HASHING, Hashing
from kvstore.errors import BadValue
from kvstore.namespace import Content, Layout

ABOUT: Final = "/about"
PREFILL: Final = "/prefill"
PREPARE: Final = "/prepare"
DECODE: Final = "/decode"
BODY_BYTES_MAX: Final = 16 << 20
"""A prompt of a million tokens fits."""
LINE_BYTES_MAX: Final = 1 << 16

T = TypeVar("T")
Number = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Tokens = Annotated[tuple[int, ...], Meta(min_length=1)]


class About(msgspec.Struct, frozen=True):
    """What an inference worker runs: what a gateway has to know of a fleet."""

    model: str
    content: Content
    layout: Layout
    context_tokens: int
    """Of prompt and answer together."""
    tokenizer: str
    """Folder of tokenizer and chat template; empty: a token is a byte."""
    hashing: Hashing = OWN_HASHING
    """Where its pages have their names from."""


class Sampling(msgspec.Struct, frozen=True):
    """How each next token is chosen."""

    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class PrefillAsk(msgspec.Struct, frozen=True):
    """Compute this prompt, stage its pages for the ticket."""

    ticket: Number
    request: str
    tokens: Tokens
    sampling: Sampling
    deadline_s: Seconds
    """Time from now after which nobody wants it."""


class PrefillDone(msgspec.Struct, frozen=True):
    """It is staged."""

    first: int
    """The first token of the answer."""
    reused_tokens: int
    """Whose KV the pool had."""
    queue_s: float
    compute_s: float


class PrepareAsk(msgspec.Struct, frozen=True):
    """Pull what is computed already of this prompt, until its answer is asked for.

    Hang up where it will not be.
    """

    ticket: Number
    route: Count
    request: str
    tokens: Tokens
    """The prompt."""


class Prepared(msgspec.Struct, frozen=True):
    """The answer was asked for, or the ticket is somebody else's."""


class DecodeAsk(msgspec.Struct, frozen=True):
    """Claim the ticket and go on; or compute all of it."""

    ticket: Number
    route: Number
    """0: there is none, as nobody else has computed the prompt or will go on."""
    request: str
    prompt_tokens: Count
    tokens: Tokens
    """Prompt, and what of the answer the client has."""
    max_tokens: Count
    """Of the whole answer."""
    sampling: Sampling
    deadline_s: Seconds
    expected_tokens: Count
    """Of those that are to come, how many are likely; room is set aside for so many."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a decode worker's answer."""

    claim: int
    """The claim's fencing token: of two workers the higher one has the ticket. 0 without route."""
    index: int = -1
    """Of `token` in the answer, from 0; -1 in the first line: the KV is there, and no token yet."""
    token: int = -1
    reused_tokens: int = 0
    """In the first line, without route: of the prompt, whose KV the pool had."""


class Trouble(msgspec.Struct, frozen=True):
    """Why it was not done."""

    code: str
    text: str


class Unwanted(Exception):  # an end that was asked for, not an error
    """Nobody waits for this prompt any more."""


def check_tokens(ask: PrefillAsk | PrepareAsk | DecodeAsk, vocabulary: int) -> None:
    """BadValue for what no model can go on from; `decode` has looked at each field by itself."""
    for token in (min(ask.tokens), max(ask.tokens)):
        if not 0 <= token < vocabulary:
            raise BadValue("tokens", token, f"0 to {vocabulary - 1}")
    if isinstance(ask, DecodeAsk):
        generated = len(ask.tokens) - ask.prompt_tokens
        if not 0 <= generated < ask.max_tokens:
            want = f"those of the prompt and of fewer than {ask.max_tokens} that follow"
            raise BadValue("prompt_tokens", ask.prompt_tokens, f"{want}, of {len(ask.tokens)}")


def encode(value: msgspec.Struct) -> bytes:
    """As one line of JSON, without its end."""
    return msgspec.json.encode(value)


def decode(body: bytes, kind: type[T]) -> T:
    """What a peer sent. BadValue for what is not of this kind, naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadValue("body", bytes(body[:40]), f"{kind.__name__}: {error}") from error
