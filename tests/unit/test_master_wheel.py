"""The timing wheel against a sorted list."""

from __future__ import annotations

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from master.wheel import NOWHERE, Wakeup, Wheel

GRAIN_S = 0.5


class Item:
    """Something with a deadline."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bucket = NOWHERE


class WheelMachine(RuleBasedStateMachine):
    """Places, discards and takes; the model is a dict of deadlines."""

    def __init__(self) -> None:
        super().__init__()
        self.wakeup = Wakeup()
        self.wheel: Wheel[Item] = Wheel(GRAIN_S, self.wakeup)
        self.items = [Item(number) for number in range(8)]
        self.due_s: dict[Item, float] = {}
        self.now_s = 10.0

    @rule(number=st.integers(0, 7), after_s=st.floats(0, 20))
    def place(self, number: int, after_s: float) -> None:
        """Place, or place elsewhere."""
        item = self.items[number]
        self.wheel.place(item, self.now_s + after_s)
        self.due_s[item] = self.now_s + after_s

    @rule(number=st.integers(0, 7))
    def never(self, number: int) -> None:
        """Place at infinity: out it is."""
        self.wheel.place(self.items[number], inf)
        assert self.items[number].bucket == NOWHERE
        self.due_s.pop(self.items[number], None)

    @rule(number=st.integers(0, 7))
    def discard(self, number: int) -> None:
        """Take out, there or not."""
        self.wheel.discard(self.items[number])
        self.due_s.pop(self.items[number], None)

    @rule(after_s=st.floats(0, 5), items_max=st.integers(0, 8))
    def take(self, after_s: float, items_max: int) -> None:
        """Nothing comes early, nothing later than one grain, no more than was asked for."""
        self.now_s += after_s
        taken = self.wheel.take_due(self.now_s, items_max)
        assert len(taken) <= items_max
        for item in taken:
            assert self.due_s.pop(item) <= self.now_s
            assert item.bucket == NOWHERE
        if len(taken) < items_max:
            assert all(due_s > self.now_s - GRAIN_S for due_s in self.due_s.values())

    @rule()
    def look(self) -> None:
        """Whoever looks when a wakeup comes sets the next one."""
        self.wakeup.at_s = self.wheel.next_s()

    @invariant()
    def it_holds_what_was_placed(self) -> None:
        """And says when it will be due."""
        assert sorted(item.number for item in self.wheel) == sorted(
            item.number for item in self.due_s
        )
        assert len(self.wheel) == len(self.due_s)
        first_s = min(self.due_s.values(), default=inf)
        assert first_s <= self.wheel.next_s() <= first_s + GRAIN_S
        assert self.wakeup.at_s <= self.wheel.next_s()


TestWheel = WheelMachine.TestCase


def test_emptied_buckets_leave_nothing_behind() -> None:
    wheel: Wheel[Item] = Wheel(GRAIN_S, Wakeup())
    item = Item(0)
    for number in range(1000):
        wheel.place(item, number / 10)
        wheel.discard(item)
    assert wheel.next_s() == inf
    wheel.place(item, 5.0)
    assert wheel.next_s() == 5.5
    assert wheel.take_due(5.49, 1) == []
    assert wheel.take_due(5.5, 1) == [item]
