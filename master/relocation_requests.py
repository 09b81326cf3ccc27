"""What operators ask of relocations: begin one, end one, see how far they are.

A relocation is answered when it is durable: it goes on under the next master. Must not know how
anything is copied.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.replica import ExtentState, Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.relocation import (
    CancelRelocation,
    GetRelocations,
    RelocationKind,
    RelocationRow,
    Relocations,
    RelocationState,
    StartRelocation,
)
from master import placing, rebalancing, relocating
from master.packed import split_keys
from master.relocations import Amount, Relocation, end, name_of, value_of
from master.segments import Medium, SegmentState
from master.tunables import HOST

if TYPE_CHECKING:
    from master.core import Core
    from master.membership import Worker
    from master.namespaces import KnownNamespace
    from master.segments import Segment
    from master.sessions import Caller

KINDS: Final = tuple(str(kind) for kind in RelocationKind)
TIERS: Final = tuple(str(tier) for tier in Tier)
NEEDED: Final = {
    RelocationKind.COPY: ("target",),
    RelocationKind.MOVE: ("target",),
    RelocationKind.DRAIN: ("source",),
    RelocationKind.REBALANCE: (),
}
"""What each has to name."""
ALLOWED: Final = {
    RelocationKind.COPY: ("source", "target", "namespace", "keys", "tier"),
    RelocationKind.MOVE: ("source", "target", "namespace", "keys", "tier"),
    RelocationKind.DRAIN: ("source",),
    RelocationKind.REBALANCE: (),
}
"""And what it may."""
FIELDS: Final = ALLOWED[RelocationKind.COPY]


def start_relocation(core: Core, caller: Caller, message: StartRelocation) -> None:
    """Begin it, unless it runs; answer Relocations once it is durable."""
    caller.session.must_be_operator()
    kind = _check_fields(message)
    wish = StartRelocation(
        kind, message.source, message.target, message.namespace, message.keys, message.tier
    )
    book = core.relocations
    known = book.drain_of(wish.source) if kind is RelocationKind.DRAIN else book.like(wish)
    if known is not None:
        core.reply(caller, Relocations((row(core, known),)))
        return
    _check_workers(core, wish)
    found = Relocation(book.new_id(), wish)
    if message.dry_run:
        found.state, found.reason = RelocationState.PLANNED, _outlook(core, wish)
        core.reply(caller, Relocations((row(core, found),)))
        return
    if book.is_full:
        raise OutOfSpace(f"{limits.RELOCATIONS_MAX} relocations are open: cancel some first")
    book.add(found, core.now)
    core.counters[f"relocations_{kind}"] += 1
    if kind is RelocationKind.DRAIN:
        _mark(core, wish.source, drained=True)
    core.note(f"{kind} {found.id} begins, as an operator wishes: {_story(wish)}")
    answer = Relocations((row(core, found),))
    value = ((name_of(found), value_of(found)),)
    core.persist(value, (), lambda: core.reply(caller, answer))


def cancel_relocation(core: Core, caller: Caller, message: CancelRelocation) -> None:
    """End it; answer Relocations once that is durable."""
    caller.session.must_be_operator()
    found = core.relocations.find(message.id)
    if found is None:
        ids = ", ".join(core.relocations.open) or "none"
        raise BadValue("id", message.id, f"one of those that are open: {ids}")
    if message.id not in core.relocations.open:
        core.reply(caller, Relocations((row(core, found),)))  # repeated
        return
    was_done = found.state is RelocationState.DONE  # else it were no drain, and not open
    end(
        core,
        found,
        RelocationState.UNDONE if was_done else RelocationState.CANCELLED,
        "as an operator wishes",
        then=lambda: core.reply(caller, Relocations((row(core, found),))),
    )
    if found.kind == RelocationKind.DRAIN:
        _mark(core, found.wish.source, drained=False)


def get_relocations(core: Core, caller: Caller, message: GetRelocations) -> None:
    """Answer Relocations; one that nobody knows any more is left out."""
    caller.session.must_be_operator()
    found = [each for each in core.relocations.all() if message.id in {"", each.id}]
    core.reply(caller, Relocations(tuple(row(core, each) for each in found)))


def _mark(core: Core, worker: str, *, drained: bool) -> None:
    """From now on nothing is planned at this worker, or again as at any other."""
    known = core.workers.get(worker)
    for segment in known.segments.values() if known is not None else ():
        segment.drained = drained
    placing.segments_changed(core)


def _check_fields(message: StartRelocation) -> RelocationKind:
    if message.kind not in KINDS:
        raise BadValue("kind", message.kind, f"one of {', '.join(KINDS)}")
    kind = RelocationKind(message.kind)
    for field in FIELDS:
        given = getattr(message, field)
        if given and field not in ALLOWED[kind]:
            raise BadValue(field, given, f"nothing: a {kind} has none")
        if not given and field in NEEDED[kind]:
            raise BadValue(field, given, "the name of a worker")
    if kind in {RelocationKind.COPY, RelocationKind.MOVE}:
        if not message.source and not message.namespace:
            raise BadValue("namespace", "", "one, or else the worker that pages come from")
        if message.source == message.target:
            raise BadValue("target", message.target, "another worker than pages come from")
        if message.tier and message.tier not in TIERS:
            raise BadValue("tier", message.tier, f"one of {', '.join(TIERS)}")
    return kind


def _check_workers(core: Core, wish: StartRelocation) -> None:
    if wish.source:
        _worker(core, "source", wish.source)
    if wish.kind == RelocationKind.DRAIN:
        _check_drain(core, wish.source)
    if wish.namespace:
        known = core.namespaces.find(wish.namespace)
        if known is None or not known.is_durable:
            raise BadValue("namespace", wish.namespace.hex(), "one that an engine has opened")
        _check_pages(core, known, wish.keys)
    elif wish.keys:
        raise BadValue("keys", len(wish.keys), "none without a namespace")
    if wish.target:
        target = _worker(core, "target", wish.target)
        _check_target(core, target, wish)
        if wish.kind == RelocationKind.COPY and wish.source:
            _check_apart(core, core.workers[wish.source], target)


def _worker(core: Core, field: str, name: str) -> Worker:
    found = core.workers.get(name)
    there = ", ".join(sorted(w.id for w in core.workers.values() if not w.lost)) or "none"
    if found is None:
        raise BadValue(field, name, f"a worker that is there: {there}")
    if found.lost:
        repaired = (
            "; what a lost worker had is repaired without a wish" if field == "source" else ""
        )
        raise BadValue(field, name, f"one that is there: {there}{repaired}")
    return found


def _check_drain(core: Core, worker: str) -> None:
    others = [s for s in core.segments.values() if s.worker != worker and _may_take(s)]
    if not others:
        want = "a worker beside which another may take pages: all others are lost, drained or full"
        if all(name == worker for name in core.workers):
            want = "a worker beside which there is another: its pages would have nowhere to go"
        raise BadValue("source", worker, want)


def _may_take(segment: Segment) -> bool:
    """Whether pages may ever be copied there, also if its worker is away for a moment."""
    lent = segment.state is not SegmentState.LOST and segment.medium is Medium.SERVING
    return lent and not segment.drained


def _check_pages(core: Core, known: KnownNamespace, keys: bytes) -> None:
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or count > limits.BATCH_PAGES_MAX:
        want = f"{KEY_BYTES} bytes each, at most {limits.BATCH_PAGES_MAX}"
        raise BadValue("keys", len(keys), want)
    there = bytearray(count)
    for stretch in known.tree.stretches(keys):
        held = stretch.run.readable(known.tree.parts, core.version)
        at = slice(stretch.first, stretch.first + stretch.count)
        there[at] = held[stretch.page : stretch.page + stretch.count]
    if 0 in there:
        missing = split_keys(keys)[there.index(0)].hex()
        raise BadValue("keys", missing, "pages that the pool has")


def _check_target(core: Core, target: Worker, wish: StartRelocation) -> None:
    segments = [s for s in target.segments.values() if _may_take(s)]
    if not segments:
        raise BadValue("target", target.id, "a worker that takes pages: it is drained, or cannot")
    tiers = sorted({str(segment.tier) for segment in segments})
    if wish.tier and wish.tier not in tiers:
        raise BadValue("tier", wish.tier, f"one that {target.id} has: {', '.join(tiers)}")
    sizes = _page_sizes(core, wish) or [0]
    fitting = [s for s in segments if wish.tier in {"", s.tier}]
    if not any(_has_room(core, segment, max(sizes)) for segment in fitting):
        raise BadValue("target", target.id, "a worker with room for such pages")


def _check_apart(core: Core, source: Worker, target: Worker) -> None:
    if core.tunables.replicas_apart == HOST and source.host == target.host:
        want = f"a worker of another host than {source.id}: no host has a page twice"
        raise BadValue("target", target.id, want)


def _has_room(core: Core, segment: Segment, size_class: int) -> bool:
    if not segment.takes_plans:
        return True  # it is away for a moment
    if size_class:
        return placing.is_open(core, segment, size_class)
    return segment.allocator.free_bytes > 0


def _page_sizes(core: Core, wish: StartRelocation) -> list[int]:
    """Of the extents of one page's parts; none where no namespace is named."""
    if not wish.namespace:
        return []
    parts = core.namespaces.get(wish.namespace).namespace.parts
    return [size_class_of(part.size_bytes) for part in parts]


