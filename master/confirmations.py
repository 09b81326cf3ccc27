"""What workers answer to orders, extent by extent: freed, fenced, held by a reader, refused.

An extent is FREE again only here and in the inventory (I6): when its worker has said so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.replica import ExtentEvent
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import ExtentsConfirmed
from master import losses, removal
from master.orders import Order, OrderKind
from master.segments import Medium

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.chunks import Span
    from master.core import Core
    from master.events import CommandId

RETRY_UNANSWERED_S: Final = 0.5
RETRY_HELD_S: Final = 0.1
"""A reader's lock is asked for again after this long."""
RETRY_READ_ONLY_S: Final = 60.0
"""A medium that takes no writes does so again only in a new life, which ends these orders."""
_EVENTS: Final = {OrderKind.FREE: ExtentEvent.FREED, OrderKind.FENCE: ExtentEvent.FENCED}


def confirm(core: Core, command: CommandId, reply: Message | None) -> None:
    """Carry on with what a worker has or has not confirmed."""
    order = core.orders.answered(command)
    if order is None:
        return
    if not isinstance(reply, ExtentsConfirmed) or len(reply.outcomes) != len(order):
        core.counters["orders_unanswered"] += 1
        core.orders.give_at(order, core.now + RETRY_UNANSWERED_S)
        return
    match order.kind:
        case OrderKind.FREE | OrderKind.FENCE:
            _released(core, order, reply.outcomes)
        case OrderKind.RETIRE:
            removal.record_written(core, order, reply.outcomes)
        case OrderKind.CHECK:
            losses.checked(core, order, reply.outcomes)


def _released(core: Core, order: Order, outcomes: bytes) -> None:
    segment = order.segment
    done = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.OK]
    released = order if len(done) == len(order) else order.pick(done)
    event = _EVENTS[order.kind]
    for span in segment.allocator.spans_at(released.offsets):
        _clear_tombstones(core, segment.id, span)
        segment.allocator.apply(span, event)
    if segment.held:
        for offset in released.offsets:
            segment.held.pop(offset, None)
    held = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.BUSY]
    if held:
        _wait_for_readers(core, order.pick(held))
    refused = [i for i, o in enumerate(outcomes) if o not in (Outcome.OK, Outcome.BUSY)]
    if refused:
        core.counters["orders_refused"] += 1
        serves = segment.medium is Medium.SERVING
        wait_s = RETRY_UNANSWERED_S if serves else RETRY_READ_ONLY_S
        core.orders.give_at(order.pick(refused), core.now + wait_s)
    core.waiting.wake_for_room()


def _clear_tombstones(core: Core, segment: str, span: Span) -> None:
    if len(core.tombstones):
        for slot in range(span.slot, span.slot + span.count):
            generation = span.chunk.generations[slot]
            core.tombstones.clear(segment, span.chunk.key(slot), generation)


def _wait_for_readers(core: Core, order: Order) -> None:
    core.counters["extents_held"] += len(order)
    if order.kind is OrderKind.FENCE:
        for offset in order.offsets:
            order.segment.held[offset] = order.size_class
    core.orders.give_at(order, core.now + RETRY_HELD_S)
