"""A collector of OpenTelemetry's spans, as OTLP over HTTP sends them."""

from __future__ import annotations

from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from typing import Self

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


class SpanCollector:
    """Keeps what it is sent, by trace, and by the name of who has sent it."""

    def __init__(self) -> None:
        """Listen at a port of its own."""
        self.spans: defaultdict[str, list[tuple[str, Span]]] = defaultdict(list)
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever)

    @property
    def endpoint(self) -> str:
        """What OTEL_EXPORTER_OTLP_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep these."""
        for group in request.resource_spans:
            (service,) = (
                each.value.string_value
                for each in group.resource.attributes
                if each.key == "service.name"
            )
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id.hex()].append((service, span))

    def __enter__(self) -> Self:
        """Collect."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
