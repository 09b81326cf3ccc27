"""Pipelined Ingest requests over one data connection: the shape that all transports share.

The writer hashes a piece while the worker copies the one before. Owns the matching of replies to
pieces; the transport says how a piece's bytes reach the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import BufferClosed, Fenced, KVStoreError, MalformedMessage, StaleEpoch
from kvstore.rpc.failure import error_of
from kvstore.transfer.transport import IngestSpan, all_of, growing_pieces
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.puts import Ingested

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.messages.base import Message

    SendPiece = Callable[[FrameSocket, int, IngestSpan, float], None]
    """Send the Ingest of one piece under a request id, by the time.monotonic() deadline."""

PIECES_IN_FLIGHT_MAX: Final = 64
"""Requests without a reply: their replies fit the socket's buffer, so neither side blocks."""
_UNANSWERED: Final = all_of(Outcome.TRANSPORT, 1)


class PieceCalls:
    """The pieces of some spans on their way through one connection."""

    def __init__(self, spans: Sequence[IngestSpan]) -> None:
        """Every page starts as TRANSPORT: that is what it is when no reply comes."""
        self.outcomes = [bytearray(_UNANSWERED * len(span.places)) for span in spans]
        self._spans = spans
        self._waiting: dict[int, tuple[int, int, int]] = {}
        """Span, first page and pages of each request in flight."""

    def run(self, link: FrameSocket, send: SendPiece, deadline_s: float) -> None:
        """Send every piece and take in every reply. Raises what the connection raises.

        What was answered before that stays in `outcomes`.
        """
        for request_id, (nth, first, piece) in enumerate(growing_pieces(self._spans)):
            send(link, request_id, piece, deadline_s)
            self._waiting[request_id] = (nth, first, len(piece.places))
            if len(self._waiting) >= PIECES_IN_FLIGHT_MAX:
                self._take_reply(link, deadline_s)
        while self._waiting:
            self._take_reply(link, deadline_s)

    def _take_reply(self, link: FrameSocket, deadline_s: float) -> None:
        frame = link.receive(deadline_s)
        place = self._waiting.pop(frame.request_id, None)
        if place is None or frame.kind is not FrameKind.REPLY:
            raise MalformedMessage(f"{type(frame.message).__name__} that nobody asked for")
        nth, first, pages = place
        self.outcomes[nth][first : first + pages] = _outcomes_of(frame.message, pages)


def _outcomes_of(reply: Message, pages: int) -> bytes:
    """One Outcome byte a page; a Failure counts for all of them."""
    if isinstance(reply, Failure):
        return all_of(outcome_of_error(error_of(reply)), pages)
    if not isinstance(reply, Ingested) or len(reply.outcomes) != pages:
        raise MalformedMessage(f"{type(reply).__name__} in answer to Ingest of {pages} pages")
    return reply.outcomes


def outcome_of_error(error: KVStoreError) -> Outcome:
    """What a worker's refusal of a whole request means for each of its pages."""
    if isinstance(error, Fenced | StaleEpoch):
        return Outcome.FENCED
    if isinstance(error, BufferClosed):
        return Outcome.SOURCE_LOST
    return Outcome.TRANSPORT
