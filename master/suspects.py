"""Copies that a reader or a move could not verify: their worker is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.hello import Done
from master.orders import OrderKind
from master.segments import Segment

if TYPE_CHECKING:
    from kvstore.wire.messages.reads import ReportSuspect
    from master.core import Core
    from master.sessions import Caller


class Suspect(msgspec.Struct, frozen=True):
    """One copy that is being checked."""

    segment: Segment
    offset: int
    generation: int


def report_suspect(core: Core, caller: Caller, message: ReportSuspect) -> None:
    """Have the worker verify this copy, if it is still the one that was read; answer Done."""
    known = core.namespaces.get(message.namespace)
    caller.session.must_own(known.namespace.content)
    if len(message.key) != KEY_BYTES:
        raise BadValue("key", len(message.key), f"{KEY_BYTES} bytes")
    core.counters["suspects_reported"] += 1
    run = known.tree.get(message.key)
    segment = core.segments.get(message.segment)
    core.reply(caller, Done())
    if run is None or segment is None or segment.incarnation != message.incarnation:
        return
    page = run.page_of(message.key)
    for copy in run.copies_of(message.part):
        if copy.segment is segment and copy.generation(page) == message.generation != 0:
            check(core, Suspect(segment, copy.offset(page), message.generation))


def check(core: Core, suspect: Suspect) -> None:
    """Have the worker verify the payload of this extent, if that is sealed still."""
    span = suspect.segment.allocator.locate(suspect.offset)
    if span is None or not span.holds(suspect.generation):
        return
    if not suspect.segment.takes_orders or suspect in core.suspects:
        return
    if len(core.suspects) >= limits.SUSPECTS_MAX:  # I7: the next reader will report it again
        core.counters["suspects_dropped"] += 1
        return
    core.suspects.add(suspect)
    order = core.orders.new(OrderKind.CHECK, suspect.segment, span.chunk.size_class)
    order.offsets.append(suspect.offset)
    order.generations.append(suspect.generation)
    core.orders.give(order)
