"""Full checks of the master's state against itself (numbers of ARCHITECTURE.md). Test and idle use.

Reads everything, changes nothing; takes time in proportion to the pool.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.replica import ExtentState
from master import degraded, heat
from master.lanes import IN_FLIGHT_MAX
from master.moves import MoveKind
from master.orders import ORDERS_IN_FLIGHT_MAX, OrderKind
from master.packed import split_keys, words
from master.replica_checks import check_replicas
from master.segments import SegmentState
from master.ticket_checks import check_tickets
from master.wheel import NOWHERE
from master.write_behind import IN_FLIGHT_MAX as WRITES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.directory import Tree
    from master.moves import Move
    from master.run import Copy, Run
    from master.segments import Segment

Place = tuple[int, int]
"""A segment, by identity, and an offset in it."""


def check_invariants(core: Core) -> None:
    """Raise InvariantBroken, naming the invariant, when the state contradicts itself."""
    for segment in core.segments.values():
        segment.allocator.check()
        if segment.readable != (segment.state is SegmentState.LIVE):
            raise InvariantBroken(f"I3: segment {segment.id} is {segment.state} and readable")
        _check_held(segment)
        if segment.orders_in_flight != core.orders.in_flight(segment):
            raise InvariantBroken(f"I7: {segment.orders_in_flight} orders in flight")
        if segment.orders_in_flight > ORDERS_IN_FLIGHT_MAX:
            raise InvariantBroken(f"I7: {segment.orders_in_flight} orders in flight")
    for known in core.namespaces:
        known.tree.check()
        _check_expiry(core, known.tree)
    sealed = _check_copies(core)
    reserved = _check_plans(core)
    _check_extents(core, sealed, reserved)
    _check_orders(core)
    _check_owners(core)
    _check_leaving(core)
    core.pins.check()
    core.relocations.check(core.segments.values())
    _check_moves(core)
    _check_saving(core)
    degraded.check(core, (run for _, run in _runs(core)))
    heat.check(core)
    check_replicas(core)
    check_tickets(core)


def _check_saving(core: Core) -> None:
    """The store holds what is sealed in each chunk, unless that is due to be written (I32)."""
    saving = core.saving
    if len(saving.writing) > WRITES_MAX:
        raise InvariantBroken(f"I7: {len(saving.writing)} values are being stored")
    for segment in core.segments.values():
        if segment.state is not SegmentState.LIVE:
            continue
        stored, chunks = saving.stored.get(segment.id, {}), segment.allocator.chunks
        for start in {*stored, *chunks}:
            chunk = chunks.get(start)
            held = chunk is not None and chunk.next_sealed(0) is not None
            digest = chunk.sealed_digest() if chunk is not None and held else None
            if stored.get(start) != digest and not saving.is_due((segment.id, start)):
                raise InvariantBroken(f"I32: chunk {start} of {segment.id} is stored otherwise")


def _check_moves(core: Core) -> None:
    """What a worker was asked to move is counted (I7), and is what was sealed there (I3)."""
    moves = core.moves.in_flight.values()
    for worker in core.workers.values():
        for lane in (worker.lane, worker.copies):
            asked = [move.size_bytes for move in moves if lane in move.lanes]
            if (lane.moves, lane.size_bytes) != (len(asked), sum(asked)):
                raise InvariantBroken(f"I7: {worker.id} moves {len(asked)} times {sum(asked)}")
            if len(asked) > IN_FLIGHT_MAX:
                raise InvariantBroken(f"I7: {worker.id} moves {len(asked)} times")
    planned = {id(put) for put in core.moves.owner.puts.values()}
    if not planned <= {id(move.plan.put) for move in moves}:
        raise InvariantBroken("I18: a move is planned and nobody was asked")
    for move in moves:
        _check_source(core, move)


def _check_source(core: Core, move: Move) -> None:
    tree, plan = core.tree(move.plan.namespace), move.plan
    columns = words(move.generations), words(plan.checksums)
    rows = zip(split_keys(plan.keys), *columns, strict=True)
    for page, (key, generation, checksum) in enumerate(rows):
        run = tree.get(key)
        if plan.states[page] or run is None:
            continue
        if move.kind is MoveKind.COPY and move.leased_until_s > min(
            run.read_until_s, move.source.leased_until_s
        ):
            raise InvariantBroken(f"I35: {plan} copies what may go meanwhile")
        at = run.page_of(key)
        for copy in run.copies_of(plan.part):
            is_it = copy.segment is move.source and copy.generation(at) == generation
            if is_it and words(copy.checksums)[at] != checksum:
                raise InvariantBroken(f"I3: {plan} copies what was not sealed")


def _check_held(segment: Segment) -> None:
    """What only a reader's lock holds is quarantined (I17)."""
    for offset, size_class in segment.held.items():
        span = segment.allocator.locate(offset)
        if (
            span is None
            or span.chunk.size_class != size_class
            or span.chunk.states[span.slot] != ExtentState.QUARANTINED
        ):
            raise InvariantBroken(f"I17: {offset} of {segment.id} is held and not quarantined")


