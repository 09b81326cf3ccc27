"""Pages on a disk of this host's worker: brought into memory that we map, read there, released.

Owns the conversation about one span, two pieces at a time, so that the worker reads the next from
its disk while this side copies the last. Must not know mappings or locks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import MalformedMessage
from kvstore.ids import KEY_BYTES
from kvstore.rpc.failure import error_of
from kvstore.transfer.data_links import reply_to, silent_at_s
from kvstore.transfer.piece_calls import outcome_of_error
from kvstore.transfer.transport import COLUMN_BYTES, ReadSpan, all_of
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.transfers import ReleaseStaged, Staged, StageExtents

if TYPE_CHECKING:
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.messages.base import Message

STAGE_PIECE_BYTES: Final = 4 * limits.MIB
STAGES_IN_FLIGHT: Final = 2
_NOT_THERE: Final = frozenset((Outcome.BUSY, Outcome.STALE))
"""Of a staged page: it had no room, or gave it to another page before we came."""

TakeStaged = Callable[[ReadSpan], bytes]
"""Copies or holds a span of staged pages; one Outcome byte a page, as MappedSegment has it."""


class StagedRead:
    """One span on its way from the worker's disk."""

    def __init__(self, span: ReadSpan, take: TakeStaged, until_s: float) -> None:
        """`until_s` is a time.monotonic() moment."""
        self.outcomes = bytearray(all_of(Outcome.TRANSPORT, len(span)))
        """One byte a page at any time: TRANSPORT is what it is when no answer comes."""
        self._span = span
        self._take = take
        self._until_s = until_s
        self._requests = 0
        self._due: deque[tuple[int, Sequence[int], float]] = deque()
        """Request, its pages, none for a release, and how long the worker may wait for room.

        In the order of their answers.
        """

    def run(self, link: FrameSocket) -> None:
        """Bring every page, or find out why not, through a connection that is ours meanwhile.

        Raises what the connection raises; `outcomes` keeps what was answered before.
        """
        step = max(1, STAGE_PIECE_BYTES // self._span.part_bytes)
        pages = range(len(self._span))
        pieces = deque(pages[first : first + step] for first in range(0, len(pages), step))
        busy: list[int] = []
        while pieces or self._due:
            while pieces and sum(1 for _, asked, _ in self._due if asked) < STAGES_IN_FLIGHT:
                self._ask(link, pieces.popleft(), wait_s=0.0)
            busy += self._answer(link)
        while busy:
            # Nothing of ours takes room any more: what found none waits, but not until the end.
            piece, rest = busy[:step], busy[step:]
            self._ask(link, piece, wait_s=max(0.0, self._until_s - time.monotonic()) / 2)
            left: list[int] = []
            while self._due:
                left += self._answer(link)
            if left == piece:
                return
            busy = left + rest

    def _ask(self, link: FrameSocket, pages: Sequence[int], wait_s: float) -> None:
        span = self._span
        message = StageExtents(
            span.segment.segment, span.segment.incarnation, span.part, span.part_bytes,
            _picked(span.keys, pages, KEY_BYTES), _picked(span.offsets, pages),
            _picked(span.generations, pages), wait_s,
        )  # fmt: skip
        self._send(link, message, pages, wait_s)

    def _send(
        self, link: FrameSocket, message: Message, pages: Sequence[int], wait_s: float = 0.0
    ) -> None:
        self._requests += 1
        link.send(FrameKind.REQUEST, self._requests, message, deadline_s=self._until_s)
        self._due.append((self._requests, pages, wait_s))

    def _answer(self, link: FrameSocket) -> list[int]:
        """Take the next answer in; its pages that are to be asked for once more."""
        request, pages, wait_s = self._due.popleft()
        reply = reply_to(request, link, wait_s + silent_at_s(self._until_s - wait_s))
        if not pages:
            if not isinstance(reply, Done):
                raise MalformedMessage(f"{type(reply).__name__} in answer to ReleaseStaged")
            return []
        if isinstance(reply, Failure):
            outcome = outcome_of_error(error_of(reply))
            codes = all_of(outcome, len(pages))
        else:
            codes = self._taken(link, _checked(reply, len(pages)), pages)
        for page, code in zip(pages, codes, strict=True):
            self.outcomes[page] = code
        return [page for page, code in zip(pages, codes, strict=True) if code == Outcome.BUSY]

    def _taken(self, link: FrameSocket, reply: Staged, pages: Sequence[int]) -> bytes:
        """Read what is staged and let go of it; one Outcome byte a page."""
        there = [i for i, code in enumerate(reply.outcomes) if code == Outcome.OK]
        if not there:
            return reply.outcomes
        whole, chosen = self._span, [pages[i] for i in there]
        place = msgspec.structs.replace(
            whole.segment, segment=reply.segment, incarnation=reply.incarnation
        )
        offsets, generations = _picked(reply.offsets, there), _picked(reply.generations, there)
        codes = self._take(
            ReadSpan(
                place, whole.part, whole.part_bytes, _picked(whole.keys, chosen, KEY_BYTES),
                offsets, generations, _picked(whole.checksums, chosen),
                tuple([whole.places[page] for page in chosen]),
            )
        )  # fmt: skip
        self._send(link, ReleaseStaged(offsets, generations), ())
        outcomes = bytearray(reply.outcomes)
        for i, code in zip(there, codes, strict=True):
            outcomes[i] = Outcome.BUSY if code in _NOT_THERE else code
        return bytes(outcomes)


def _checked(reply: Message, pages: int) -> Staged:
    if not isinstance(reply, Staged):
        raise MalformedMessage(f"{type(reply).__name__} in answer to StageExtents")
    want = pages * COLUMN_BYTES
    if (
        not len(reply.outcomes) * COLUMN_BYTES
        == len(reply.offsets)
        == want
        == len(reply.generations)
    ):
        raise MalformedMessage(f"Staged: columns for {pages} pages differ")
    return reply


def _picked(packed: bytes, entries: Sequence[int], size: int = COLUMN_BYTES) -> bytes:
    """These entries of a packed column."""
    if isinstance(entries, range):
        return packed[entries.start * size : entries.stop * size]
    return b"".join([packed[i * size : (i + 1) * size] for i in entries])
