"""Looks into the master's core: the one place in the simulation that knows how it keeps things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.replica import ExtentState
from master.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.chunks import Chunk
    from master.core import Core
    from master.plans import Plan
    from master.segments import Segment
    from master.tickets import Ticket
    from tests.simulation.history import Place
    from tests.simulation.sim_master import SimMaster


@dataclass(frozen=True)
class Slot:
    """One extent that is not free."""

    segment: str
    offset: int
    size_class: int
    state: ExtentState
    generation: int
    key: bytes
    namespace: int


def core_of(master: SimMaster) -> Core:
    """The core of a running master."""
    assert master.core is not None
    return master.core.core


def parts(master: SimMaster, namespace: bytes) -> range:
    """The parts that a page of a namespace has."""
    return range(core_of(master).namespaces.get(namespace).tree.parts)


def ordinal(master: SimMaster, namespace: bytes) -> int:
    """Of a namespace, in records and slots."""
    return core_of(master).namespaces.get(namespace).ordinal


def ticket(master: SimMaster, number: int) -> Ticket | None:
    """A ticket that has not ended."""
    return core_of(master).tickets.find(number)


def held_by_tickets(master: SimMaster) -> list[str]:
    """Whatever tickets hold, in words."""
    core = core_of(master)
    tickets = core.tickets
    left = [f"{each}" for each in tickets.all()]
    if core.pins.tickets.pages:
        left.append(f"{core.pins.tickets.pages} pages are pinned")
    if tickets.staged_bytes or tickets.source_bytes:
        left.append(f"{tickets.staged_bytes} bytes are staged, {tickets.source_bytes} move")
    for fleet in tickets.fleets:
        if fleet.credit_tokens or fleet.waiting:
            left.append(f"credit of {fleet.credit_tokens} tokens")
        left += [
            f"{worker.name} has {worker.used_tokens} tokens of {list(worker.tickets)}"
            for worker in fleet.workers.values()
            if worker.used_tokens or worker.tickets or worker.strange_tokens
        ]
    return left


def owner_token(plan: Plan) -> bytes:
    """The session token of who put this."""
    return plan.put.owner.key[2]


def live_segments(master: SimMaster) -> list[Segment]:
    """Segments whose inventory is compared and whose worker is connected."""
    return [s for s in core_of(master).segments.values() if s.takes_orders]


def is_readable(master: SimMaster, segment: str) -> bool:
    """Whether lookups return replicas in this segment."""
    found = core_of(master).segments.get(segment)
    return found is not None and found.readable


def slots(segment: Segment) -> Iterator[Slot]:
    """Every extent of a segment that is not FREE."""
    for chunk in segment.allocator.chunk_list:
        for slot, state in enumerate(chunk.states):
            if state:
                yield _slot(segment, chunk, slot)


def _slot(segment: Segment, chunk: Chunk, slot: int) -> Slot:
    return Slot(
        segment.id,
        chunk.offset(slot),
        chunk.size_class,
        ExtentState(chunk.states[slot]),
        chunk.generations[slot],
        chunk.key(slot),
        chunk.namespaces[slot],
    )


def slot_at(master: SimMaster, segment: str, offset: int) -> Slot | None:
    """The extent around a payload offset, of whatever class; None when it is free."""
    found = core_of(master).segments.get(segment)
    if found is None:
        return None
    for chunk in found.allocator.chunk_list:
        span = chunk.frames * found.geometry.frame_bytes
        if chunk.start <= offset < chunk.start + span:
            slot = (offset - chunk.start) // chunk.size_class
            if slot < chunk.slots and chunk.states[slot]:
                return _slot(found, chunk, slot)
    return None


def size_class_at(master: SimMaster, segment: str, offset: int) -> int:
    """Class of the chunk around a payload offset; 0 when none is cut there."""
    allocator = core_of(master).segments[segment].allocator
    for chunk in allocator.chunk_list:
        if chunk.start <= offset < chunk.start + chunk.frames * allocator.geometry.frame_bytes:
            return chunk.size_class
    return 0


def state_of(master: SimMaster, place: Place) -> str:
    """The state of an extent while it has that generation; FREE when it has another."""
    slot = slot_at(master, place.segment, place.offset)
    if slot is None or slot.generation != place.generation or slot.offset != place.offset:
        return "FREE"
    return slot.state.name


def readable_copies(master: SimMaster, namespace: bytes, key: bytes) -> list[Slot]:
    """SEALED extents of a page in readable segments, found without the tree."""
    core = core_of(master)
    ordinal = core.namespaces.get(namespace).ordinal
    return [
        slot
        for segment in core.segments.values()
        if segment.readable
        for slot in slots(segment)
        if (slot.state, slot.key, slot.namespace) == (ExtentState.SEALED, key, ordinal)
    ]


def is_settled(segment: Segment) -> bool:
    """Whether the segment's inventory is compared."""
    return segment.state is SegmentState.LIVE