def _check_expiry(core: Core, tree: Tree) -> None:
    """Every run has its time, or something that must end before (I18)."""
    for run in tree.all_runs():
        waits = run.plans or tree.has_children(run) or run.expires_s == inf
        waits = waits or core.pins.is_hard(run)
        if run.bucket == NOWHERE and not waits:
            raise InvariantBroken(f"I18: a run of {len(run)} pages never expires")


def _check_orders(core: Core) -> None:
    """What is neither free nor in use has exactly one order on its way (I6), or is away.

    A removal waits for exactly the records that RETIRE orders are about (I29).
    """
    ordered: dict[OrderKind, list[Place]] = {kind: [] for kind in OrderKind}
    for order in core.orders.open_orders():
        ordered[order.kind] += [(id(order.segment), offset) for offset in order.offsets]
    waited = [(id(s), at) for s, held in core.removals.retiring.items() for at in held]
    if sorted(waited) != sorted(ordered[OrderKind.RETIRE]):
        raise InvariantBroken(f"I29: removals wait for {len(waited)} records")
    retired = ordered[OrderKind.FREE] + ordered[OrderKind.RETIRE]
    for state, places in (
        (ExtentState.RETIRED, retired),
        (ExtentState.QUARANTINED, ordered[OrderKind.FENCE]),
    ):
        left = [
            (id(segment), chunk.offset(slot))
            for segment in core.segments.values()
            if segment.takes_orders
            for chunk in segment.allocator.chunk_list
            for slot in chunk.slots_in(state)
        ]
        lacking = set(left) - set(places)
        if lacking or len(set(places)) != len(places):
            raise InvariantBroken(f"I6: {len(lacking)} extents {state.name} without an order")


def _runs(core: Core) -> Iterator[tuple[int, Run]]:
    for known in core.namespaces:
        for run in known.tree.all_runs():
            yield known.tree.parts, run


def _check_copies(core: Core) -> dict[Place, bytes]:
    """The places of all copies, each in one run only (I5); masks are what copies say (I3, I15)."""
    places: dict[Place, bytes] = {}
    for parts, run in _runs(core):
        for copy in run.copies:
            if copy.segment is not core.stripes.place:
                _collect(places, run, copy)
        ends_s = [run.lapsing_until_s, *(run.leases or {}).values()]
        if run.leased_until_s != max(ends_s):
            raise InvariantBroken(f"I9: a run kept until {run.leased_until_s}, leased {ends_s}")
        if run.mask_version == core.version and run.mask != run.fresh_mask(parts):
            raise InvariantBroken(f"I15: stale mask of a run of {len(run)} pages")
    return places


def _collect(places: dict[Place, bytes], run: Run, copy: Copy) -> None:
    generations, offsets = words(copy.generations), words(copy.offsets)
    for page, key in enumerate(split_keys(run.keys)):
        if generations[page]:
            place = (id(copy.segment), offsets[page])
            if place in places:
                raise InvariantBroken(f"I5: offset {offsets[page]} of {copy.segment.id} twice")
            places[place] = key
            span = copy.segment.allocator.locate(offsets[page])
            if span is None or span.chunk.generations[span.slot] != generations[page]:
                raise InvariantBroken(f"I3: no such generation at {offsets[page]}")
            if span.chunk.states[span.slot] != ExtentState.SEALED:
                raise InvariantBroken(f"I3: copy at {offsets[page]} is not sealed")


