"""Pages that a worker sends as raw bytes over a data connection, whatever kind that is.

Reads keep two requests in flight, so that one piece is verified while the next arrives. A worker
that sends nothing for a while is dead, or as good as that: its pages may lie elsewhere too.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import KVStoreError, MalformedMessage
from kvstore.rpc.failure import error_of
from kvstore.transfer.data_links import patience_s, reply_to, silent_at_s
from kvstore.transfer.piece_calls import outcome_of_error
from kvstore.transfer.transport import ReadSpan, all_of, even_pieces, verified
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.transfers import ReadEnded, ReadExtents, ReadStarted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.data_links import DataLinks
    from kvstore.transfer.memory import Memory
    from kvstore.wire.messages.base import Message

READ_PIECE_BYTES: Final = 4 * limits.MIB
READS_IN_FLIGHT: Final = 2


def read_streamed(links: DataLinks, span: ReadSpan, into: Memory, until_s: float) -> bytes:
    """`Transport.read` by the time.monotonic() moment `until_s`."""
    outcomes = bytearray(all_of(Outcome.TRANSPORT, len(span)))
    # What was not answered stays TRANSPORT.
    with suppress(KVStoreError), links.link(silent_at_s(until_s)) as link:
        _read_pieces(link, span, into, outcomes, until_s)
    if any(outcomes):
        into.wipe([p for p, o in zip(span.places, outcomes, strict=True) if o], span.part_bytes)
    return bytes(outcomes)


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
    reply = _next_word(request_id, link, deadline_s)
    if isinstance(reply, Failure):
        outcomes[pages] = all_of(outcome_of_error(error_of(reply)), len(piece))
        return
    if not isinstance(reply, ReadStarted) or len(reply.outcomes) != len(piece):
        raise MalformedMessage(f"{type(reply).__name__} in answer to ReadExtents")
    coming = [p for p, o in zip(piece.places, reply.outcomes, strict=True) if o == Outcome.OK]
    views = list(views_of(into, coming, piece.part_bytes))
    link.receive_raw_into(views, deadline_s, patience_s(deadline_s))
    found = verified(piece, into.view, reply.outcomes)
    ended = _next_word(request_id, link, deadline_s)
    if not isinstance(ended, ReadEnded) or len(ended.outcomes) != len(piece):
        raise MalformedMessage(f"{type(ended).__name__} at the end of a read")
    # A record that changed meanwhile explains bytes that do not match: it is the better reason.
    outcomes[pages] = bytes(
        last or checked for last, checked in zip(ended.outcomes, found, strict=True)
    )


def _next_word(request_id: int, link: FrameSocket, deadline_s: float) -> Message:
    """What the worker says next, which it does soon unless it is dead: DeadlineExceeded."""
    return reply_to(request_id, link, silent_at_s(deadline_s))


def views_of(memory: Memory, places: Iterable[int], size: int) -> Iterator[memoryview]:
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
