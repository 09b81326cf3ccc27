"""Extents: the whole table of states and events, and conservation under random use."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import IllegalTransition, InvariantBroken
from kvstore.ids import KEY_BYTES
from kvstore.record import RecordState, chunk_digest
from kvstore.replica import EXTENT_TRANSITIONS, ExtentEvent, ExtentState
from kvstore.segment import Geometry, check_geometry
from master.chunks import Occupants, Span
from master.extent_allocator import ExtentAllocator
from master.packed import words
from tests.unit.master_rig import chain

KIB = 1024
GEOMETRY = check_geometry(4 * 64 * KIB, 64 * KIB)
CLASSES = (4 * KIB, 8 * KIB, 12 * KIB, 20 * KIB, 64 * KIB)
PATHS: dict[ExtentState, list[ExtentEvent]] = {
    ExtentState.FREE: [],
    ExtentState.RESERVED: [],
    ExtentState.SEALED: [ExtentEvent.SEALED],
    ExtentState.RETIRED: [ExtentEvent.SEALED, ExtentEvent.RETIRED],
    ExtentState.QUARANTINED: [ExtentEvent.PLAN_FAILED],
}


def one_in(state: ExtentState, allocator: ExtentAllocator) -> Span:
    """An extent in this state, beside one that is reserved and keeps the chunk."""
    span = allocator.plan(4 * KIB, 7, 1, chain(1, 2))[0]
    if state is ExtentState.FREE:
        allocator.apply(span.part(0, 1), ExtentEvent.PLAN_FAILED)
        allocator.apply(span.part(0, 1), ExtentEvent.FENCED)
    for event in PATHS[state]:
        allocator.apply(span.part(0, 1), event)
    return span.part(0, 1)


@pytest.mark.parametrize(("state", "event"), list(product(ExtentState, ExtentEvent)))
def test_every_event_in_every_state(state: ExtentState, event: ExtentEvent) -> None:
    allocator = ExtentAllocator(GEOMETRY)
    span = one_in(state, allocator)
    after = EXTENT_TRANSITIONS.get((state, event))
    before = bytes(span.chunk.states), list(allocator.bytes_in), span.chunk.free
    if after is None:
        with pytest.raises(IllegalTransition, match=state.name):
            allocator.apply(span, event)
        assert before == (bytes(span.chunk.states), allocator.bytes_in, span.chunk.free)
    else:
        allocator.apply(span, event)
        assert span.chunk.states[span.slot] == after
    allocator.check()


def test_a_span_in_two_states_moves_not_at_all() -> None:
    allocator = ExtentAllocator(GEOMETRY)
    span = allocator.plan(4 * KIB, 7, 1, chain(1, 4))[0]
    allocator.apply(span.part(1, 1), ExtentEvent.SEALED)
    with pytest.raises(IllegalTransition, match="SEALED"):
        allocator.apply(span, ExtentEvent.SEALED)
    assert bytes(span.chunk.states[:4]) == bytes([1, 2, 1, 1])
    allocator.check()


class AllocatorMachine(RuleBasedStateMachine):
    """Plans, seals, fails, retires and frees random spans, against a dict of places."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(GEOMETRY)
        self.held: dict[tuple[int, int], ExtentState] = {}
        self.generations: dict[tuple[int, int], int] = {}
        self.generation = 0

    @rule(size_class=st.sampled_from(CLASSES), count=st.integers(1, 20))
    def plan(self, size_class: int, count: int) -> None:
        """Everything granted is new; too little only when there is no room."""
        self.generation += 1
        keys = chain(self.generation, count)
        spans = self.allocator.plan(size_class, self.generation, 1, keys)
        places = [(offset, size_class) for span in spans for offset in words(span.offsets())]
        assert len(set(places)) == len(places) <= count
        assert len(places) == count or not self.allocator.has_room(size_class)
        for i, place in enumerate(places):
            assert place not in self.held
            self.held[place] = ExtentState.RESERVED
            self.generations[place] = self.generation
            found = self.allocator.locate(place[0])
            assert found is not None
            assert found.chunk.key(found.slot) == keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            assert found.chunk.generations[found.slot] == self.generation

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 10_000), event=st.sampled_from(ExtentEvent), many=st.integers(1, 9))
    def move(self, index: int, event: ExtentEvent, many: int) -> None:
        """Move some extents of one state, wherever they lie and whatever their class."""
        places = sorted(self.held)
        first = places[index % len(places)]
        state = self.held[first]
        alike = [p for p in places if p >= first and self.held[p] is state][:many]
        after = EXTENT_TRANSITIONS.get((state, event))
        if after is None:
            return
        for span in self.allocator.spans_at([offset for offset, _ in alike]):
            self.allocator.apply(span, event)
        for place in alike:
            if after is ExtentState.FREE:
                del self.held[place]
            else:
                self.held[place] = after

    @rule(
        size_class=st.sampled_from(CLASSES),
        place=st.integers(0, 63),
        event=st.sampled_from([ExtentEvent.ADOPTED, ExtentEvent.UNACCOUNTED]),
    )
    def take_in(self, size_class: int, place: int, event: ExtentEvent) -> None:
        """An inventory names an extent; it fits unless another class is there."""
        start = place % 4 * self.allocator.geometry.chunk_span(size_class)
        offset = start + place % self.allocator.geometry.chunk_slots(size_class) * size_class
        if (offset, size_class) in self.held or start >= GEOMETRY.payload_bytes:
            return
        self.generation += 1
        page = Occupants(chain(self.generation, 1), 1, self.generation)
        stop = start + self.allocator.geometry.chunk_span(size_class)
        chunks = self.allocator.chunks_within(start, stop - start)
        fits = not chunks or [c.size_class for c in chunks] == [size_class]
        assert self.allocator.take_in(offset, size_class, event, page) == fits
        if fits:
            self.held[offset, size_class] = EXTENT_TRANSITIONS[ExtentState.FREE, event]
            self.generations[offset, size_class] = self.generation

    @precondition(lambda self: self.allocator.chunk_list)
    @rule(index=st.integers(0, 100), close=st.booleans())
    def close_or_reopen(self, index: int, close: bool) -> None:
        """A closed chunk takes nothing, and is given back like any other."""
        chunk = self.allocator.chunk_list[index % len(self.allocator.chunk_list)]
        if close:
            self.allocator.close(chunk)
            before = bytes(chunk.states)
            self.allocator.plan(chunk.size_class, 1, 1, b"")
            assert bytes(chunk.states) == before
        else:
            self.allocator.reopen(chunk)

    @invariant()
    def space_is_conserved(self) -> None:
        """Bytes by state and free bytes make the capacity; no two extents overlap (I5, I17)."""
        allocator = self.allocator
        allocator.check()
        for state in ExtentState:
            held = sum(size for (_, size), s in self.held.items() if s is state)
            assert state is ExtentState.FREE or allocator.bytes_in[state] == held
        used = sum(size for _, size in self.held)
        assert allocator.free_bytes + used == GEOMETRY.payload_bytes
        ends = 0
        for offset, size in sorted(self.held):
            assert offset >= ends
            ends = offset + size
        for place, state in self.held.items():
            span = allocator.locate(place[0])
            assert span is not None
            assert span.chunk.states[span.slot] == state
            assert span.chunk.generations[span.slot] == self.generations[place]
        if not self.held:
            assert not allocator.chunks, "an empty chunk is given back"


