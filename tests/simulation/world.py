"""Virtual time, processes and an unreliable network, all from one seed.

Everything in a simulation runs in one thread. A `World` owns a heap of events ordered by virtual
time; ties are broken by the order of scheduling, so a seed gives one history. A node is a process:
what is scheduled on it waits while it is paused and is gone once it crashed. Must not know what the
nodes are.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.channel import Channel

STORY_LINES: Final = 400
STEPS_AT_ONE_TIME_MAX: Final = 20_000


@dataclass(frozen=True)
class Weather:
    """How bad the network is. Probabilities per message; delays in seconds."""

    loss: float = 0.0
    """On an ordered connection a lost message is the end of the connection."""
    duplicate: float = 0.0
    """Not on ordered connections, where only peers that ask again repeat a message."""
    delay_min_s: float = 0.0001
    delay_max_s: float = 0.001
    slow: float = 0.0
    """Probability of a delay of up to `slow_max_s` instead: this is what reorders."""
    slow_max_s: float = 2.0
    ordered: bool = True
    """Whether messages of one connection arrive in order, as on TCP."""


FAIR: Final = Weather()


@dataclass
class NodeStatus:
    """Whether a node runs, and what waits for it while it is stopped."""

    host: str
    up: bool = True
    paused: bool = False
    life: int = 0
    """Raised at each crash: what was meant for an earlier life vanishes."""
    queued: deque[Callable[[], None]] = field(default_factory=deque)
    channels: dict[Channel, None] = field(default_factory=dict)
    stopped_s: float = 0.0
    """Time spent paused so far."""
    paused_at_s: float = 0.0
    woken_s: float = 0.0
    """When it was last started or went on after a pause."""


class World:
    """The clock, the network and the coin of one simulation."""

    def __init__(self, seed: int) -> None:
        """Start at a time that is no round number, so that nothing relies on zero."""
        self.seed = seed
        self.random = Random(seed)
        self.now = 1000.0 + self.random.random()
        self.weather = FAIR
        self.cut: set[tuple[str, str]] = set()
        """(source, target) pairs between which nothing passes."""
        self.nodes: dict[str, NodeStatus] = {}
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.after_step: list[Callable[[], None]] = []
        self.holds: Callable[[str, str, object], bool] | None = None
        """Which messages (source, target, message) are kept back, for scenes; None for none."""
        self.held: list[Callable[[], None]] = []
        """What lets each message go that was kept back, oldest first."""
        self._story: deque[str] = deque(maxlen=STORY_LINES)
        self._digest = hashlib.blake2b(digest_size=8)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def now_s(self) -> float:
        """The Clock port."""
        return self.now

    # --- the story --------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """One line of the story that a failure prints, and of the trace that is hashed."""
        line = f"{self.now:.6f} {text}"
        self._story.append(line)
        self._digest.update(line.encode())

    def story(self) -> str:
        """What a failing run prints: the seed first."""
        return "\n".join([f"seed {self.seed}, step {self.steps}", *self._story])

    def trace_hash(self) -> str:
        """Equal for two runs that had the same history."""
        return f"{self._digest.hexdigest()}-{self.steps}-{self.now:.9f}"

    def chance(self, probability: float) -> bool:
        """Toss the coin."""
        return probability > 0 and self.random.random() < probability

    # --- time -------------------------------------------------------------------------------

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
        if status.paused or status.queued:
            status.queued.append(action)
        else:
            action()

    def run(self, seconds: float) -> None:
        """Advance virtual time by `seconds`, running everything that falls due."""
        end = self.now + seconds
        heap = self._heap
        stuck = 0
        while heap and heap[0][0] <= end:
            when, _, action = heapq.heappop(heap)
            stuck = stuck + 1 if when <= self.now else 0
            assert stuck < STEPS_AT_ONE_TIME_MAX, "time stands still"
            self.now = max(self.now, when)
            self.steps += 1
            action()
            for check in self.after_step:
                check()
        self.now = end

    def run_until(self, done: Callable[[], bool], seconds: float, step_s: float = 0.05) -> bool:
        """Advance until `done()` holds, at most `seconds`; whether it does."""
        end = self.now + seconds
        while not done() and self.now < end:
            self.run(min(step_s, end - self.now))
        return done()

    # --- the network ------------------------------------------------------------------------

    def delay_s(self) -> float:
        """How long one message takes."""
        weather = self.weather
        if self.chance(weather.slow):
            self.counts["slow"] += 1
            return self.random.uniform(weather.delay_min_s, weather.slow_max_s)
        return self.random.uniform(weather.delay_min_s, weather.delay_max_s)

    def same_host(self, one: str, other: str) -> bool:
        """Whether two nodes talk without a network between them."""
        return self.nodes[one].host == self.nodes[other].host

    def keeps_back(self, source: str, target: str, message: object) -> bool:
        """Whether a scene wants this message to wait."""
        return self.holds is not None and self.holds(source, target, message)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        return (source, target) in self.cut and not self.same_host(source, target)

    # --- processes --------------------------------------------------------------------------

    def add_node(self, name: str, host: str) -> None:
        """Make a node known and running."""
        self.nodes[name] = NodeStatus(host)

    def is_up(self, name: str) -> bool:
        """Whether the process lives, paused or not."""
        return self.nodes[name].up

    def crash(self, name: str) -> None:
        """kill -9: nothing scheduled on the node happens any more; its connections end."""
        self.note(f"crash {name}")
        status = self.nodes[name]
        if status.paused:
            status.stopped_s += self.now - status.paused_at_s
        status.up, status.paused = False, False
        status.life += 1
        status.queued.clear()
        channels, status.channels = status.channels, {}
        for channel in channels:
            channel.close(name)

    def start(self, name: str) -> None:
        """The node runs again, as a new life."""
        self.note(f"start {name}")
        status = self.nodes[name]
        status.up, status.woken_s = True, self.now

    def pause(self, name: str) -> None:
        """SIGSTOP: everything for the node waits."""
        self.note(f"pause {name}")
        status = self.nodes[name]
        status.paused, status.paused_at_s = True, self.now

    def resume(self, name: str) -> None:
        """SIGCONT: what waited happens now, in order, before anything newer."""
        self.note(f"resume {name}")
        status = self.nodes[name]
        status.paused = False
        status.stopped_s += self.now - status.paused_at_s
        status.woken_s = self.now
        self.after(0.0, lambda: self._catch_up(name, status.life))

    def _catch_up(self, name: str, life: int) -> None:
        status = self.nodes[name]
        if status.paused or status.life != life or not status.queued:
            return
        status.queued.popleft()()
        if status.queued:
            self.after(0.0, lambda: self._catch_up(name, life))
