"""Of which request a line of the log is, and spans of its stages for those who collect them.

Owns W3C's trace context. A request's ids are in a context variable, which tasks inherit, and
threads where it is handed on. OpenTelemetry is imported only where spans are to be sent.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TRACEPARENT: Final = "traceparent"
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable: where spans go, by OTLP over HTTP. Not set: nowhere."""
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class Place(msgspec.Struct, frozen=True):
    """A span, as its children name it."""

    trace: str
    span: str
    flags: int = _SAMPLED

    @property
    def header(self) -> str:
        """As W3C's `traceparent`."""
        return f"00-{self.trace}-{self.span}-{self.flags:02x}"


def place_of(header: str | None) -> Place | None:
    """What a caller says of its span; None: nothing that could be one, and a new trace begins."""
    found = _PARENT.fullmatch(header or "")
    if found is None or not (int(found[1], 16) and int(found[2], 16)):
        return None
    if header is not None and header.startswith("00-") and found[4] is not None:
        return None
    return Place(found[1], found[2], int(found[3], 16))


class Span(Protocol):
    """What has begun, and is told when it ends."""

    @property
    def place(self) -> Place:
        """For what happens within it."""
        ...

    def stage(self, name: str, seconds: float, values: Mapping[str, int | str]) -> None:
        """Something within it has ended just now, and took so long."""
        ...

    def fail(self, error: BaseException) -> None:
        """It ends, or goes on, without what was wanted."""
        ...

    def end(self) -> None:
        """It has ended."""
        ...


class Spans(Protocol):
    """Where spans go."""

    def begin(self, name: str, request: str, parent: Place | None) -> Span:
        """Something begins for a request."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class _Unsent(msgspec.Struct, frozen=True):
    place: Place

    def stage(self, name: str, seconds: float, values: Mapping[str, int | str]) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def end(self) -> None:
        pass


class NoSpans:
    """Nobody collects them; requests have ids all the same."""

    def begin(self, name: str, request: str, parent: Place | None) -> Span:
        """The caller's span is what happens here belongs to, or one that is never told."""
        fresh = Place(secrets.token_hex(16), secrets.token_hex(8))
        return _Unsent(parent or fresh)

    def close(self) -> None:
        """There is nothing."""


def spans_of(environment: Mapping[str, str], service: str) -> Spans:
    """As the environment says. ConfigError where OpenTelemetry is wanted and not installed."""
    if not environment.get(ENDPOINT):
        return NoSpans()
    try:
        from workers.sent_spans import SentSpans, provider_of
    except ImportError as error:
        text = (
            f"{ENDPOINT} is set, and {error.name} is not installed: pip install kvharbor[tracing]"
        )
        raise ConfigError(text) from error
    return SentSpans(provider_of(service))


class _Request(msgspec.Struct, frozen=True):
    name: str
    span: Span


_CURRENT: Final[ContextVar[_Request | None]] = ContextVar("request", default=None)


@contextmanager
def request_of(spans: Spans, name: str, request: str, header: str | None) -> Iterator[None]:
    """What is done within is done for this request; `name` says what that is."""
    span = spans.begin(name, request, place_of(header))
    token = _CURRENT.set(_Request(request, span))
    try:
        yield
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        _CURRENT.reset(token)
        span.end()


def stage(name: str, seconds: float, **values: int | str) -> None:
    """Part of the present request has ended just now; nothing where there is none."""
    current = _CURRENT.get()
    if current is not None:
        current.span.stage(name, seconds, values)


def failed(error: BaseException) -> None:
    """The present request does not get what it wants."""
    current = _CURRENT.get()
    if current is not None:
        current.span.fail(error)


def headers() -> dict[str, str]:
    """What whoever is asked for the present request is to be told of it."""
    current = _CURRENT.get()
    return {} if current is None else {TRACEPARENT: current.span.place.header}


class _NameRequests(logging.Filter):
    """Gives each record the ids of its request."""

    def filter(self, record: logging.LogRecord) -> bool:
        current = _CURRENT.get()
        record.request = "" if current is None else f"{current.name} {current.span.place.trace}: "
        return True


def name_requests(handlers: Iterable[logging.Handler]) -> None:
    """Have each line that these write begin with the ids of the request that it is about."""
    for handler in handlers:
        handler.addFilter(_NameRequests())
        handler.setFormatter(logging.Formatter(FORMAT))
