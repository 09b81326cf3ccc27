"""Spans as OpenTelemetry has them. Imported by workers.tracing alone, where they are to be sent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from workers.tracing import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context

    from workers.tracing import Span

REQUEST: Final = "kvharbor.request"
NANOSECONDS: Final = 1_000_000_000
SEND_S: Final = 2.0
"""One try; what cannot be sent is dropped, and nobody waits for it but the end of the program."""


def provider_of(service: str) -> TracerProvider:
    """One that sends to where the environment says, in a thread of its own."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(timeout=SEND_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class SentSpans:
    """Gives spans to a provider of the SDK."""

    def __init__(self, provider: TracerProvider) -> None:
        """Send nothing yet."""
        self._provider = provider
        self._tracer = provider.get_tracer("kvharbor")

    def begin(self, name: str, request: str, parent: Place | None) -> Span:
        """A span of its own, below the caller's."""
        context = None if parent is None else _context(parent)
        span = self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes={REQUEST: request}
        )
        return _Sent(self._tracer, span)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class _Sent:
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def place(self) -> Place:
        """As its children name it."""
        its = self._span.get_span_context()
        return Place(f"{its.trace_id:032x}", f"{its.span_id:016x}", its.trace_flags)

    def stage(self, name: str, seconds: float, values: Mapping[str, int | str]) -> None:
        """A span below this one, that has ended."""
        ended = time.time_ns()
        began = ended - round(seconds * NANOSECONDS)
        within = trace.set_span_in_context(self._span)
        below = self._tracer.start_span(name, within, attributes=values, start_time=began)
        below.end(ended)

    def fail(self, error: BaseException) -> None:
        """Its status says why."""
        self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")

    def end(self) -> None:
        """Now."""
        self._span.end()


def _context(parent: Place) -> Context:
    remote = SpanContext(
        int(parent.trace, 16), int(parent.span, 16), is_remote=True,
        trace_flags=TraceFlags(parent.flags),
    )  # fmt: skip
    return trace.set_span_in_context(NonRecordingSpan(remote))
