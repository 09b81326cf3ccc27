"""Connections between simulated processes.

A message is delivered to the other end, or lost, late or twice, as the weather has it. On an
ordered connection, as on TCP, messages keep their order and a lost one is the end of the
connection. Either end learns of an end when the news reaches it, which may be never while the
network is cut; whoever sends on a connection that the other end has closed is told so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World

BREAK_NOTICED_MAX_S = 3.0
"""How late an end may learn that its connection has broken."""
HANDSHAKE_TIMEOUT_S = 1.0


@dataclass(eq=False)
class End:
    """One end: who it is, and what it does with news."""

    node: str
    life: int
    receive: Callable[[object], None]
    ended: Callable[[], None]
    is_open: bool = True
    last_arrival_s: float = 0.0
    """When the last message to this end arrives."""


@dataclass(eq=False)
class Channel:
    """Two ends, known by their nodes."""

    world: World
    ends: dict[str, End] = field(default_factory=dict)
    is_stream: bool = False
    """Keeps order, and breaks at a loss, in any weather."""
    is_broken: bool = False
    welcome: int = 0
    """What the side that accepted has said when it greeted: a master its epoch."""

    def attach(
        self, node: str, receive: Callable[[object], None], ended: Callable[[], None]
    ) -> None:
        """Be one of the ends."""
        status = self.world.nodes[node]
        self.ends[node] = End(node, status.life, receive, ended)
        status.channels[self] = None

    def is_open(self, node: str) -> bool:
        """Whether this end still takes it for open."""
        end = self.ends.get(node)
        return end is not None and end.is_open

    def _other(self, node: str) -> End | None:
        return next((end for name, end in self.ends.items() if name != node), None)

    def send(self, source: str, message: object) -> None:
        """Send from an end that takes the connection for open."""
        mine, other = self.ends[source], self._other(source)
        if not mine.is_open or other is None:
            return
        world = self.world
        world.counts["messages"] += 1
        if world.keeps_back(source, other.node, message):
            world.held.append(lambda: self._deliver(other, message, 0.001, ordered=False))
            return
        if world.same_host(source, other.node):
            self._deliver(other, message, world.random.uniform(0.00001, 0.0001), ordered=True)
            return
        weather = world.weather
        is_ordered = weather.ordered or self.is_stream
        if self.is_broken or world.is_cut(source, other.node) or world.chance(weather.loss):
            world.counts["lost"] += 1
            if is_ordered:
                self.break_off()
            return
        copies = 1
        if not is_ordered and world.chance(weather.duplicate):
            world.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            self._deliver(other, message, world.delay_s(), is_ordered)

    def _deliver(self, end: End, message: object, delay_s: float, ordered: bool) -> None:
        world = self.world
        arrival_s = world.now + delay_s
        if ordered:
            arrival_s = max(arrival_s, end.last_arrival_s)
            end.last_arrival_s = arrival_s
        world.after_on(end.node, arrival_s - world.now, lambda: self._arrive(end, message))

    def _arrive(self, end: End, message: object) -> None:
        if end.is_open:
            end.receive(message)
        elif (other := self._other(end.node)) is not None:
            self._tell(other, end.node)

    def break_off(self) -> None:
        """Let nothing pass any more; the ends learn of it by and by."""
        if self.is_broken:
            return
        self.is_broken = True
        for end in self.ends.values():
            delay_s = self.world.random.uniform(0.0, BREAK_NOTICED_MAX_S)
            self.world.after_on(end.node, delay_s, partial(self._ended, end))

    def close(self, node: str) -> None:
        """End it from this side; the other side is told, if the news gets through."""
        end = self.ends.get(node)
        if end is None or not end.is_open:
            return
        end.is_open = False
        self.world.nodes[node].channels.pop(self, None)
        other = self._other(node)
        if other is not None and not self.is_broken:
            self._tell(other, node)

    def _tell(self, end: End, source: str) -> None:
        """Tell `end` that the other side is gone, after what was sent before."""
        world = self.world
        status = world.nodes[end.node]
        if not end.is_open or world.is_cut(source, end.node) or status.life != end.life:
            return
        delay_s = 0.0001 if world.same_host(source, end.node) else world.delay_s()
        late_s = max(delay_s, end.last_arrival_s - world.now)
        world.after_on(end.node, late_s, lambda: self._ended(end))

    def _ended(self, end: End) -> None:
        if end.is_open:
            end.is_open = False
            self.world.nodes[end.node].channels.pop(self, None)
            end.ended()


@dataclass
class Dial:
    """What a dialler brings: its end of the connection, and its greeting."""

    source: str
    target: str
    greeting: object
    receive: Callable[[object], None]
    ended: Callable[[], None]
    connected: Callable[[Channel | None], None]
    """Called once, with None when nobody answered in time."""
    timeout_s: float = HANDSHAKE_TIMEOUT_S
    is_stream: bool = False


def dial(world: World, call: Dial, accept: Callable[[Channel, object], bool]) -> None:
    """Connect; `accept` runs on the target and may refuse."""
    channel = Channel(world, is_stream=call.is_stream)
    life = world.nodes[call.source].life
    settled: list[bool] = []

    def settle(result: Channel | None) -> None:
        if settled:
            channel.close(call.source)
            return
        settled.append(True)
        call.connected(result)

    def give_up() -> None:
        if not settled:
            settle(None)

    def arrive() -> None:
        if not accept(channel, call.greeting):
            _hop(world, call.target, call.source, lambda: settle(None))
            return
        channel.attach(call.source, call.receive, call.ended)
        if settled or world.nodes[call.source].life != life:
            channel.close(call.source)  # who dialled is not there any more
        else:
            _hop(world, call.target, call.source, lambda: settle(channel))

    _hop(world, call.source, call.target, arrive)
    world.after_on(call.source, max(0.0, call.timeout_s), give_up)


def _hop(world: World, source: str, target: str, action: Callable[[], None]) -> None:
    """One message outside any connection: it arrives, or it does not."""
    if not world.is_up(target) or world.is_cut(source, target):
        return
    if not world.same_host(source, target) and world.chance(world.weather.loss):
        return
    world.after_on(target, world.delay_s(), action)
