"""Virtual time and an unreliable network, both from one seed.

Everything in a simulation runs in one thread. A `World` owns a heap of events ordered by virtual
time; ties are broken by the order of scheduling, so a seed gives one history. Nodes are named;
a message is a callable delivered to a node at a later time, or lost, or delivered twice.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE_ENTRIES = 400


@dataclass(frozen=True)
class Weather:
    """How bad the network is. Probabilities per message; delays in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_min_s: float = 0.0001
    delay_max_s: float = 0.001
    slow: float = 0.0
    """Probability of a delay of up to `slow_max_s` instead: this is what reorders."""
    slow_max_s: float = 2.0


FAIR = Weather()


@dataclass
class NodeStatus:
    """Whether a node runs, and what waits for it while it is stopped."""

    up: bool = True
    paused: bool = False
    life: int = 0
    """Raised at each crash: deliveries meant for an earlier life vanish."""
    queued: deque[Callable[[], None]] = field(default_factory=deque)


class World:
    """The clock, the network and the coin of one simulation."""

    def __init__(self, seed: int) -> None:
        """Start at a time that is no round number, so that nothing relies on zero."""
        self.seed = seed
        self.random = Random(seed)
        self.now = 1000.0 + self.random.random()
        self.weather = FAIR
        self.cut: set[frozenset[str]] = set()
        self.nodes: dict[str, NodeStatus] = {}
        self.trace: deque[str] = deque(maxlen=TRACE_ENTRIES)
        self.steps = 0
        self.after_step: list[Callable[[], None]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def now_s(self) -> float:
        """The Clock port."""
        return self.now

    def note(self, text: str) -> None:
        """One line of the story that a failure prints."""
        self.trace.append(f"{self.now:.6f} {text}")

    def story(self) -> str:
        """What a failing run prints: the seed first."""
        return "\n".join([f"seed {self.seed}, step {self.steps}", *self.trace])

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` of virtual time, whatever happens to the nodes."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, action))

    def after_on(self, node: str, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` on `node`: dropped if it crashed meanwhile, held while it is paused."""
        life = self.nodes[node].life
        self.after(delay_s, lambda: self._run_on(node, life, action))

    def _run_on(self, node: str, life: int, action: Callable[[], None]) -> None:
        status = self.nodes[node]
        if not status.up or status.life != life:
            return
        if status.paused:
            status.queued.append(lambda: self._run_on(node, life, action))
        else:
            action()

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """One message: maybe lost, maybe twice, maybe late."""
        if frozenset((source, target)) in self.cut or self.random.random() < self.weather.loss:
            return
        copies = 2 if self.random.random() < self.weather.duplicate else 1
        for _ in range(copies):
            self.after_on(target, self._delay_s(), deliver)

    def _delay_s(self) -> float:
        weather = self.weather
        if self.random.random() < weather.slow:
            return self.random.uniform(weather.delay_min_s, weather.slow_max_s)
        return self.random.uniform(weather.delay_min_s, weather.delay_max_s)

    def add_node(self, name: str) -> None:
        """Make a node known and running."""
        self.nodes[name] = NodeStatus()

    def crash(self, name: str) -> None:
        """kill -9: nothing scheduled on the node happens any more."""
        self.note(f"crash {name}")
        status = self.nodes[name]
        status.up, status.paused = False, False
        status.life += 1
        status.queued.clear()

    def start(self, name: str) -> None:
        """The node runs again, as a new life."""
        self.note(f"start {name}")
        self.nodes[name].up = True

    def pause(self, name: str) -> None:
        """SIGSTOP: everything for the node waits."""
        self.note(f"pause {name}")
        self.nodes[name].paused = True

    def resume(self, name: str) -> None:
        """SIGCONT: what waited happens now, in order."""
        self.note(f"resume {name}")
        status = self.nodes[name]
        status.paused = False
        waiting, status.queued = status.queued, deque()
        for action in waiting:
            self.after(0.0, action)

    def run(self, seconds: float) -> None:
        """Advance virtual time by `seconds`, running everything that falls due."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            when, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            self.steps += 1
            action()
            for check in self.after_step:
                check()
        self.now = end
