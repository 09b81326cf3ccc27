"""A pull carried out: lock, RESERVED record, copy, hash, SEALED record, unlock (I3, I6b).

Runs in the thread of the connection that asked. Owns the order of these steps and what undoes them;
which extents may be pulled into was decided by `workers.state`. A `Source` brings the bytes: from a
client's buffer (here), a stream (here), or the transfer engine.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError, Unavailable
from kvstore.ids import KEY_BYTES, Generation, PageKey
from kvstore.page import checksum_seeds, seeded_checksum
from kvstore.record import Record, RecordBatch, RecordState
from kvstore.transfer.memory import copy_bytes
from kvstore.wire.messages.common import Outcome
from workers.events import Stretch

if TYPE_CHECKING:
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.puts import Ingest
    from kvstore.wire.messages.transfers import FindEngine
    from workers.events import StartPull
    from workers.sharing import ClientBuffer
    from workers.tiers.tier import Segment

LOG: Final = logging.getLogger(__name__)

GROUP_BYTES: Final = 1 * limits.MIB
"""Copied, then hashed while still in the cache; a cancelled pull stops between two groups."""
SCRATCH_BYTES: Final = 256 * limits.KIB


class PullFailed(KVStoreError):
    """A source cannot bring its bytes; `outcome` says why."""

    code = "pull_failed"

    def __init__(self, outcome: Outcome, text: str) -> None:
        """Every page not yet brought ends with this outcome."""
        super().__init__(text)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Target:
    """Extents that are neighbours, as the place to bring pages to."""

    view: memoryview
    address: int
    part_bytes: int
    stride: int
    """Bytes from one page's place to the next's; the gap belongs to nobody."""
    count: int


class Source(Protocol):
    """Where one request's pages come from. Used by one thread, but for `cancel`."""

    group_bytes: int
    """How much to ask for at once; what was asked for is hashed next."""

    def fill(self, page: int, target: Target) -> None:
        """Bring pages [page, page + target.count) of the request. Raises PullFailed.

        Pages are asked for in rising order, each at most once. When this returns or raises,
        nothing of it writes into the target any more.
        """
        ...

    def cancel(self) -> None:
        """Make a `fill` that runs in another thread end soon."""
        ...


class BufferSource:
    """Pages in a client's attached buffer: plain copies, neighbours in one."""

    group_bytes = GROUP_BYTES

    def __init__(self, buffer: ClientBuffer, offsets: array[int], part_bytes: int) -> None:
        """BadValue unless every page lies inside the buffer."""
        last = buffer.size_bytes - part_bytes
        if offsets and not 0 <= max(offsets) <= last:
            want = f"0 to {last}, for {part_bytes} bytes in a buffer of {buffer.size_bytes}"
            raise BadValue("source.offsets", max(offsets), want)
        self._base = buffer.address
        self._offsets = offsets

    def fill(self, page: int, target: Target) -> None:
        """Copy; runs of pages that are neighbours on both sides go at once."""
        offsets, size = self._offsets, target.part_bytes
        done = 0
        while done < target.count:
            start = offsets[page + done]
            run, expected = 1, start + size
            if target.stride == size:
                while done + run < target.count and offsets[page + done + run] == expected:
                    run, expected = run + 1, expected + size
            to = target.address + done * target.stride
            copy_bytes(to, self._base + start, run * size)
            done += run

    def cancel(self) -> None:
        """A group of copies ends by itself."""