TestAllocator = AllocatorMachine.TestCase


def test_neighbours_are_preferred() -> None:
    allocator = ExtentAllocator(GEOMETRY)
    spans = allocator.plan(4 * KIB, 1, 1, chain(1, 40))
    assert [span.count for span in spans] == [16, 16, 8]
    assert sorted(span.chunk.start for span in spans) == [0, 64 * KIB, 128 * KIB]


def test_a_plan_takes_what_there_is() -> None:
    allocator = ExtentAllocator(GEOMETRY)
    assert sum(span.count for span in allocator.plan(64 * KIB, 1, 1, chain(1, 9))) == 4
    assert allocator.plan(4 * KIB, 2, 1, chain(2, 1)) == []
    assert not allocator.has_room(4 * KIB)


def test_nothing_lies_beside_the_slots() -> None:
    allocator = ExtentAllocator(GEOMETRY)
    allocator.plan(20 * KIB, 1, 1, chain(1, 1))
    assert allocator.locate(20 * KIB) is not None
    for offset in (4 * KIB, 60 * KIB, 64 * KIB):
        assert allocator.locate(offset) is None


def test_a_span_knows_its_offsets_and_parts() -> None:
    allocator = ExtentAllocator(GEOMETRY)
    span = allocator.plan(8 * KIB, 1, 1, chain(1, 5))[0]
    assert list(words(span.offsets())) == [0, 8 * KIB, 16 * KIB, 24 * KIB, 32 * KIB]
    assert list(words(span.part(2, 2).offsets())) == [16 * KIB, 24 * KIB]
    with pytest.raises(AssertionError):
        span.part(4, 2)


