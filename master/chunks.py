"""Chunks of a segment: the state of every slot, and which page each was planned for.

The latter leads from a place back to the directory. Only master.extent_allocator changes them.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.ids import KEY_BYTES
from kvstore.record import sealed_digest
from kvstore.replica import ExtentState

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEALED: Final = int(ExtentState.SEALED)
_STRETCHES: Final = {
    state: re.compile(re.escape(bytes((int(state),))) + b"+") for state in ExtentState
}
_SEALED_SLOTS: Final = _STRETCHES[ExtentState.SEALED]


class Chunk(msgspec.Struct, gc=False, eq=False):
    """Slots of one size class. Columns have one entry a slot; those of FREE slots mean nothing."""

    start: int
    """Payload offset of slot 0, in bytes."""
    size_class: int
    slots: int
    frames: int
    states: bytearray
    generations: array[int]
    keys: bytearray
    """The page that each slot was planned for, 32 bytes a slot."""
    namespaces: array[int]
    """Ordinal of that page's namespace."""
    free: int
    """Slots in state FREE."""
    hint: int = 0
    """Slot at which the search for free ones goes on."""
    place: int = 0
    """Index in the allocator's list of chunks."""
    closed: bool = False
    """Nothing is planned here: the chunk is being emptied."""

    def key(self, slot: int) -> bytes:
        """Key of the page in `slot`."""
        return bytes(self.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def offset(self, slot: int) -> int:
        """Payload offset of `slot`."""
        return self.start + slot * self.size_class

    def slots_in(self, state: ExtentState, first: int = 0) -> Iterator[int]:
        """Slots in `state`, ascending, from `first`."""
        slot = self.states.find(state, first)
        while slot >= 0:
            yield slot
            slot = self.states.find(state, slot + 1)

    def stretches_in(self, state: ExtentState) -> Iterator[tuple[int, int]]:
        """(first, stop) of each stretch of slots in `state`, ascending."""
        return (match.span() for match in _STRETCHES[state].finditer(bytes(self.states)))

    def next_sealed(self, slot: int) -> tuple[int, int] | None:
        """(first, stop) of the next stretch of SEALED slots from `slot` on."""
        match = _SEALED_SLOTS.search(self.states, slot)
        return None if match is None else match.span()

    def sealed_digest(self) -> int:
        """What its worker's digest is if it lists exactly the extents that are SEALED here."""
        slots, generations = array("H"), array("Q")
        stop = 0
        while (found := self.next_sealed(stop)) is not None:
            first, stop = found
            slots.extend(range(first, stop))
            generations.extend(self.generations[first:stop])
        return sealed_digest(slots, generations)


class Span(msgspec.Struct, gc=False, frozen=True, eq=False):
    """Neighbouring slots of one chunk."""

    chunk: Chunk
    slot: int
    count: int

    def offsets(self) -> bytes:
        """Packed u64 payload offsets."""
        chunk = self.chunk
        first = chunk.start + self.slot * chunk.size_class
        last = first + self.count * chunk.size_class
        return array("Q", range(first, last, chunk.size_class)).tobytes()

    def holds(self, generation: int) -> bool:
        """Whether the first slot is SEALED with this generation."""
        chunk, slot = self.chunk, self.slot
        return chunk.states[slot] == _SEALED and chunk.generations[slot] == generation

    def part(self, first: int, count: int) -> Span:
        """Slots [first, first + count) of this span."""
        assert 0 <= first < first + count <= self.count, (first, count, self.count)
        return Span(self.chunk, self.slot + first, count)


class Occupants(msgspec.Struct, gc=False, frozen=True):
    """What neighbouring extents are held for."""

    keys: bytes
    """Packed, one an extent."""
    namespace: int
    generation: int