def _check_plans(core: Core) -> dict[Place, bytes]:
    """The places of all open pages; their nodes are in the tree and know the plan (I14, I18)."""
    places: dict[Place, bytes] = {}
    for generation, plan in core.plans.items():
        if plan.generation != generation or plan.put.plans.get(generation) is not plan:
            raise InvariantBroken(f"I18: {plan} has no put")
        if plan.open != plan.states.count(0) or not plan.open:
            raise InvariantBroken(f"I18: {plan} counts wrongly")
        known = core.namespaces.by_ordinal(plan.namespace)
        offsets = words(plan.offsets)
        for page, key in enumerate(split_keys(plan.keys)):
            run = known.tree.get(key) if known is not None else None
            if plan.states[page] == 0:
                if run is None or plan not in run.plans:
                    raise InvariantBroken(f"I14: page {page} of {plan} is not in the tree")
                places[id(plan.segment), offsets[page]] = key
    for _, run in _runs(core):
        for plan in run.plans:
            if core.plans.get(plan.generation) is not plan:
                raise InvariantBroken(f"I18: a run of {len(run)} pages keeps closed {plan}")
    return places


def _check_extents(core: Core, sealed: dict[Place, bytes], reserved: dict[Place, bytes]) -> None:
    """SEALED extents are exactly the copies, RESERVED ones the open pages (I13, I17)."""
    found: dict[ExtentState, dict[Place, bytes]] = {
        ExtentState.SEALED: {},
        ExtentState.RESERVED: {},
    }
    for segment in core.segments.values():
        for chunk in segment.allocator.chunk_list:
            for state, places in found.items():
                for slot in chunk.slots_in(state):
                    places[id(segment), chunk.offset(slot)] = chunk.key(slot)
    known = {id(segment) for segment in core.segments.values()}
    for state, expected in ((ExtentState.SEALED, sealed), (ExtentState.RESERVED, reserved)):
        # Copies in a segment that was forgotten are cleaned away bit by bit.
        expected = {place: key for place, key in expected.items() if place[0] in known}
        if expected != found[state]:
            raise InvariantBroken(
                f"I17: {len(found[state])} extents are {state.name}, {len(expected)} are known"
            )


def _check_leaving(core: Core) -> None:
    """Who waits for its readers has left, and is there to be told (I18)."""
    for name, leave in core.leaving.items():
        worker = core.workers.get(name)
        if worker is None or not worker.left or leave.caller.session.id not in core.sessions:
            raise InvariantBroken(
                f"I18: {name} waits for its readers and has not left, or has gone"
            )


def _check_owners(core: Core) -> None:
    """Every put and wait has an owner that is connected, and a deadline (I18)."""
    for owner in core.owners.values():
        if not owner.sessions or any(session not in core.sessions for session in owner.sessions):
            raise InvariantBroken("I18: an owner without a session")
    puts = {id(plan.put): plan.put for plan in core.plans.values()}
    for put in puts.values():
        known = put.owner is core.moves.owner or core.owners.get(put.owner.key) is put.owner
        is_watched = put.bucket >= 0 and known
        if put.owner is core.given_up:
            is_watched = bool(core.jobs)
        if not is_watched or put.owner.puts.get(put.request) is not put:
            raise InvariantBroken("I18: a put without an owner or a deadline")
    owners = [core.moves.owner, core.given_up, *core.owners.values()]
    kept = [put for owner in owners for put in owner.puts.values()]
    if len(kept) != len({id(put) for put in kept if put.plans or put.asker is not None}):
        raise InvariantBroken("I18: an owner keeps a put without open plans")
    waits = sum(len(owner.waits) for owner in core.owners.values())
    if waits != len(core.waiting) or waits > limits.WAITING_PUTS_MAX:
        raise InvariantBroken(f"I18: {waits} waiting puts of {len(core.waiting)}")