def broken(spoil: str) -> ExtentAllocator:
    """An allocator with one fault."""
    allocator = ExtentAllocator(GEOMETRY)
    span = allocator.plan(20 * KIB, 1, 1, chain(1, 2))[0]
    match spoil:
        case "state without count":
            span.chunk.states[0] = ExtentState.SEALED
        case "free slots":
            span.chunk.free += 1
        case "bytes":
            allocator.bytes_in[ExtentState.RETIRED] += 1
        case "slack":
            allocator.slack_bytes -= 1
        case "list":
            allocator.chunk_list.append(span.chunk)
        case "index":
            allocator.chunks[64 * KIB] = span.chunk
        case "sealed":
            allocator.sealed += 1
        case "frames":
            allocator.frame_map.take(1)
        case "frames twice":
            allocator.frame_map.give(0, 1)
        case "empty chunk":
            span.chunk.states[:] = bytes(span.chunk.slots)
            span.chunk.free = span.chunk.slots
    return allocator


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ("state without count", "I17"),
        ("free slots", "I17"),
        ("bytes", "I17"),
        ("sealed", "I17"),
        ("slack", "I17"),
        ("list", "I5"),
        ("index", "I5"),
        ("frames", "I5"),
        ("frames twice", "I5"),
        ("empty chunk", "I17"),
    ],
)
def test_faults_are_found(spoil: str, named: str) -> None:
    with pytest.raises(InvariantBroken, match=named):
        broken(spoil).check()


@pytest.mark.parametrize("geometry", [GEOMETRY, check_geometry(64 * 1024 * KIB)])
def test_every_class_can_fill_a_segment(geometry: Geometry) -> None:
    for size_class in (4 * KIB, 12 * KIB, geometry.chunk_bytes // 4, geometry.chunk_bytes):
        allocator = ExtentAllocator(geometry)
        slots = geometry.payload_bytes // geometry.chunk_span(size_class)
        slots *= geometry.chunk_slots(size_class)
        count = sum(s.count for s in allocator.plan(size_class, 1, 1, chain(1, slots + 1)))
        assert count == slots
        allocator.check()


def test_what_becomes_or_ceases_to_be_sealed_is_told() -> None:
    told: list[tuple[int, int]] = []
    allocator = ExtentAllocator(GEOMETRY)
    allocator.changed = lambda start, after: told.append((start, after))
    (span,) = allocator.plan(4 * KIB, 1, 1, chain(1, 4))
    assert not told
    allocator.apply(span, ExtentEvent.SEALED)
    allocator.apply(span.part(1, 2), ExtentEvent.RETIRED)
    assert told == [(0, ExtentState.SEALED), (0, ExtentState.RETIRED)]
    assert span.chunk.next_sealed(0) == (0, 1)
    assert span.chunk.next_sealed(1) == (3, 4)
    assert span.chunk.next_sealed(4) is None
    assert list(span.chunk.stretches_in(ExtentState.SEALED)) == [(0, 1), (3, 4)]
    assert list(span.chunk.stretches_in(ExtentState.RETIRED)) == [(1, 3)]
    assert not list(span.chunk.stretches_in(ExtentState.QUARANTINED))
    worker = chunk_digest((slot, RecordState.SEALED, 1) for slot in (0, 3))
    assert span.chunk.sealed_digest() == worker
    allocator.apply(span.part(1, 2), ExtentEvent.FREED)
    assert allocator.take_in(4 * KIB, 4 * KIB, ExtentEvent.ADOPTED, Occupants(chain(2, 2), 1, 9))
    assert told[2:] == [(0, ExtentState.SEALED)]
    assert span.chunk.next_sealed(0) == (0, 4)
    assert allocator.sealed == 4
