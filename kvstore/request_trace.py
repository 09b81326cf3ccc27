"""Traces of requests to a serving engine: which pages each prompt has, and when it came.

Owns the file format, one JSON object a line (that of the traces released with Mooncake):

    timestamp      milliseconds since the start; never goes back
    input_length   tokens of the prompt
    output_length  tokens of the answer; 0 where it is left out, as replays need none
    hash_ids       one number for every `page_tokens` tokens of the prompt, the last one possibly
                   for fewer; equal numbers stand for equal tokens after equal numbers

Must not know of pools or policies.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, TypeGuard

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TRACE_PAGE_TOKENS: Final = 512
"""Of the published traces."""
NO_PARENT: Final = -1
PAGE_TOKENS_MAX: Final = limits.EXTENT_ALIGN_BYTES
"""At a byte a token, a page fits the smallest extent (master.replay.pool)."""
TIMESTAMP_MAX: Final = 1 << 48
"""Milliseconds. Beyond this a time in seconds would no longer be exact to a microsecond."""
NUMBER_MAX: Final = 1 << 63


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One prompt."""

    at_s: float
    """Seconds since the start of the trace."""
    tokens: int
    pages: tuple[int, ...]
    """Numbers of its pages; the last one may be partial."""
    new_tokens: int = 0
    """Of the answer."""


class Trace:
    """Requests in the order of their times; every page has one parent in all of them."""

    def __init__(self, page_tokens: int = TRACE_PAGE_TOKENS) -> None:
        """Start empty. BadValue for a page of no tokens or too many."""
        if not 1 <= page_tokens <= PAGE_TOKENS_MAX:
            raise BadValue("page_tokens", page_tokens, f"1 to {PAGE_TOKENS_MAX}")
        self.page_tokens = page_tokens
        self.requests: list[TraceRequest] = []
        self.parents: dict[int, int] = {}
        """The page before each page, or NO_PARENT."""

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Time of the last request."""
        return self.requests[-1].at_s if self.requests else 0.0

    def full_pages(self, request: TraceRequest) -> tuple[int, ...]:
        """The pages that can be stored: a partial one has no key."""
        return request.pages[: request.tokens // self.page_tokens]

    def add(self, request: TraceRequest) -> None:
        """Append a request; BadValue, naming the field, when it contradicts those before it."""
        if self.requests and request.at_s < self.requests[-1].at_s:
            raise BadValue("timestamp", request.at_s, "none before that of the line above")
        whole, rest = divmod(request.tokens, self.page_tokens)
        pages = request.pages
        if not whole <= len(pages) <= whole + bool(rest):
            want = f"{whole + bool(rest)} pages of {self.page_tokens} tokens"
            raise BadValue("hash_ids", len(pages), want)
        if len(set(pages)) != len(pages):
            raise BadValue("hash_ids", pages, "each page once")
        parent, parents = NO_PARENT, self.parents
        for page in pages:
            if parents.get(page, parent) != parent:
                raise BadValue("hash_ids", page, f"{parents[page]} before it, as on lines above")
            parent = page
        parents.update(zip(pages, (NO_PARENT, *pages), strict=False))
        self.requests.append(request)


def read_trace(path: Path, page_tokens: int = TRACE_PAGE_TOKENS) -> Trace:
    """Read a whole file. ConfigError names file, line and field of the first thing wrong in it."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_trace(lines, str(path), page_tokens)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error


def parse_trace(lines: Iterable[str], name: str, page_tokens: int = TRACE_PAGE_TOKENS) -> Trace:
    """The requests of these lines; blank ones are skipped. ConfigError as `read_trace`."""
    trace = Trace(page_tokens)
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            trace.add(_request(line))
        except BadValue as error:
            raise ConfigError(f"{name}, line {number}: {error}") from error
    if not trace.requests:
        raise ConfigError(f"{name}: no requests, want one JSON object a line")
    return trace


def _request(line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadValue("line", line.strip(), "a JSON object") from error
    if not isinstance(row, dict):
        raise BadValue("line", row, "a JSON object")
    timestamp = row.get("timestamp")
    # The comparison is also false for a NaN.
    if not _is_number(timestamp) or not 0 <= timestamp < TIMESTAMP_MAX:
        raise BadValue("timestamp", timestamp, f"milliseconds from 0 to below {TIMESTAMP_MAX}")
    tokens = _whole("input_length", row.get("input_length"))
    pages = row.get("hash_ids")
    if not isinstance(pages, list):
        raise BadValue("hash_ids", pages, "a list of whole numbers")
    numbers = tuple(_whole("hash_ids", page) for page in pages)
    new_tokens = _whole("output_length", row.get("output_length", 0))
    return TraceRequest(timestamp / 1000.0, tokens, numbers, new_tokens)


def _is_number(value: object) -> TypeGuard[int | float]:
    # True is an int to Python, but not to whoever wrote the trace.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(field: str, value: object) -> int:
    if not _is_number(value) or not isinstance(value, int) or not 0 <= value < NUMBER_MAX:
        raise BadValue(field, value, f"a whole number from 0 to below {NUMBER_MAX}")
    return value
