"""Pages that the client's transfer engine serves: the third kind of source for a pull.

Turns what `workers.ingest` asks for into copies by the engine's children. Must not know records,
locks or how the bytes travel.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError, OutOfSpace
from kvstore.ids import KEY_BYTES, SegmentId
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import EngineSource
from workers.engine_child import LANDING, check_peer
from workers.ingest import PullFailed, WaitingSource
from workers.tiers.hbm import HbmSegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.clock import Clock
    from kvstore.transfer.memory import Memory
    from kvstore.wire.messages.puts import Ingest
    from kvstore.wire.messages.transfers import EngineFound, FindEngine
    from workers.engine_child import EngineChild, EngineCopy
    from workers.ingest import Target
    from workers.landing import Landing
    from workers.tiers.tier import MemorySegment

GROUP_BYTES: Final = 16 * limits.MIB
"""Asked of the engine at once: a request costs about 0.1 ms, whatever its size."""


class EngineDesk:
    """See `workers.ingest.EngineDesk`."""

    def __init__(
        self, child: EngineChild, segments: Iterable[MemorySegment | HbmSegment], clock: Clock
    ) -> None:
        """`child` serves exactly these segments, and stays the caller's to close."""
        self._child = child
        self._segments = {segment.id: segment for segment in segments}
        self._clock = clock

    def source(self, message: Ingest) -> EnginePages:
        """The pages that a client's engine serves. BadValue for columns that do not fit."""
        assert isinstance(message.source, EngineSource), message
        segment = self._segments.get(SegmentId(message.segment))
        if segment is None:
            raise BadValue("segment", message.segment, "a segment of this worker")
        want = len(message.keys) // KEY_BYTES * 8
        if len(message.source.addresses) != want:
            raise BadValue("source.addresses", len(message.source.addresses), f"{want} bytes")
        check_peer(message.source.peer)
        # The whole must have come by one put timeout from now.
        size = len(message.keys) // KEY_BYTES * message.part_bytes
        deadline_s = self._clock.now_s() + limits.put_timeout_s(size)
        copy = self._child.copy()
        if isinstance(segment, HbmSegment):
            assert self._child.landing is not None, "made for devices"
            return LandedPages(copy, self._child.landing, message.source, deadline_s)
        where = segment.payload_address
        return EnginePages(copy, segment.id, where, message.source, deadline_s)

    def find(self, message: FindEngine) -> EngineFound:
        """Where the segment is served. BadValue for a stranger or another life of it (I11)."""
        segment = self._segments.get(SegmentId(message.segment))
        if segment is None or segment.incarnation != message.incarnation:
            want = "a segment of this worker, in the life that it is in"
            raise BadValue("segment", f"{message.segment}, {message.incarnation}", want)
        return self._child.find(segment.id)

    def withdraw(self, segment: str, chunks: Sequence[int]) -> None:
        """See EngineChild.withdraw."""
        self._child.withdraw(segment, chunks)


class EnginePages:
    """See `workers.ingest.Source`."""

    group_bytes = GROUP_BYTES

    def __init__(
        self, copy: EngineCopy, region: str, address: int, source: EngineSource, deadline_s: float
    ) -> None:
        """Pages for a region of the engine's children, which this process has at `address`."""
        self._peer = source.peer
        self._addresses = array("Q", source.addresses)
        self._region = region
        self._address = address
        self._copy = copy
        self._deadline_s = deadline_s

    def fill(self, page: int, target: Target) -> None:
        """Copy one group of pages. When this raises, the engine that was at it has ended (I6)."""
        first = target.address - self._address
        offsets = array("Q", range(first, first + target.count * target.stride, target.stride))
        places = self._addresses[page : page + target.count]
        addresses = array("Q", (place + target.start for place in places))
        source = EngineSource(self._peer, addresses.tobytes())
        try:
            self._copy.run(
                self._region, source, offsets.tobytes(), target.size_bytes, self._deadline_s
            )
        except KVStoreError as error:
            raise PullFailed(Outcome.TRANSPORT, str(error)) from error

    def cancel(self) -> None:
        """End the copy that runs, and refuse the next."""
        self._copy.cancel()


class LandedPages(EnginePages, WaitingSource):
    """The same for a device, which copies them on from where they land."""

    def __init__(
        self, copy: EngineCopy, landing: Landing, source: EngineSource, deadline_s: float
    ) -> None:
        """Pages for rooms of `landing`."""
        super().__init__(copy, LANDING, landing.address, source, deadline_s)
        self._landing = landing

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[Memory]:
        """A room of the landing, which are of a chunk each."""
        assert size_bytes <= self._landing.room_bytes, size_bytes
        with ExitStack() as held:
            try:
                room = held.enter_context(self._landing.one(self._deadline_s))
            except OutOfSpace as error:
                raise PullFailed(Outcome.TRANSPORT, str(error)) from error
            yield room
