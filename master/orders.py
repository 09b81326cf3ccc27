"""Orders to workers about extents: fence, free, retire, check. Queues and answers, no decisions.

Owns what was asked of whom and is not confirmed yet. Within one registration of a worker every
order is repeated until it is confirmed; a new registration starts from the inventory instead
(master.inventory), so orders of an earlier one are dropped here and their answers ignored.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.wire.messages.membership import (
    CheckExtents,
    FenceExtents,
    FreeExtents,
    RetireExtents,
)
from master.events import Command, CommandId
from master.segments import Segment, SegmentState
from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.ids import Epoch
    from kvstore.wire.messages.base import Message
    from master.events import Action

EXTENTS_PER_ORDER_MAX: Final = 1024
ORDERS_IN_FLIGHT_MAX: Final = 16
"""Per segment; what is beyond waits in one queue a kind and class, bounded by its extents."""
GRAIN_S: Final = 0.05
DUE_PER_TICK_MAX: Final = 1024


class OrderKind(Enum):
    """What a worker is told to do with extents."""

    FENCE = "fence"
    FREE = "free"
    RETIRE = "retire"
    CHECK = "check"


_MESSAGES: Final[dict[OrderKind, Callable[..., Message]]] = {
    OrderKind.FENCE: FenceExtents,
    OrderKind.FREE: FreeExtents,
    OrderKind.RETIRE: RetireExtents,
    OrderKind.CHECK: CheckExtents,
}


class Order(msgspec.Struct, eq=False):
    """Extents of one class in one segment that the worker is told the same about."""

    kind: OrderKind
    segment: Segment
    registration: int
    size_class: int
    offsets: array[int]
    generations: array[int]
    bucket: int = NOWHERE

    def __len__(self) -> int:
        return len(self.offsets)

    def pick(self, wanted: list[int]) -> Order:
        """An order for the extents at these indexes alone."""
        offsets = array("Q", [self.offsets[i] for i in wanted])
        generations = array("Q", [self.generations[i] for i in wanted])
        return Order(
            self.kind, self.segment, self.registration, self.size_class, offsets, generations
        )

    def cut_head(self, count: int) -> Order:
        """Take the first `count` extents out, as an order of their own."""
        offsets, generations = self.offsets[:count], self.generations[:count]
        del self.offsets[:count], self.generations[:count]
        return Order(
            self.kind, self.segment, self.registration, self.size_class, offsets, generations
        )

    def message(self, epoch: int) -> Message:
        """What the worker is told."""
        return _MESSAGES[self.kind](
            epoch,
            self.segment.id,
            self.segment.incarnation,
            self.size_class,
            self.offsets.tobytes(),
            self.generations.tobytes(),
        )


class OrderBook:
    """Orders that wait for their time, for their turn, or for an answer."""

    __slots__ = ("_commands", "_epoch", "_in_flight", "_later", "_queued")

    def __init__(self, epoch: Epoch, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of those that wait for their time."""
        self._epoch = epoch
        self._later: Wheel[Order] = Wheel(GRAIN_S, wakeup)
        self._queued: dict[tuple[Segment, OrderKind, int], Order] = {}
        self._in_flight: dict[CommandId, Order] = {}
        self._commands = 0

    def new(self, kind: OrderKind, segment: Segment, size_class: int) -> Order:
        """An order for no extents yet, in the segment's present registration."""
        return Order(kind, segment, segment.registration, size_class, array("Q"), array("Q"))

    def new_command(self) -> CommandId:
        """A number that no other command of this master has."""
        self._commands += 1
        return CommandId(self._commands)

    def give(self, order: Order) -> None:
        """Give this order as soon as may be; its columns may be taken over."""
        if order.registration != order.segment.registration or not len(order):
            return
        key = (order.segment, order.kind, order.size_class)
        queued = self._queued.setdefault(key, order)
        if queued is not order:
            queued.offsets.extend(order.offsets)
            queued.generations.extend(order.generations)

    def give_at(self, order: Order, at_s: float) -> None:
        """Give this order at `at_s`."""
        self._later.place(order, at_s)

    def next_s(self) -> float:
        """When an order that waits for its time comes due."""
        return self._later.next_s()

    def queue_due(self, now_s: float) -> None:
        """Queue the orders whose time has come."""
        for order in self._later.take_due(now_s, DUE_PER_TICK_MAX):
            self.give(order)

    def drop(self, segment: Segment) -> None:
        """Forget every order of the segment's present registration; a new one begins."""
        segment.registration += 1
        segment.orders_in_flight = 0
        for key in [key for key in self._queued if key[0] is segment]:
            del self._queued[key]

    def dispatch(self, actions: list[Action]) -> None:
        """Turn what is queued into commands, as far as the bound on those in flight allows."""
        if not self._queued:
            return
        for key, order in list(self._queued.items()):
            segment = order.segment
            if segment.session is None or segment.state is not SegmentState.LIVE:
                continue
            while len(order) and segment.orders_in_flight < ORDERS_IN_FLIGHT_MAX:
                command = self.new_command()
                sent = order.cut_head(EXTENTS_PER_ORDER_MAX)
                self._in_flight[command] = sent
                segment.orders_in_flight += 1
                actions.append(Command(command, segment.session, sent.message(self._epoch)))
            if not len(order):
                del self._queued[key]

    def answered(self, command: CommandId) -> Order | None:
        """The order that `command` carried; None when its registration is over."""
        order = self._in_flight.pop(command, None)
        if order is None or order.registration != order.segment.registration:
            return None
        order.segment.orders_in_flight -= 1
        return order

    def in_flight(self, segment: Segment) -> int:
        """Commands of the segment's present registration that are not answered, for checks."""
        orders = self._in_flight.values()
        return sum(o.segment is segment and o.registration == segment.registration for o in orders)

    def open_orders(self) -> Iterator[Order]:
        """Everything of present registrations that is not confirmed yet, for checks."""
        orders = (*self._later, *self._queued.values(), *self._in_flight.values())
        return (order for order in orders if order.registration == order.segment.registration)
