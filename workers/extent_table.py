"""What lies in each extent of a segment, as its worker decided it: columns, one table a chunk.

Pure mirror of the record tables, plus what records do not keep: which extents a pull or a free
is at work on, and how the last pull of a generation ended. `workers.state` is its only user; the
bytes on the segment are `workers.record_table`'s.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import BadValue, InvariantBroken
from kvstore.ids import Generation
from kvstore.record import RecordState, chunk_digest
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import ChunkDigest
from workers.events import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.ids import Incarnation, SegmentId
    from kvstore.segment import Geometry

NOBODY: Final = 0
"""In a chunk's column of works: works are numbered from 1."""
_WRITTEN: Final = (Outcome.OK, Outcome.BUSY)


class SealedExtent(Protocol):
    """What is known of one from its record."""

    @property
    def offset(self) -> int: ...
    @property
    def size_class(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def checksum(self) -> int: ...


class ChunkTable:
    """Columns of one chunk, indexed by slot.

    `states` holds RecordState. `generations` is the generation of the record, or for a FREE one
    the highest that was ever refused here: it never falls. `outcomes` tells how the last pull of
    that generation ended. `checksums` is the writer's, meaningful while SEALED. `works` is the
    number of the pull or other piece of work that has the extent, which is busy then. `verified`
    tells whether its payload was hashed since the scrubber came by last; meaningful while SEALED.
    """

    __slots__ = (
        "checksums",
        "generations",
        "outcomes",
        "size_class",
        "start",
        "states",
        "verified",
        "works",
    )

    def __init__(self, start: int, size_class: int, slots: int, floor: int) -> None:
        """An empty chunk in which generations up to `floor` are refused."""
        self.start = start
        self.size_class = size_class
        self.states = bytearray(slots)
        self.outcomes = bytearray([Outcome.FENCED]) * slots
        self.generations = array("Q", [floor]) * slots
        self.checksums = array("Q", [0]) * slots
        self.works = array("Q", [NOBODY]) * slots
        self.verified = bytearray(slots)

    @property
    def is_idle(self) -> bool:
        """Whether every extent is FREE and nobody is at work: the chunk may be cut anew."""
        return not any(self.states) and not any(self.works)

    def is_busy(self, stretch: Stretch) -> bool:
        """Whether somebody is at work on any extent of the stretch."""
        return any(self.works[stretch.slot : stretch.slot + stretch.count])

    def occupied(self) -> Iterator[tuple[int, int, int]]:
        """(slot, state, generation) of each extent that is not FREE, in slot order."""
        for slot, state in enumerate(self.states):
            if state:
                yield slot, state, self.generations[slot]

    def digest(self) -> ChunkDigest | None:
        """The chunk's line in an inventory; None when it is empty."""
        rows = list(self.occupied())
        return ChunkDigest(self.start, self.size_class, chunk_digest(rows)) if rows else None

    def reserve(self, stretch: Stretch, generation: int, checksums: array[int]) -> None:
        """Give FREE extents to a pull; `checksums` are those of the stretch's pages."""
        first, stop = stretch.slot, stretch.slot + stretch.count
        self.states[first:stop] = bytes((RecordState.RESERVED,)) * stretch.count
        self.generations[first:stop] = array("Q", [generation]) * stretch.count
        self.checksums[first:stop] = checksums

    def settle(self, stretch: Stretch, outcomes: bytes) -> None:
        """End a pull of this stretch: OK becomes SEALED, the rest FREE; outcomes are kept."""
        first, stop = stretch.slot, stretch.slot + stretch.count
        if outcomes.count(Outcome.OK) == stretch.count:
            self.states[first:stop] = bytes((RecordState.SEALED,)) * stretch.count
        else:
            sealed, free = RecordState.SEALED, RecordState.FREE
            states = (free if outcome else sealed for outcome in outcomes)
            self.states[first:stop] = bytes(states)
        self.outcomes[first:stop] = outcomes
        self.verified[first:stop] = b"\1" * stretch.count
        self.vacate(stretch)

    def restate(self, stretch: Stretch, outcomes: bytes, state: RecordState) -> None:
        """Records were written, where the outcome is OK, or BUSY because of a reader's lock."""
        if not any(outcomes):
            first, stop = stretch.slot, stretch.slot + stretch.count
            self.states[first:stop] = bytes((state,)) * stretch.count
            return
        for slot, outcome in enumerate(outcomes, stretch.slot):
            if outcome in _WRITTEN:
                self.states[slot] = state

    def note_verified(self, stretch: Stretch, outcomes: bytes) -> None:
        """Sealed extents were hashed, and are what they should be where the outcome is OK."""
        for slot, outcome in enumerate(outcomes, stretch.slot):
            if outcome == Outcome.OK:
                self.verified[slot] = True

    def unverified(self, first: int, stop: int) -> list[int]:
        """Slots of [first, stop) that are sealed, idle, and not verified since they were asked
        for here last.
        """
        rows = zip(
            self.states[first:stop], self.verified[first:stop], self.works[first:stop], strict=True
        )
        idle = (RecordState.SEALED, False, NOBODY)
        found = [slot for slot, row in enumerate(rows, first) if row == idle]
        self.verified[first:stop] = bytes(stop - first)
        return found

    def occupy(self, stretch: Stretch, work: int) -> None:
        """Give extents to a work; they must be idle."""
        first, stop = stretch.slot, stretch.slot + stretch.count
        self.works[first:stop] = array("Q", [work]) * stretch.count

    def vacate(self, stretch: Stretch) -> None:
        """Undo `occupy`."""
        first, stop = stretch.slot, stretch.slot + stretch.count
        self.works[first:stop] = array("Q", [NOBODY]) * stretch.count


class SegmentTable:
    """Chunks of one segment, cut as requests name them and cut anew when they have emptied."""

    __slots__ = (
        "_chunk_of_frame",
        "_cuts",
        "_floors",
        "_frame_bytes",
        "can_shrink",
        "chunks",
        "geometry",
        "holds_encoded",
        "incarnation",
        "released",
        "segment",
    )

    def __init__(
        self,
        segment: SegmentId,
        incarnation: Incarnation,
        geometry: Geometry,
        *,
        holds_encoded: bool = False,
        can_shrink: bool = False,
    ) -> None:
        """A segment of this life in which nothing lies.

        `holds_encoded`: parts may lie in extents of a smaller class than their own length's.
        `can_shrink`: chunks can be given back one by one.
        """
        self.holds_encoded = holds_encoded
        self.can_shrink = can_shrink
        self.segment = segment
        self.incarnation = incarnation
        self.geometry = geometry
        self.chunks: dict[int, ChunkTable] = {}
        self.released: set[int] = set()
        """Numbers of whole chunks whose memory was given back."""
        self._cuts: dict[int, tuple[int, int]] = {}
        """Bytes and slots of a chunk by size class, of classes that were asked for."""
        self._frame_bytes = geometry.frame_bytes
        self._chunk_of_frame: list[ChunkTable | None] = [None] * geometry.frames
        self._floors = array("Q", [0]) * geometry.frames

    def adopt(self, extents: Iterable[SealedExtent]) -> None:
        """Enter what was found SEALED at the start. They do not overlap."""
        for extent in extents:
            chunk = self.cut(extent.offset, extent.size_class)
            if chunk is None:
                raise InvariantBroken(f"{self.segment}: records overlap at {extent.offset}")
            slot = (extent.offset - chunk.start) // chunk.size_class
            chunk.states[slot] = RecordState.SEALED
            chunk.generations[slot] = extent.generation
            chunk.checksums[slot] = extent.checksum
            chunk.outcomes[slot] = Outcome.OK

    def cut(self, offset: int, size_class: int) -> ChunkTable | None:
        """The chunk of `size_class` around `offset`, made if need be.

        None while extents of another class lie there, or work on them is going on.
        """
        found = self.chunk_around(offset)
        if found is not None and found.size_class == size_class:
            return found
        start = self.geometry.chunk_start(offset, size_class)
        first = start // self._frame_bytes
        frames = range(first, first + self.geometry.chunk_frames(size_class))
        there = (self._chunk_of_frame[frame] for frame in frames)
        others = {chunk.start: chunk for chunk in there if chunk is not None}
        if not all(chunk.is_idle for chunk in others.values()):
            return None
        for chunk in others.values():
            self._drop(chunk)
        slots = self.geometry.chunk_slots(size_class)
        made = ChunkTable(start, size_class, slots, max(self._floors[f] for f in frames))
        self.chunks[start] = made
        for frame in frames:
            self._chunk_of_frame[frame] = made
        return made

    def release(self, numbers: Sequence[int]) -> None:
        """Note that whole chunks have no memory any more.

        BadValue, and nothing is noted, where there is no such chunk or something lies there.
        """
        if not self.can_shrink:
            raise BadValue("segment", self.segment, "one whose chunks can be given back")
        length = self.geometry.chunk_bytes
        count = self.geometry.payload_bytes // length
        for number in numbers:
            if not 0 <= number < count:
                raise BadValue("chunks", number, f"0 to {count - 1}")
            inside = range(number * length, (number + 1) * length, self._frame_bytes)
            there = (self.chunk_around(offset) for offset in inside)
            if not all(chunk is None or chunk.is_idle for chunk in there):
                raise BadValue("chunks", number, "chunks in which nothing lies")
        self.released.update(numbers)

    def chunk_around(self, offset: int) -> ChunkTable | None:
        """The chunk, of whatever class, in which this payload offset lies."""
        frame = offset // self._frame_bytes
        return self._chunk_of_frame[frame] if frame < len(self._chunk_of_frame) else None

    def slot_at(self, offset: int) -> tuple[ChunkTable, int] | None:
        """The extent at this payload offset, whatever its class; None where none begins."""
        chunk = self.chunk_around(offset)
        if chunk is None:
            return None
        slot, rest = divmod(offset - chunk.start, chunk.size_class)
        return None if rest or slot >= len(chunk.states) else (chunk, slot)

    def check_class(self, size_class: int, part_bytes: int) -> None:
        """BadValue unless parts of this length may lie in extents of this class here."""
        if not 0 < part_bytes <= self.geometry.chunk_bytes:
            raise BadValue("part_bytes", part_bytes, f"1 to {self.geometry.chunk_bytes}")
        full = size_class_of(part_bytes)
        least = size_class_of(1) if self.holds_encoded else full
        if not least <= size_class <= full or size_class_of(size_class) != size_class:
            want = f"{least} to {full}, a multiple of {size_class_of(1)}"
            raise BadValue("size_class", size_class, want)

    def _drop(self, chunk: ChunkTable) -> None:
        """Forget an idle chunk, but not which generations its extents refuse (I6)."""
        floor = max(chunk.generations)
        for frame in self._frames(chunk):
            self._chunk_of_frame[frame] = None
            self._floors[frame] = max(self._floors[frame], floor)
        del self.chunks[chunk.start]

    def _frames(self, chunk: ChunkTable) -> range:
        first = chunk.start // self._frame_bytes
        return range(first, first + self.geometry.chunk_frames(chunk.size_class))

    def stretches(self, size_class: int, offsets: array[int]) -> tuple[Stretch, ...]:
        """`offsets` as runs of neighbours. BadValue unless all are distinct extents in place."""
        geometry, found, page, count = self.geometry, list[Stretch](), 0, len(offsets)
        if not count:
            return ()
        span, slots = self._cuts.get(size_class) or self._cut_of(size_class, offsets[0])
        room = geometry.payload_bytes - size_class
        chunk_end = 0  # compared as a whole from here on: most requests are one row of neighbours
        while page < count:
            offset = offsets[page]
            start = offset // span * span
            slot, rest = divmod(offset - start, size_class)
            if rest or slot >= slots or offset > room:
                geometry.check_extent(offset, size_class)  # says what is wrong with it
            stop = min(count, page + slots - slot)
            last = page + 1
            if page == chunk_end and offsets[page:stop] == _row(offset, stop - page, size_class):
                last = chunk_end = stop
            else:
                while last < stop and offsets[last] == offset + (last - page) * size_class:
                    last += 1
            found.append(Stretch(page, last - page, start, slot, offset))
            page = last
        if len(found) > 1 and len(set(offsets)) != count:
            raise BadValue("offsets", list(offsets), "distinct extents")
        return tuple(found)

    def _cut_of(self, size_class: int, offset: int) -> tuple[int, int]:
        """(bytes, slots) of a chunk of this class; BadValue unless it can have one at `offset`."""
        geometry = self.geometry
        geometry.check_extent(offset, size_class)
        cut = geometry.chunk_span(size_class), geometry.chunk_slots(size_class)
        self._cuts[size_class] = cut
        return cut

    def digests(self) -> tuple[ChunkDigest, ...]:
        """The segment's inventory: a line for each chunk that holds anything."""
        lines = (self.chunks[start].digest() for start in sorted(self.chunks))
        return tuple(line for line in lines if line is not None)

    def highest_generation(self) -> Generation:
        """Of all records, and of all that was ever refused here; 0 where there was nothing."""
        columns = (self._floors, *(chunk.generations for chunk in self.chunks.values()))
        return Generation(max(map(max, columns)))

    def check_invariants(self) -> None:
        """Raise InvariantBroken unless chunks and frames agree and columns are of one length."""
        for start, chunk in self.chunks.items():
            frames = self._frames(chunk)
            mine = all(self._chunk_of_frame[frame] is chunk for frame in frames)
            if not mine or chunk.start != start:  # I5
                raise InvariantBroken(f"I5 {self.segment}: chunk {start} lacks frames {frames}")
            columns = (
                chunk.states, chunk.works, chunk.outcomes, chunk.generations, chunk.checksums,
                chunk.verified,
            )  # fmt: skip
            if len({len(column) for column in columns}) != 1:
                raise InvariantBroken(f"{self.segment}: columns of chunk {start} differ in length")


def _row(offset: int, count: int, size_class: int) -> array[int]:
    """The offsets of `count` neighbours."""
    return array("Q", range(offset, offset + count * size_class, size_class))
