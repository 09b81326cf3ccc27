"""The extents that this worker holds and who is at work on them.

A *work* is a pull, a free, a removal or a check: it has its extents, and those that it copies, to
itself from `begin` to `end` (one pull per extent and generation, nothing else meanwhile: I6).
Shared by the parts of the state machine; must not know requests, commands or the link.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from kvstore.errors import InvariantBroken
from kvstore.record import RecordState
from workers.events import ExtentGroup
from workers.extent_table import NOBODY, ChunkTable, SegmentTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from workers.events import Stretch


class WorkKind(Enum):
    """What is being done with extents."""

    PULL = "pull"
    FREE = "free"
    REMOVE = "remove"
    CHECK = "check"


class Place(msgspec.Struct, frozen=True, gc=False):
    """One extent."""

    chunk: ChunkTable
    slot: int

    @property
    def is_busy(self) -> bool:
        """Whether somebody is at work on it."""
        return self.chunk.works[self.slot] != NOBODY


class Work(msgspec.Struct, gc=False):
    """Extents in use by one piece of work. `owner` is the request or command that it is for."""

    id: int
    kind: WorkKind
    owner: int
    table: SegmentTable
    extents: ExtentGroup
    generation: int = 0
    """Of a pull; 0 for other kinds."""
    sources: tuple[Place, ...] = ()
    """Sealed extents that a move copies: busy as well, so that nothing frees them meanwhile."""
    is_cancelled: bool = False


class Holdings:
    """Segments by name, works by number, and the extents that a reader's lock holds back."""

    def __init__(self, segments: Iterable[SegmentTable]) -> None:
        """Hold these segments; nobody is at work."""
        self.segments: dict[str, SegmentTable] = {table.segment: table for table in segments}
        self.works: dict[int, Work] = {}
        self.held: set[tuple[str, int]] = set()
        """(segment, offset) of extents that are FREE but for a reader's lock."""
        self._last_number = 0

    def next_number(self) -> int:
        """A number never used before, for works and calls."""
        self._last_number += 1
        return self._last_number

    def find(self, segment: str, incarnation: int) -> SegmentTable | None:
        """The segment in that life; None for a stranger or another life (I11)."""
        table = self.segments.get(segment)
        return table if table is not None and table.incarnation == incarnation else None

    def begin(
        self,
        kind: WorkKind,
        owner: int,
        extents: ExtentGroup,
        generation: int = 0,
        sources: tuple[Place, ...] = (),
    ) -> Work:
        """Start a work on extents that are idle: it has them from here on."""
        table = self.segments[extents.segment]
        work = Work(self.next_number(), kind, owner, table, extents, generation, sources)
        for stretch in extents.stretches:
            table.chunks[stretch.chunk_start].occupy(stretch, work.id)
        for place in sources:
            place.chunk.works[place.slot] = work.id
        self.works[work.id] = work
        return work

    def at(self, chunk: ChunkTable, slot: int) -> Work | None:
        """The work that has this extent; None while it is idle."""
        number = chunk.works[slot]
        return None if number == NOBODY else self.works[number]

    def pulls(self) -> list[Work]:
        """The pulls that run now."""
        return [work for work in self.works.values() if work.kind is WorkKind.PULL]

    def note_locks(self, extents: ExtentGroup, refused: Iterable[bool]) -> None:
        """Count extents whose exclusive lock was refused, and those that have come free."""
        answers = iter(refused)
        for stretch in extents.stretches:
            for i in range(stretch.count):
                place = (extents.segment, stretch.offset + i * extents.size_class)
                (self.held.add if next(answers) else self.held.discard)(place)

    def check_invariants(self) -> None:
        """Raise InvariantBroken unless columns and works agree, and pulls are what they say."""
        busy: dict[tuple[int, int], int] = {}
        for number, work in self.works.items():
            for chunk, slot in self._extents_of(work):
                place = (id(chunk), slot)
                if busy.setdefault(place, number) != number:
                    raise InvariantBroken(
                        f"I6 works {busy[place]} and {number} have slot {slot} of {chunk.start}"
                    )
        for table in self.segments.values():
            table.check_invariants()
            for chunk in table.chunks.values():
                for slot, number in enumerate(chunk.works):
                    if number != busy.get((id(chunk), slot), NOBODY):
                        raise InvariantBroken(
                            f"I6 work {number} has no slot {slot} of {chunk.start}"
                        )
                    if chunk.states[slot] == RecordState.RESERVED and number == NOBODY:
                        raise InvariantBroken(f"I6 slot {slot} of {chunk.start} waits for nobody")

    def _extents_of(self, work: Work) -> Iterator[tuple[ChunkTable, int]]:
        for stretch in work.extents.stretches:
            self._check_stretch(work, stretch)
            chunk = work.table.chunks[stretch.chunk_start]
            for slot in range(stretch.slot, stretch.slot + stretch.count):
                yield chunk, slot
        for place in work.sources:
            if place.chunk.states[place.slot] != RecordState.SEALED:
                raise InvariantBroken(f"I6 pull {work.id} copies slot {place.slot}, not sealed")
            yield place.chunk, place.slot

    def _check_stretch(self, work: Work, stretch: Stretch) -> None:
        if work.kind is not WorkKind.PULL:
            return
        chunk = work.table.chunks[stretch.chunk_start]
        for slot in range(stretch.slot, stretch.slot + stretch.count):
            seen = (chunk.states[slot], chunk.generations[slot])
            if seen != (RecordState.RESERVED, work.generation):
                raise InvariantBroken(f"I6 pull {work.id} of slot {slot}: record says {seen}")
