"""Threads of simulated processes: generators that sleep in virtual time or wait for a signal.

A task belongs to a node and shares its fate: it stands still while the node is paused and is gone,
without any clean-up, once the node crashed. So a task's generator must not rely on `finally`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World

T = TypeVar("T")
R = TypeVar("R")


class Signal(Generic[T]):
    """Something that happens once, with a value; later values are ignored."""

    __slots__ = ("_value", "_waiter", "is_set")

    def __init__(self) -> None:
        """Nothing has happened."""
        self.is_set = False
        self._value: list[T] = []
        self._waiter: Callable[[], None] | None = None

    @property
    def value(self) -> T:
        """What happened; the signal must be set."""
        return self._value[0]

    def fire(self, value: T) -> None:
        """Let it happen."""
        if self.is_set:
            return
        self.is_set = True
        self._value.append(value)
        if self._waiter is not None:
            self._waiter()

    def watch(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` when it happens."""
        self._waiter = waiter


# What a task yields: seconds to sleep, or a signal to wait for.
Steps = Generator[float | Signal[Any], None, R]


class Task:
    """One running generator."""

    __slots__ = ("_life", "_steps", "is_over", "node", "world")

    def __init__(self, world: World, node: str, steps: Steps[None]) -> None:
        """Use `spawn`."""
        self.world = world
        self.node = node
        self.is_over = False
        self._steps = steps
        self._life = world.nodes[node].life

    @property
    def is_alive(self) -> bool:
        """Whether it still has something to do."""
        return not self.is_over and self._life == self.world.nodes[self.node].life

    def step(self) -> None:
        """Run to the next yield."""
        try:
            wanted = next(self._steps)
        except StopIteration:
            self.is_over = True
            return
        if isinstance(wanted, Signal):
            if wanted.is_set:
                self.world.after_on(self.node, 0.0, self.step)
            else:
                wanted.watch(self._resume)
        else:
            self.world.after_on(self.node, wanted, self.step)

    def _resume(self) -> None:
        if self._life == self.world.nodes[self.node].life:
            self.world.after_on(self.node, 0.0, self.step)


def spawn(world: World, node: str, steps: Steps[None], delay_s: float = 0.0) -> Task:
    """Start a task on a node."""
    task = Task(world, node, steps)
    world.after_on(node, delay_s, task.step)
    return task


def wait(world: World, node: str, signal: Signal[T], timeout_s: float, late: T) -> Steps[T]:
    """Wait for a signal, which is fired with `late` when `timeout_s` has passed first."""
    if not signal.is_set:
        world.after_on(node, max(0.0, timeout_s), lambda: signal.fire(late))
        yield signal
    return signal.value
