"""Pages that the client's transfer engine serves: the third kind of source for a pull.

Turns what `workers.ingest` asks for into copies by the engine's children. Must not know records,
locks or how the bytes travel.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import EngineSource
from workers.engine_child import check_peer
from workers.ingest import PullFailed

if TYPE_CHECKING:
    from workers.engine_child import EngineChild
    from workers.ingest import Target
    from workers.tiers.tier import Segment

GROUP_BYTES: Final = 16 * limits.MIB
"""Asked of the engine at once: a request costs about 0.1 ms, whatever its size."""


class EnginePages:
    """See `workers.ingest.Source`."""

    group_bytes: Final = GROUP_BYTES

    def __init__(
        self, child: EngineChild, segment: Segment, source: EngineSource, part_bytes: int,
        now_s: float,
    ) -> None:  # fmt: skip
        """The whole must have come by one put timeout from `now_s`. BadValue for a bad source."""
        check_peer(source.peer)
        if len(source.addresses) % 8:
            raise BadValue("source.addresses", len(source.addresses), "8 bytes a page")
        self._peer = source.peer
        self._addresses = array("Q", source.addresses)
        self._segment = segment
        self._copy = child.copy()
        self._deadline_s = now_s + limits.put_timeout_s(len(self._addresses) * part_bytes)

    def fill(self, page: int, target: Target) -> None:
        """Copy one group of pages. When this raises, the engine that was at it has ended (I6)."""
        first = target.address - self._segment.payload_address
        offsets = array("Q", range(first, first + target.count * target.stride, target.stride))
        source = EngineSource(self._peer, self._addresses[page : page + target.count].tobytes())
        try:
            self._copy.run(
                self._segment.id, source, offsets.tobytes(), target.part_bytes, self._deadline_s
            )
        except KVStoreError as error:
            raise PullFailed(Outcome.TRANSPORT, str(error)) from error

    def cancel(self) -> None:
        """End the copy that runs, and refuse the next."""
        self._copy.cancel()
