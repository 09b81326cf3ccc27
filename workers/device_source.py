"""Pages that a client left on a device: pulled straight from its memory there.

The client's block was opened by its handle, and stays open while a pull uses it. Must not know
sessions; into a segment on the same device, `workers.device_pull` copies without the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue, Unavailable
from kvstore.transfer.bounce import GROUP_BYTES
from kvstore.transfer.device import Move
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.common import Outcome
from workers.ingest import PullFailed

if TYPE_CHECKING:
    from array import array

    from kvstore.transfer.device import Block
    from workers.ingest import Target


class DeviceSource:
    """Pages in an opened block (see `ingest.Source`)."""

    group_bytes = GROUP_BYTES

    def __init__(self, block: Block, offsets: array[int], part_bytes: int) -> None:
        """BadValue unless every page lies inside the block."""
        last = block.size_bytes - part_bytes
        if offsets and max(offsets) > last:
            want = f"0 to {last}, for {part_bytes} bytes in a block of {block.size_bytes}"
            raise BadValue("source.offsets", max(offsets), want)
        self.memory: Final = block
        self.offsets: Final = offsets

    def fill(self, page: int, target: Target) -> None:
        """Copy each page to its extent, all at once."""
        moves = [
            Move(i * target.stride, self.offsets[page + i] + target.start, target.size_bytes)
            for i in range(target.count)
        ]
        try:
            self.memory.copy_to(Memory(target.view, target.address), moves)
        except Unavailable as error:
            raise PullFailed(Outcome.SOURCE_LOST, str(error)) from error

    def cancel(self) -> None:
        """A group of copies ends by itself."""
