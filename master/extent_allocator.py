"""Extents of one segment: chunks by size class, the state of every slot, bytes by state.

The only place where an extent's state changes, always by replica.EXTENT_TRANSITIONS (I6), and so
the only place that counts space (I17), and that tells of what is SEALED no more, or now. Must not
know workers, plans, leases or pages beyond their keys.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.errors import IllegalTransition, InvariantBroken
from kvstore.ids import KEY_BYTES
from kvstore.replica import EXTENT_TRANSITIONS, ExtentEvent, ExtentState
from master.chunks import Chunk, Occupants, Span
from master.frame_map import LENGTHS, FrameMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.segment import Geometry

FREE: Final = int(ExtentState.FREE)
_SEALED: Final = int(ExtentState.SEALED)
_PLANNED: Final = ExtentEvent.PLANNED
_AFTER: Final[dict[ExtentEvent, dict[int, int]]] = {
    event: {int(a): int(b) for (a, e), b in EXTENT_TRANSITIONS.items() if e is event}
    for event in ExtentEvent
}


def _unheard(_chunk_start: int, _after: int) -> None:
    """Nobody wants to know."""


class ExtentAllocator:
    """The space of one segment."""

    __slots__ = (
        "_open",
        "bytes_in",
        "changed",
        "chunk_list",
        "chunks",
        "frame_map",
        "geometry",
        "sealed",
        "slack_bytes",
    )

    def __init__(self, geometry: Geometry) -> None:
        """Start with everything free and no chunk cut."""
        self.geometry = geometry
        self.frame_map = FrameMap(geometry.frames)
        self.chunks: dict[int, Chunk] = {}
        """By the offset at which they start."""
        self.chunk_list: list[Chunk] = []
        """The same ones in no order, for sampling."""
        self._open: dict[int, dict[int, Chunk]] = {}  # chunks with free slots, by class and start
        self.bytes_in = [0] * len(ExtentState)
        """Bytes of slots in each state; FREE counts those in chunks only."""
        self.sealed = 0
        """Slots that are."""
        self.slack_bytes = 0
        """What chunks are longer than their slots."""
        self.changed: Callable[[int, int], None] = _unheard
        """Hears of every chunk some of whose extents became or ceased to be SEALED: its start, and
        their state now."""

    @property
    def capacity_bytes(self) -> int:
        """What can be used, in whole chunks."""
        gone = len(self.frame_map.withheld_chunks) * self.geometry.chunk_bytes
        return self.geometry.payload_bytes - gone

    @property
    def free_bytes(self) -> int:
        """Capacity less everything in use."""
        out = len(self.frame_map.withheld) * self.geometry.frame_bytes
        return self.geometry.payload_bytes - out - self.used_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are not FREE."""
        return sum(self.bytes_in) - self.bytes_in[FREE]

    def has_room(self, size_class: int) -> bool:
        """Whether one extent of this class can be planned."""
        if self._open.get(size_class):
            return True
        return self.frame_map.has(self.geometry.chunk_frames(size_class))

    def plan(self, size_class: int, generation: int, namespace: int, keys: bytes) -> list[Span]:
        """Reserve extents for as many of the leading `keys` as there is room for, in that order."""
        spans: list[Span] = []
        done, want = 0, len(keys) // KEY_BYTES
        while done < want:
            chunk = self._chunk_with_room(size_class)
            if chunk is None:
                break
            slot, count = _free_slots(chunk, want - done)
            span = Span(chunk, slot, count)
            piece = keys[done * KEY_BYTES : (done + count) * KEY_BYTES]
            _occupy(span, Occupants(piece, namespace, generation))
            chunk.hint = slot + count
            self.apply(span, _PLANNED)
            spans.append(span)
            done += count
        return spans

    def take_in(self, offset: int, size_class: int, event: ExtentEvent, pages: Occupants) -> bool:
        """Record what a worker's inventory lists in FREE slots from `offset` on, all in one chunk
        (ADOPTED or UNACCOUNTED).

        False, and nothing changes, when a chunk of another class lies there.
        """
        start = self.geometry.chunk_start(offset, size_class)
        chunk = self.chunks.get(start)
        if chunk is None:
            frames = self.geometry.chunk_frames(size_class)
            if not self.frame_map.take_at(start // self.geometry.frame_bytes, frames):
                return False
            chunk = self._cut(start, size_class, frames)
        elif chunk.size_class != size_class:
            return False
        span = Span(chunk, (offset - start) // size_class, len(pages.keys) // KEY_BYTES)
        _occupy(span, pages)
        self.apply(span, event)
        return True

    def apply(self, span: Span, event: ExtentEvent) -> None:
        """Move these slots, all in one state, by the table; IllegalTransition changes nothing."""
        chunk, slot, count = span.chunk, span.slot, span.count
        stop = slot + count
        before = chunk.states[slot]
        after = _AFTER[event].get(before)
        if after is None or chunk.states.count(before, slot, stop) != count:
            states = [ExtentState(state).name for state in chunk.states[slot:stop]]
            raise IllegalTransition(f"extents {chunk.start}+{slot}..{stop}", states, event.value)
        chunk.states[slot:stop] = after.to_bytes(1, "little") * count
        size_bytes = count * chunk.size_class
        self.bytes_in[before] -= size_bytes
        self.bytes_in[after] += size_bytes
        if before == FREE:
            self._took(chunk, count)
        elif after == FREE:
            self._gave(chunk, count)
        if _SEALED in (before, after):
            self.sealed += count if after == _SEALED else -count
            self.changed(chunk.start, after)

    def locate(self, offset: int) -> Span | None:
        """The slot that begins at `offset`, whatever its class; None when none does."""
        chunk = self._chunk_at(offset)
        if chunk is None:
            return None
        slot, rest = divmod(offset - chunk.start, chunk.size_class)
        return None if rest or slot >= chunk.slots else Span(chunk, slot, 1)

    def spans_at(self, offsets: Iterable[int]) -> list[Span]:
        """Spans of these existing slots in the same order, neighbours of one chunk joined."""
        spans: list[Span] = []
        chunk, slot, count, end = None, 0, 0, 0
        for offset in offsets:
            if chunk is not None and chunk.start <= offset < end:
                at = (offset - chunk.start) // chunk.size_class
                if at == slot + count:
                    count += 1
                    continue
                spans.append(Span(chunk, slot, count))
            else:
                if chunk is not None:
                    spans.append(Span(chunk, slot, count))
                chunk = self._chunk_at(offset)
                assert chunk is not None, offset
                end = chunk.start + chunk.frames * self.geometry.frame_bytes
                at = (offset - chunk.start) // chunk.size_class
            slot, count = at, 1
        if chunk is not None:
            spans.append(Span(chunk, slot, count))
        return spans

    def _chunk_at(self, offset: int) -> Chunk | None:
        """The chunk over this offset: a chunk begins at a multiple of its own length."""
        frame_bytes = self.geometry.frame_bytes
        for frames in LENGTHS:
            start = offset // (frames * frame_bytes) * frames * frame_bytes
            chunk = self.chunks.get(start)
            if chunk is not None:
                return chunk if offset < start + chunk.frames * frame_bytes else None
        return None

    def close(self, chunk: Chunk) -> None:
        """Plan nothing in this chunk any more, so that it empties."""
        chunk.closed = True
        self._open[chunk.size_class].pop(chunk.start, None)

    def reopen(self, chunk: Chunk) -> None:
        """Plan in this chunk again, if it is not gone."""
        chunk.closed = False
        if chunk.free and self.chunks.get(chunk.start) is chunk:
            self._open[chunk.size_class][chunk.start] = chunk

    def chunks_within(self, start: int, size_bytes: int) -> list[Chunk]:
        """Chunks that overlap this aligned piece: one that holds it, or those inside it."""
        frame_bytes = self.geometry.frame_bytes
        around = [start // (n * frame_bytes) * n * frame_bytes for n in LENGTHS]
        inside = range(start, start + size_bytes, frame_bytes)
        chunks = (self.chunks.get(at) for at in dict.fromkeys([*around, *inside]))
        return [
            chunk
            for chunk in chunks
            if chunk is not None and chunk.start + chunk.frames * frame_bytes > start
        ]

    def _chunk_with_room(self, size_class: int) -> Chunk | None:
        held = self._open.get(size_class)
        if held:
            return next(reversed(held.values()))
        frames = self.geometry.chunk_frames(size_class)
        first = self.frame_map.take(frames)
        if first is None:
            return None
        return self._cut(first * self.geometry.frame_bytes, size_class, frames)

    def _cut(self, start: int, size_class: int, frames: int) -> Chunk:
        slots = self.geometry.chunk_slots(size_class)
        chunk = Chunk(
            start,
            size_class,
            slots,
            frames,
            bytearray(slots),
            array("Q", bytes(8 * slots)),
            bytearray(slots * KEY_BYTES),
            array("I", bytes(4 * slots)),
            free=slots,
        )
        chunk.place = len(self.chunk_list)
        self.chunk_list.append(chunk)
        self.chunks[start] = chunk
        self._open.setdefault(size_class, {})[start] = chunk
        self.bytes_in[FREE] += slots * size_class
        self.slack_bytes += frames * self.geometry.frame_bytes - slots * size_class
        return chunk

    def _took(self, chunk: Chunk, count: int) -> None:
        chunk.free -= count
        if not chunk.free and not chunk.closed:
            del self._open[chunk.size_class][chunk.start]

    def _gave(self, chunk: Chunk, count: int) -> None:
        if not chunk.free and not chunk.closed:
            self._open[chunk.size_class][chunk.start] = chunk
        chunk.free += count
        if chunk.free == chunk.slots:
            self._give_back(chunk)

    def _give_back(self, chunk: Chunk) -> None:
        del self.chunks[chunk.start]
        self._open[chunk.size_class].pop(chunk.start, None)
        last = self.chunk_list.pop()
        if last is not chunk:
            self.chunk_list[chunk.place] = last
            last.place = chunk.place
        self.bytes_in[FREE] -= chunk.slots * chunk.size_class
        self.slack_bytes -= (
            chunk.frames * self.geometry.frame_bytes - chunk.slots * chunk.size_class
        )
        self.frame_map.give(chunk.start // self.geometry.frame_bytes, chunk.frames)

    def check(self) -> None:
        """Raise InvariantBroken unless counts, chunks and frames agree (I5, I17)."""
        taken = [(c.start // self.geometry.frame_bytes, c.frames) for c in self.chunk_list]
        end = 0
        out = [(frame, 1) for frame in self.frame_map.withheld]
        for first, length in sorted(taken + out + self.frame_map.free_pieces()):
            if first != end:
                raise InvariantBroken(f"I5: frames {min(first, end)} to {max(first, end)}")
            end += length
        if end != self.geometry.frames:
            raise InvariantBroken(f"I5: frames end at {end} of {self.geometry.frames}")
        if sorted(self.chunks) != sorted(chunk.start for chunk in self.chunk_list):
            raise InvariantBroken("I5: the list of chunks differs from their index")
        for place, chunk in enumerate(self.chunk_list):
            self._check_chunk(place, chunk)
        self._check_counts()

    def _check_chunk(self, place: int, chunk: Chunk) -> None:
        free = chunk.states.count(FREE)
        is_open = chunk.start in self._open.get(chunk.size_class, {})
        if (chunk.place, chunk.free, is_open) != (
            place,
            free,
            free > 0 and not chunk.closed,
        ) or free == chunk.slots:
            raise InvariantBroken(f"I17: chunk {chunk.start} counts {chunk.free} free of {free}")

    def _check_counts(self) -> None:
        for state in ExtentState:
            held = sum(c.states.count(state) * c.size_class for c in self.chunk_list)
            if held != self.bytes_in[state]:
                raise InvariantBroken(f"I17: {self.bytes_in[state]} bytes {state.name}, not {held}")
        sealed = sum(chunk.states.count(_SEALED) for chunk in self.chunk_list)
        if sealed != self.sealed:
            raise InvariantBroken(f"I17: {self.sealed} slots SEALED, not {sealed}")
        chunk_bytes = sum(c.frames for c in self.chunk_list) * self.geometry.frame_bytes
        if sum(self.bytes_in) + self.slack_bytes != chunk_bytes:
            raise InvariantBroken(f"I17: {self.slack_bytes} bytes of slack do not add up")


def _occupy(span: Span, pages: Occupants) -> None:
    """Note for whom these slots are held."""
    chunk, slot, count = span.chunk, span.slot, span.count
    stop = slot + count
    chunk.generations[slot:stop] = array("Q", [pages.generation]) * count
    chunk.namespaces[slot:stop] = array("I", [pages.namespace]) * count
    chunk.keys[slot * KEY_BYTES : stop * KEY_BYTES] = pages.keys


def _free_slots(chunk: Chunk, count_max: int) -> tuple[int, int]:
    """(first slot, count) of the next free neighbours; the chunk has at least one free slot."""
    states = chunk.states
    first = states.find(FREE, chunk.hint)
    if first < 0:
        first = states.find(FREE)
    count = min(count_max, chunk.slots - first)
    if states.count(FREE, first, first + count) != count:
        piece = states[first : first + count]
        count -= len(piece.lstrip(b"\0"))
    return first, count