def _named(core: Core, wish: StartRelocation) -> Amount:
    """What a wish names, at most, as of now."""
    if wish.kind == RelocationKind.REBALANCE:
        return rebalancing.planned(core)
    sizes = _page_sizes(core, wish)
    if sizes:
        tree = core.namespaces.get(wish.namespace).tree
        pages = len(wish.keys) // KEY_BYTES or tree.pages
        named = Amount(pages * len(sizes), pages * sum(sizes))
        if not wish.source:
            return named
        return min(named, _sealed(core, wish.source), key=lambda each: each.size_bytes)
    return _sealed(core, wish.source)


def _sealed(core: Core, worker: str) -> Amount:
    found = Amount()
    known = core.workers.get(worker)
    for segment in known.segments.values() if known is not None else ():
        space = segment.allocator
        found.add(space.sealed, space.bytes_in[ExtentState.SEALED])
    return found


def _outlook(core: Core, wish: StartRelocation) -> str:
    return rebalancing.why(core) if wish.kind == RelocationKind.REBALANCE else ""


def _story(wish: StartRelocation) -> str:
    return ", ".join(
        text
        for text in (
            f"from {wish.source}" if wish.source else "",
            f"to {wish.target}" if wish.target else "",
            f"namespace {wish.namespace.hex()[:16]}" if wish.namespace else "",
            f"{len(wish.keys) // KEY_BYTES} pages" if wish.keys else "",
        )
        if text
    )


