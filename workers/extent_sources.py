"""Pages of this worker's own segments in memory, the host's or a device's: what moves copy from.

The state machine keeps the source extents as they are while a move runs. Must not know targets.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES
from kvstore.segment import size_class_of
from kvstore.transfer.bounce import GROUP_BYTES as DEVICE_GROUP_BYTES
from kvstore.transfer.memory import Memory, copy_bytes
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource
from kvstore.wire.messages.transfers import ReadExtents
from workers.ingest import GROUP_BYTES, PullFailed

if TYPE_CHECKING:
    from workers.events import StartPull
    from workers.ingest import Target
    from workers.tiers.hbm import HbmSegment
    from workers.tiers.tier import MemorySegment


class MemorySource:
    """Pages in a segment in memory (see `workers.ingest.Source`)."""

    group_bytes = GROUP_BYTES

    def __init__(self, segment: MemorySegment, offsets: array[int]) -> None:
        """One offset a page of the request."""
        self.memory: Final = Memory(segment.payload, segment.payload_address)
        self.offsets: Final = offsets

    def fill(self, page: int, target: Target) -> None:
        """Copy."""
        to, base = target.address, self.memory.address + target.start
        for offset in self.offsets[page : page + target.count]:
            copy_bytes(to, base + offset, target.size_bytes)
            to += target.stride

    def cancel(self) -> None:
        """A group of copies ends by itself."""


class HbmSource:
    """Pages in a segment on a device (see `workers.ingest.Source`), under their records."""

    def __init__(self, segment: HbmSegment, start: StartPull) -> None:
        """For a move."""
        source = start.message.source
        assert isinstance(source, ExtentSource), "only moves read a segment"
        self.group_bytes = max(DEVICE_GROUP_BYTES, size_class_of(start.message.part_bytes))
        """Never less than a page: a page is read at once."""
        self._segment = segment
        self._message = start.message
        self._offsets = array("Q", source.offsets)
        self._generations = array("Q", source.generations)

    def fill(self, page: int, target: Target) -> None:
        """Read; a page whose record says no longer the same leaves zeros, which nobody hashed."""
        message, stop = self._message, page + target.count
        asked = ReadExtents(
            self._segment.id, self._segment.incarnation, message.part, message.part_bytes,
            message.keys[page * KEY_BYTES : stop * KEY_BYTES],
            self._offsets[page:stop].tobytes(), self._generations[page:stop].tobytes(),
        )  # fmt: skip
        places = range(0, target.count * target.stride, target.stride)
        outcomes = self._segment.read(asked, Memory(target.view, target.address), places)
        if Outcome.TRANSPORT in outcomes:
            raise PullFailed(Outcome.TRANSPORT, f"{self._segment.id}: a page was not read")

    def cancel(self) -> None:
        """A group of reads ends by itself."""
