"""The `tcp` transport: pages as raw bytes after their headers, on authenticated connections.

Blocking sockets, one call a connection. Reads keep two requests in flight, so that one piece is
verified while the next arrives.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import KVStoreError, MalformedMessage
from kvstore.rpc.failure import error_of
from kvstore.transfer.data_links import DataLinks, reply_to
from kvstore.transfer.piece_calls import PieceCalls, outcome_of_error
from kvstore.transfer.transport import (
    IngestSpan,
    ReadSpan,
    all_of,
    even_pieces,
    span_checksums,
    verified,
)
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.puts import StreamSource
from kvstore.wire.messages.transfers import ReadEnded, ReadExtents, ReadStarted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.context import TransferContext
    from kvstore.transfer.memory import Memory

READ_PIECE_BYTES: Final = 4 * limits.MIB
READS_IN_FLIGHT: Final = 2


def require() -> None:
    """Sockets are everywhere."""


def open_transport(context: TransferContext, timeout_s: float) -> TcpTransport:
    """Reach the worker. Unavailable when nobody answers there."""
    transport = TcpTransport(context)
    try:
        transport.greet(time.monotonic() + timeout_s)
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
        outcomes = bytearray(all_of(Outcome.TRANSPORT, len(span)))
        deadline_s = time.monotonic() + timeout_s
        try:
            with self._links.link(deadline_s) as link:
                _read_pieces(link, span, into, outcomes, deadline_s)
        except KVStoreError:
            pass  # What was not answered stays TRANSPORT.
        if any(outcomes):
            into.wipe([p for p, o in zip(span.places, outcomes, strict=True) if o], span.part_bytes)
        return bytes(outcomes)

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """See Transport.ingest."""
        calls = PieceCalls(spans)
        deadline_s = time.monotonic() + timeout_s

        def send(link: FrameSocket, request_id: int, piece: IngestSpan, until_s: float) -> None:
            message = piece.message(span_checksums(piece, source.view), StreamSource())
            raw = list(_views(source, piece.places, piece.part_bytes))
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


def _read_pieces(
    link: FrameSocket, span: ReadSpan, into: Memory, outcomes: bytearray, deadline_s: float
) -> None:
    """Read a span piece by piece, the next one asked for before the last has come."""
    asked: deque[tuple[int, int, ReadSpan]] = deque()
    first = 0
    for request_id, piece in enumerate(even_pieces(span, READ_PIECE_BYTES)):
        message = ReadExtents(
            piece.segment.segment, piece.segment.incarnation, piece.part, piece.part_bytes,
            piece.keys, piece.offsets, piece.generations,
        )  # fmt: skip
        link.send(FrameKind.REQUEST, request_id, message, deadline_s=deadline_s)
        asked.append((request_id, first, piece))
        first += len(piece)
        if len(asked) == READS_IN_FLIGHT:
            _take_piece(link, asked.popleft(), into, outcomes, deadline_s)
    while asked:
        _take_piece(link, asked.popleft(), into, outcomes, deadline_s)


def _take_piece(
    link: FrameSocket,
    asked: tuple[int, int, ReadSpan],
    into: Memory,
    outcomes: bytearray,
    deadline_s: float,
) -> None:
    """Receive one piece, verify it, and note its outcomes: the worker's last word counts too."""
    request_id, first, piece = asked
    pages = slice(first, first + len(piece))
    reply = reply_to(request_id, link, deadline_s)
    if isinstance(reply, Failure):
        outcomes[pages] = all_of(outcome_of_error(error_of(reply)), len(piece))
        return
    if not isinstance(reply, ReadStarted) or len(reply.outcomes) != len(piece):
        raise MalformedMessage(f"{type(reply).__name__} in answer to ReadExtents")
    coming = [p for p, o in zip(piece.places, reply.outcomes, strict=True) if o == Outcome.OK]
    link.receive_raw_into(list(_views(into, coming, piece.part_bytes)), deadline_s)
    found = verified(piece, into.view, reply.outcomes)
    ended = reply_to(request_id, link, deadline_s)
    if not isinstance(ended, ReadEnded) or len(ended.outcomes) != len(piece):
        raise MalformedMessage(f"{type(ended).__name__} at the end of a read")
    # A record that changed meanwhile explains bytes that do not match: it is the better reason.
    outcomes[pages] = bytes(
        last or checked for last, checked in zip(ended.outcomes, found, strict=True)
    )


def _views(memory: Memory, places: Iterable[int], size: int) -> Iterator[memoryview]:
    """Slices of `size` bytes at each place, those that touch as one."""
    start = stop = -1
    for place in places:
        if place == stop:
            stop += size
            continue
        if start >= 0:
            yield memory.view[start:stop]
        start, stop = place, place + size
    if start >= 0:
        yield memory.view[start:stop]