def row(core: Core, relocation: Relocation) -> RelocationRow:
    """How far it is."""
    wish, done = relocation.wish, relocation.done
    left = _left(core, relocation)
    bytes_per_s = relocation.lately.bytes_per_s(core.now)
    eta_s = 0.0
    if relocation.state == RelocationState.RUNNING and relocating.away(core, wish):
        eta_s = inf  # nor is known what is left of what a lost worker had
    elif left.size_bytes:
        eta_s = left.size_bytes / bytes_per_s if bytes_per_s else inf
    return RelocationRow(
        relocation.id, wish.kind, wish.source, wish.target, wish.namespace,
        len(wish.keys) // KEY_BYTES, wish.tier, relocation.state.value, relocation.by_operator,
        done.pages, done.size_bytes, left.pages, left.size_bytes,
        relocation.stuck.pages, relocation.stuck.size_bytes,
        bytes_per_s, eta_s, relocation.reason,
    )  # fmt: skip


def _left(core: Core, relocation: Relocation) -> Amount:
    if relocation.state not in {RelocationState.RUNNING, RelocationState.PLANNED}:
        return Amount()
    wish, done, passed = relocation.wish, relocation.done, relocation.passed
    named = _named(core, wish)
    if wish.kind == RelocationKind.COPY or (wish.target and not wish.source):
        named.add(-done.pages - passed.pages, -done.size_bytes - passed.size_bytes)
    return Amount(max(0, named.pages), max(0, named.size_bytes))
