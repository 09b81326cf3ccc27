"""The `tcp` transport: pages as raw bytes after their headers, on authenticated connections.

Blocking sockets, one call a connection.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import KVStoreError
from kvstore.transfer.data_links import DataLinks
from kvstore.transfer.piece_calls import PieceCalls
from kvstore.transfer.stream_reads import read_streamed, views_of
from kvstore.transfer.transport import IngestSpan, ReadSpan, span_checksums
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.puts import StreamSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.context import TransferContext
    from kvstore.transfer.memory import Memory


def require() -> None:
    """Sockets are everywhere."""


def open_transport(context: TransferContext, timeout_s: float) -> TcpTransport:
    """Reach the worker. Unavailable when nobody answers there."""
    transport = TcpTransport(context)
    try:
        transport.greet(time.monotonic() + min(timeout_s, limits.READ_STALL_MAX_S))
    except BaseException:
        transport.close()
        raise
    return transport


class TcpTransport:
    """One worker, reached over a stream. Thread-safe."""

    def __init__(self, context: TransferContext) -> None:
        """Reach for nothing yet."""
        self._links = DataLinks(context.address.where, context.identity)

    def greet(self, deadline_s: float) -> None:
        """Open a connection and keep it for the first call."""
        with self._links.link(deadline_s):
            pass

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """See Transport.read."""
        return read_streamed(self._links, span, into, time.monotonic() + timeout_s)

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """See Transport.ingest."""
        calls = PieceCalls(spans)
        deadline_s = time.monotonic() + timeout_s

        def send(link: FrameSocket, request_id: int, piece: IngestSpan, until_s: float) -> None:
            message = piece.message(span_checksums(piece, source.view), StreamSource())
            raw = list(views_of(source, piece.places, piece.part_bytes))
            link.send(FrameKind.REQUEST, request_id, message, raw=raw, deadline_s=until_s)

        try:
            with self._links.link(deadline_s) as link:
                calls.run(link, send, deadline_s)
        except KVStoreError:
            pass  # What was not answered stays TRANSPORT.
        return [bytes(outcomes) for outcomes in calls.outcomes]

    def close(self) -> None:
        """See Transport.close."""
        self._links.close()
