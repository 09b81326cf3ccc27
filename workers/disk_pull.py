"""Pulls into a segment on a disk, and pages of such a segment as a source.

A page is brought to aligned memory, then the segment verifies, encodes, writes and seals it: a page
that its extent is too small for costs no write. Which extents may be pulled into was decided by
`workers.state`. Must not know who asked.
"""

from __future__ import annotations

import logging
import mmap
from array import array
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.ids import KEY_BYTES, Generation, PageKey
from kvstore.page import parents_of
from kvstore.record import Record, RecordState
from kvstore.segment import size_class_of
from kvstore.transfer.memory import address_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource
from workers.ingest import PullFailed, Target
from workers.tiers.part_io import Extent, PartToRead, PartToWrite

if TYPE_CHECKING:
    from workers.events import StartPull, Stretch
    from workers.ingest import Source
    from workers.tiers.nvme import NvmeSegment

LOG: Final = logging.getLogger(__name__)
BOUNCE_BYTES: Final = 4 * limits.MIB
"""Brought, then written, at once: enough to keep the disk's threads busy."""


class DiskPull:
    """One StartPull in progress (see `workers.ingest.Pull`)."""

    def __init__(self, segment: NvmeSegment, start: StartPull, source: Source) -> None:
        """Nothing is touched yet."""
        self.stored_max = 0
        """As in Ingested."""
        self._segment = segment
        self._start = start
        self._source = source
        self._offsets = array("Q", start.message.offsets)
        self._checksums = array("Q", start.message.checksums)
        self._parents = parents_of(start.message.parent, start.message.keys)
        self._stride = size_class_of(start.message.part_bytes)
        self._outcomes = bytearray((Outcome.FENCED,)) * len(self._offsets)
        self._is_cancelled = False

    def cancel(self) -> None:
        """End soon: pages not yet written end FENCED."""
        self._is_cancelled = True
        self._source.cancel()

    def run(self) -> bytes:
        """Pull everything; one Outcome byte a page of the request. Raises nothing.

        Afterwards nothing is written any more. Records are SEALED (for OK) or FREE; where the disk
        has failed some may be RESERVED, which no start adopts.
        """
        group = max(1, BOUNCE_BYTES // self._stride)
        try:
            bounce = memoryview(mmap.mmap(-1, group * self._stride))
        except OSError as error:
            LOG.warning("%s: no memory to pull through: %s", self._segment.id, error)
            return bytes((Outcome.OUT_OF_SPACE,)) * len(self._outcomes)
        for stretch in self._start.stretches:
            for done in range(0, stretch.count, group):
                if self._is_cancelled:
                    return bytes(self._outcomes)
                failed = self._pull(stretch, done, min(group, stretch.count - done), bounce)
                if failed is not None:
                    self._end(stretch, done, failed)
                    return bytes(self._outcomes)
        return bytes(self._outcomes)

    def _end(self, failed_in: Stretch, done: int, why: Outcome) -> None:
        """Give every page that was not pulled yet the same outcome."""
        if self._is_cancelled:
            return  # what a source says that was told to end is no news
        left = self._start.stretches[self._start.stretches.index(failed_in) :]
        for stretch in left:
            first = stretch.page + (done if stretch is failed_in else 0)
            stop = stretch.page + stretch.count
            self._outcomes[first:stop] = bytes((why,)) * (stop - first)

    def _pull(self, stretch: Stretch, done: int, count: int, bounce: memoryview) -> Outcome | None:
        """Bring and write some neighbours; why nothing more can be brought, or None."""
        page = stretch.page + done
        try:
            self._bring(page, count, bounce)
            if self._is_cancelled:
                return None
            written = self._segment.write(
                [self._part(page + i, bounce[i * self._stride :]) for i in range(count)]
            )
        except PullFailed as error:
            LOG.info("%s: pull failed: %s", self._segment.id, error)
            return error.outcome
        except Exception:
            LOG.exception("%s: pull failed", self._segment.id)
            return Outcome.TRANSPORT
        self._outcomes[page : page + count] = bytes(each.outcome for each in written)
        self.stored_max = max(self.stored_max, *(each.stored_bytes for each in written))
        return None

    def _bring(self, page: int, count: int, bounce: memoryview) -> None:
        """Ask the source for pages, as much at once as it gives."""
        size, stride = self._start.message.part_bytes, self._stride
        address, group = address_of(bounce), self._source.group_bytes
        if group < stride:
            for i in range(count):
                for start in range(0, size, group):
                    if self._is_cancelled:
                        return
                    at, length = i * stride + start, min(group, size - start)
                    view = bounce[at : at + length]
                    target = Target(view, address + at, length, length, 1, start)
                    self._source.fill(page + i, target)
            return
        for i in range(0, count, group // stride):
            if self._is_cancelled:
                return
            some, at = min(group // stride, count - i), i * stride
            view = bounce[at : at + some * stride]
            self._source.fill(page + i, Target(view, address + at, size, stride, some))

    def _part(self, page: int, place: memoryview) -> PartToWrite:
        message, keys = self._start.message, self._start.message.keys
        at = page * KEY_BYTES
        record = Record(
            RecordState.RESERVED, PageKey(keys[at : at + KEY_BYTES]), message.part,
            Generation(message.generation), self._segment.incarnation, message.part_bytes,
            self._checksums[page], self._offsets[page], self._start.size_class,
            message.namespace_ordinal,
            PageKey(self._parents[at : at + KEY_BYTES]), message.token_count,
        )  # fmt: skip
        return PartToWrite(record, place[: message.part_bytes])


class DiskSource:
    """Pages in a segment on a disk (see `workers.ingest.Source`), verified as they are read."""

    def __init__(self, segment: NvmeSegment, start: StartPull) -> None:
        """For a move; the state machine keeps its source extents as they are meanwhile."""
        source = start.message.source
        assert isinstance(source, ExtentSource), "only moves read a disk"
        self.group_bytes = max(BOUNCE_BYTES, size_class_of(start.message.part_bytes))
        self._segment = segment
        self._start = start
        self._offsets = array("Q", source.offsets)
        self._generations = array("Q", source.generations)

    def fill(self, page: int, target: Target) -> None:
        """Read; a page that proves damaged leaves zeros, which are not what its writer hashed."""
        parts = [
            self._part(page + i, target.view[at : at + target.size_bytes])
            for i, at in enumerate(range(0, target.count * target.stride, target.stride))
        ]
        if any(each.outcome is Outcome.TRANSPORT for each in self._segment.read(parts)):
            raise PullFailed(Outcome.TRANSPORT, f"{self._segment.id}: {self._segment.reason}")

    def cancel(self) -> None:
        """A group of reads ends by itself."""

    def _part(self, page: int, into: memoryview) -> PartToRead:
        at, message = page * KEY_BYTES, self._start.message
        return PartToRead(
            Extent(self._offsets[page], self._start.source_classes[page]),
            PageKey(message.keys[at : at + KEY_BYTES]), message.part,
            Generation(self._generations[page]), into,
        )  # fmt: skip
