"""Pulls into a segment on a device: locks and records as anywhere, the bytes copied by the device.

What lies where the device can copy from goes straight there; anything else goes through host
memory. Hashed is what the extents hold afterwards. Must not know who asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import OutOfSpace, Unavailable
from kvstore.wire.messages.common import Outcome
from workers.device_source import DeviceSource
from workers.extent_sources import MemorySource
from workers.ingest import ExtentPull, PullFailed, Target, WaitingSource, compared
from workers.tiers.hbm import Extents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvstore.transfer.device import Block
    from kvstore.transfer.memory import Memory
    from workers.events import StartPull
    from workers.ingest import Source
    from workers.tiers.hbm import HbmSegment


class DevicePull(ExtentPull):
    """Into memory of a device."""

    def __init__(self, segment: HbmSegment, start: StartPull, source: Source) -> None:
        """Nothing is touched yet."""
        super().__init__(segment, start, source)
        self._hbm = segment

    def _fill_pages(self, page: int, offset: int, wanted: list[int]) -> bytes:
        size, stride, count = self._start.message.part_bytes, self._start.size_class, len(wanted)
        if (direct := self._direct(page, count)) is not None:
            return self._land(page, offset, wanted, *direct)
        with self._room() as room:
            length = count * stride
            target = Target(room.view[:length], room.address, size, stride, count)
            self._source.fill(page, target)
            return self._land(page, offset, wanted, room, range(0, length, stride))

    def _fill_large(self, page: int, offset: int, wanted: int) -> int:
        size, group = self._start.message.part_bytes, self._source.group_bytes
        if (direct := self._direct(page, 1)) is not None:
            return self._land(page, offset, [wanted], *direct)[0]
        with self._room() as room:
            for at in range(0, size, group):
                if self._is_cancelled:
                    return Outcome.FENCED
                length = min(group, size - at)
                view = room.view[at : at + length]
                target = Target(view, room.address + at, length, length, 1, at)
                self._source.fill(page, target)
            return self._land(page, offset, [wanted], room, (0,))[0]

    def _direct(self, page: int, count: int) -> tuple[Memory | Block, Sequence[int]] | None:
        """Where these pages lie, if the device can copy from there."""
        match self._source:
            case MemorySource(memory=memory, offsets=offsets):
                return memory, offsets[page : page + count]
            case DeviceSource(memory=block, offsets=offsets) if self._is_on_device(block):
                return block, offsets[page : page + count]
            case _:
                return None

    def _is_on_device(self, block: Block) -> bool:
        return block.device.identity == self._hbm.device.identity

    def _room(self) -> AbstractContextManager[Memory]:
        """Host memory for as much as is asked of the source at once."""
        if isinstance(self._source, WaitingSource):
            return self._source.room(self._hbm.geometry.chunk_bytes)
        return self._hbm.sources.one()

    def _land(
        self,
        page: int,
        offset: int,
        wanted: list[int],
        source: Memory | Block,
        places: Sequence[int],
    ) -> bytes:
        """Copy neighbours from these places, then hash them where they lie now (I3)."""
        count = len(wanted)
        size, stride = self._start.message.part_bytes, self._start.size_class
        extents = Extents(offset, count, stride, size)
        try:
            found = self._hbm.fill(extents, source, places, self._seeds[page : page + count])
        except OutOfSpace as error:
            raise PullFailed(Outcome.OUT_OF_SPACE, str(error)) from error
        except Unavailable as error:
            raise PullFailed(Outcome.TRANSPORT, str(error)) from error
        return compared(found, wanted)