class StreamSource:
    """Pages that follow the request's frame on its connection, without padding."""

    group_bytes = GROUP_BYTES

    def __init__(self, link: FrameSocket, pages: int, part_bytes: int, now_s: float) -> None:
        """Read from `link`; the whole must have come by one put timeout from `now_s`."""
        self._link = link
        self._pages = pages
        self._part_bytes = part_bytes
        self._deadline_s = now_s + limits.put_timeout_s(pages * part_bytes)
        self._next = 0

    def fill(self, page: int, target: Target) -> None:
        """Receive straight into the extents, past the pages that nobody wants."""
        self._skip_to(page)
        size, stride = target.part_bytes, target.stride
        starts = range(0, target.count * stride, stride)
        views = [target.view[start : start + size] for start in starts]
        self._receive([target.view] if stride == size else views)
        self._next += target.count

    @property
    def is_finished(self) -> bool:
        """Whether the next frame can be read."""
        return self._next == self._pages

    def finish(self) -> None:
        """Read past what is left. Unavailable when the connection has ended."""
        try:
            self._skip_to(self._pages)
        except PullFailed as error:
            raise Unavailable(str(error)) from error

    def cancel(self) -> None:
        """End the connection: what is in flight is not waited for."""
        self._link.shutdown()

    def _skip_to(self, page: int) -> None:
        left = (page - self._next) * self._part_bytes
        if not left:
            return
        scratch = memoryview(bytearray(min(left, SCRATCH_BYTES)))
        while left:
            piece = scratch[: min(left, len(scratch))]
            self._receive([piece])
            left -= len(piece)
        self._next = page

    def _receive(self, views: list[memoryview]) -> None:
        try:
            self._link.receive_raw_into(views, self._deadline_s)
        except Unavailable as error:
            self._link.shutdown()
            raise PullFailed(Outcome.SOURCE_LOST, str(error)) from error


