"""A request's ids in lines of the log and in headers, and its spans."""

from __future__ import annotations

import asyncio
import io
import logging
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvstore.errors import ConfigError, Unavailable
from workers.sent_spans import SentSpans
from workers.tracing import (
    ENDPOINT,
    TRACEPARENT,
    NoSpans,
    Place,
    failed,
    headers,
    name_requests,
    place_of,
    request_of,
    spans_of,
    stage,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "place"),
    [
        (HEADER, Place(TRACE, SPAN, 1)),
        (f"00-{TRACE}-{SPAN}-00", Place(TRACE, SPAN, 0)),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", Place(TRACE, SPAN, 1)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        (None, None),
    ],
)
def test_a_callers_span_is_read_as_w3c_says(header: str | None, place: Place | None) -> None:
    assert place_of(header) == place
    if place is not None and header is not None and header.startswith("00"):
        assert place.header == header


def test_a_request_has_ids_where_nobody_collects_spans() -> None:
    assert headers() == {}
    with request_of(NoSpans(), "decode", "r/1", HEADER):
        assert headers() == {TRACEPARENT: HEADER}
    with request_of(NoSpans(), "decode", "r/2", None):
        fresh = place_of(headers()[TRACEPARENT])
        assert fresh is not None
        assert fresh.trace != TRACE
    assert headers() == {}


def test_lines_about_a_request_name_it_and_others_do_not() -> None:
    log, text = logging.getLogger("test_workers_tracing"), io.StringIO()
    handler = logging.StreamHandler(text)
    name_requests([handler])
    log.addHandler(handler)
    log.propagate = False

    async def asked(number: int) -> None:
        with request_of(NoSpans(), "decode", f"r/{number}", f"00-{number:032x}-{SPAN}-01"):
            log.warning("%d begins", number)
            await asyncio.sleep(0)
            await asyncio.to_thread(log.warning, "%d in a thread", number)
            await asyncio.ensure_future(asyncio.to_thread(log.warning, "%d in a task", number))

    async def both() -> None:
        await asyncio.gather(asked(1), asked(2))
        log.warning("0 of nobody")

    try:
        asyncio.run(both())
    finally:
        log.removeHandler(handler)
    lines = [line.partition("test_workers_tracing: ")[2] for line in text.getvalue().splitlines()]
    assert len(lines) == 7
    assert lines.pop() == "0 of nobody"
    for line in lines:
        number = int(line.split(": ")[1][0])
        assert line.startswith(f"r/{number} {number:032x}: {number} "), lines


def test_spans_of_gateway_and_workers_are_of_one_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = SentSpans(provider)
    with request_of(spans, "/v1/completions", "r/1", HEADER):
        stage("admission", 0.5)
        with request_of(spans, "prefill", "r/1", headers()[TRACEPARENT]):
            stage("compute", 2.0, tokens=7)
            failed(Unavailable("no pool"))
    spans.close()
    found = {span.name: span for span in exporter.get_finished_spans()}
    root, prefill = found["/v1/completions"], found["prefill"]
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    parents = {name: span.parent and span.parent.span_id for name, span in found.items()}
    assert parents == {
        "/v1/completions": int(SPAN, 16), "admission": root.context.span_id,
        "prefill": root.context.span_id, "compute": prefill.context.span_id,
    }  # fmt: skip
    compute = found["compute"]
    assert compute.end_time is not None
    assert compute.start_time is not None
    assert compute.end_time - compute.start_time == 2_000_000_000
    assert compute.attributes == {"tokens": 7}
    assert prefill.attributes == {"kvharbor.request": "r/1"}
    assert prefill.status.status_code is StatusCode.ERROR
    assert root.status.status_code is StatusCode.UNSET


def test_what_ends_a_request_is_the_status_of_its_span() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.raises(asyncio.CancelledError), request_of(SentSpans(provider), "decode", "r", ""):
        raise asyncio.CancelledError
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.parent is None


def test_opentelemetry_is_wanted_only_where_spans_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "workers.sent_spans", None)
    assert isinstance(spans_of({}, "gateway"), NoSpans)
    assert isinstance(spans_of({ENDPOINT: ""}, "gateway"), NoSpans)
    with pytest.raises(ConfigError, match=r"pip install kvharbor\[tracing\]"):
        spans_of({ENDPOINT: "http://127.0.0.1:4318"}, "gateway")
