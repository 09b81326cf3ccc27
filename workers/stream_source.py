"""Pages that a client sends behind its request: received straight into where they belong.

Must not know records or locks.
"""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import Unavailable
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.common import Outcome
from workers.ingest import GROUP_BYTES, PullFailed, WaitingSource

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvstore.rpc.frame_socket import FrameSocket
    from workers.ingest import Target

SCRATCH_BYTES: Final = 256 * limits.KIB


class StreamSource(WaitingSource):
    """Pages that follow the request's frame on its connection, without padding."""

    group_bytes = GROUP_BYTES

    def __init__(self, link: FrameSocket, pages: int, part_bytes: int, now_s: float) -> None:
        """Read from `link`; the whole must have come by one put timeout from `now_s`."""
        self._link = link
        self._part_bytes = part_bytes
        self._end = pages * part_bytes
        self._deadline_s = now_s + limits.put_timeout_s(self._end)
        self._at = 0
        self._room: Memory | None = None

    def room(self, size_bytes: int) -> AbstractContextManager[Memory]:
        """The same each time."""
        if self._room is None:
            self._room = Memory.of("room", mmap.mmap(-1, size_bytes), writable=True)
        return nullcontext(self._room)

    def fill(self, page: int, target: Target) -> None:
        """Receive straight into the extents, past the pages that nobody wants."""
        self._skip_to(page * self._part_bytes + target.start)
        size, stride, count = target.size_bytes, target.stride, target.count
        views = [target.view]
        if stride != size:
            starts = range(0, count * stride, stride)
            views = [target.view[start : start + size] for start in starts]
        self._receive(views)
        self._at += count * size

    @property
    def is_finished(self) -> bool:
        """Whether the next frame can be read."""
        return self._at == self._end

    def finish(self) -> None:
        """Read past what is left. Unavailable when the connection has ended."""
        try:
            self._skip_to(self._end)
        except PullFailed as error:
            raise Unavailable(str(error)) from error

    def cancel(self) -> None:
        """End the connection: what is in flight is not waited for."""
        self._link.shutdown()

    def _skip_to(self, at: int) -> None:
        left = at - self._at
        if not left:
            return
        scratch = memoryview(bytearray(min(left, SCRATCH_BYTES)))
        while left:
            piece = scratch[: min(left, len(scratch))]
            self._receive([piece])
            left -= len(piece)
        self._at = at

    def _receive(self, views: list[memoryview]) -> None:
        try:
            self._link.receive_raw_into(views, self._deadline_s)
        except Unavailable as error:
            self._link.shutdown()
            raise PullFailed(Outcome.SOURCE_LOST, str(error)) from error