class Pull:
    """One StartPull in progress. `run` is for one thread; `cancel` for any."""

    def __init__(self, segment: Segment, start: StartPull, source: Source) -> None:
        """Nothing is touched yet."""
        self._segment = segment
        self._start = start
        self._source = source
        self._keys = start.message.keys
        self._offsets = array("Q", start.message.offsets)
        self._checksums = array("Q", start.message.checksums)
        self._seeds = checksum_seeds(self._keys, start.message.part)
        self._outcomes = bytearray((Outcome.FENCED,)) * len(self._offsets)
        self._is_cancelled = False
        self._failed: Outcome | None = None

    def cancel(self) -> None:
        """End soon: pages not yet verified end FENCED."""
        self._is_cancelled = True
        self._source.cancel()

    def run(self) -> bytes:
        """Pull everything; one Outcome byte a page of the request. Raises nothing.

        Afterwards every record is SEALED (for OK) or FREE, and every lock is given back.
        """
        for stretch in self._start.stretches:
            try:
                self._pull(stretch)
            except Exception:  # ours, or a system that refuses locks: the extent stays FREE
                LOG.exception("%s: pull failed", self._segment.id)
                page, stop = stretch.page, stretch.page + stretch.count
                self._outcomes[page:stop] = bytes((Outcome.TRANSPORT,)) * stretch.count
        return bytes(self._outcomes)

    def _pull(self, stretch: Stretch) -> None:
        size_class, locks = self._start.size_class, self._segment.locks
        granted = locks.try_lock(stretch, size_class)
        try:
            for part in _runs(stretch, granted, size_class):
                self._pull_locked(part)
        finally:
            locks.unlock(stretch, size_class)
        if not all(granted):
            for i, is_granted in enumerate(granted):
                if not is_granted:
                    self._outcomes[stretch.page + i] = Outcome.BUSY

    def _pull_locked(self, stretch: Stretch) -> None:
        """Fill a locked stretch; its records end SEALED or FREE, whatever happens."""
        page, stop = stretch.page, stretch.page + stretch.count
        size_class, records = self._start.size_class, self._segment.records
        try:
            records.require(stretch, size_class)
        except OSError as error:
            LOG.warning("%s: no memory for a record table: %s", self._segment.id, error)
            self._outcomes[page:stop] = bytes((Outcome.OUT_OF_SPACE,)) * stretch.count
            return
        batch = self._records(stretch)
        records.write(stretch, batch, 0, stretch.count)
        self._outcomes[page:stop] = self._fill(stretch)
        batch.restate(RecordState.SEALED)
        if not any(self._outcomes[page:stop]):
            records.write(stretch, batch, 0, stretch.count)
            return
        for i in range(stretch.count):
            each = _part(stretch, i, 1, size_class)
            if self._outcomes[page + i] == Outcome.OK:
                records.write(each, batch, i, i + 1)
            else:
                records.write_free(each, size_class)

    def _records(self, stretch: Stretch) -> RecordBatch:
        message, page, stop = self._start.message, stretch.page, stretch.page + stretch.count
        keys = self._keys[page * KEY_BYTES : stop * KEY_BYTES]
        parent = message.parent if not page else self._keys[(page - 1) * KEY_BYTES :][:KEY_BYTES]
        first = Record(
            RecordState.RESERVED, PageKey(keys[:KEY_BYTES]), message.part,
            Generation(message.generation), self._segment.incarnation, message.part_bytes,
            self._checksums[page], self._offsets[page], self._start.size_class,
            message.namespace_ordinal, PageKey(parent), message.token_count,
            stored_bytes=message.part_bytes,
        )  # fmt: skip
        return RecordBatch(first, keys, self._offsets[page:stop], self._checksums[page:stop])

    def _fill(self, stretch: Stretch) -> bytes:
        """Copy and hash in groups; an Outcome a page."""
        outcomes = bytearray()
        step = max(1, self._source.group_bytes // self._start.size_class)
        for start in range(0, stretch.count, step):
            count = min(step, stretch.count - start)
            part = _part(stretch, start, count, self._start.size_class)
            try:
                if self._failed is None and not self._is_cancelled:
                    outcomes += self._fill_group(part)
                    continue
            except PullFailed as error:
                LOG.info("%s: pull failed: %s", self._segment.id, error)
                self._failed = error.outcome
            except Exception:
                LOG.exception("%s: pull failed", self._segment.id)
                self._failed = Outcome.TRANSPORT
            why = Outcome.FENCED if self._is_cancelled or self._failed is None else self._failed
            outcomes += bytes((why,)) * count
        return bytes(outcomes)

    def _fill_group(self, part: Stretch) -> bytes:
        stride, size, segment = (
            self._start.size_class, self._start.message.part_bytes, self._segment,
        )  # fmt: skip
        view = segment.payload[part.offset : part.offset + part.count * stride]
        address = segment.payload_address + part.offset
        target = Target(view, address, size, stride, part.count)
        self._source.fill(part.page, target)
        outcomes = bytearray(part.count)
        seeds, wanted = self._seeds, self._checksums
        for i, page in enumerate(range(part.page, part.page + part.count)):
            # payload_checksum, of the extent and not of the source (I3)
            at = i * stride
            if seeded_checksum(view[at : at + size], seeds[page]) != wanted[page]:
                outcomes[i] = Outcome.CHECKSUM
        return bytes(outcomes)


def _part(stretch: Stretch, start: int, count: int, size_class: int) -> Stretch:
    """Extents [start, start + count) of a stretch."""
    return Stretch(
        stretch.page + start, count, stretch.chunk_start, stretch.slot + start,
        stretch.offset + start * size_class,
    )  # fmt: skip


def _runs(stretch: Stretch, granted: bytes, size_class: int) -> list[Stretch]:
    """The locked extents of a stretch, as runs of neighbours."""
    if all(granted):
        return [stretch]
    found: list[Stretch] = []
    start = granted.find(1)
    while start >= 0:
        stop = granted.find(0, start)
        stop = stretch.count if stop < 0 else stop
        found.append(_part(stretch, start, stop - start, size_class))
        start = granted.find(1, stop)
    return found


class EngineDesk(Protocol):
    """What a worker with the `mooncake` transport adds: pulls by the transfer engine."""

    def source(self, message: Ingest) -> Source:
        """The pages of an EngineSource. Raises BadValue for columns that do not fit."""
        ...

    def find(self, message: FindEngine) -> Message:
        """The answer to FindEngine. Raises a typed error where the segment is not served."""
        ...
