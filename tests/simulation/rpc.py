"""Calls and answers over a simulated connection, in both directions.

A call that is delivered twice is served twice, each under a number of its own; the first answer
wins. When the connection ends, or time is up, a call is answered None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.base import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.channel import Channel
    from tests.simulation.world import World

ENCODED: Final = 0.05
"""Share of messages that are encoded and decoded on their way."""


@dataclass(frozen=True)
class Call:
    """A request; `number` is the caller's."""

    number: int
    message: object


@dataclass(frozen=True)
class Answer:
    """The reply to the call of that number."""

    number: int
    message: object


class Endpoint:
    """One end of a connection that carries calls."""

    def __init__(
        self,
        world: World,
        node: str,
        serve: Callable[[Endpoint, int, object], None],
        ended: Callable[[Endpoint], None],
    ) -> None:
        """`serve` gets every request; `ended` is told once. Attach a channel with `use`."""
        self.world = world
        self.node = node
        self._serve = serve
        self._on_end = ended
        self._channel: Channel | None = None
        self._calls: dict[int, Callable[[object | None], None]] = {}
        self._served: dict[int, int] = {}
        """The caller's number of a call, by the number under which it is served here."""
        self._last_call = 0
        self._last_served = 0

    def use(self, channel: Channel) -> None:
        """Speak on this channel."""
        self._channel = channel

    @property
    def is_open(self) -> bool:
        """Whether this end takes the connection for open."""
        return self._channel is not None and self._channel.is_open(self.node)

    def call(self, message: object, timeout_s: float, done: Callable[[object | None], None]) -> int:
        """Ask; `done` is called exactly once, unless this process dies. Returns the number."""
        self._last_call += 1
        number = self._last_call
        message = _carried(self.world, message)
        self._calls[number] = done
        if self.is_open and self._channel is not None:
            self._channel.send(self.node, Call(number, message))
            self.world.after_on(self.node, timeout_s, lambda: self._settle(number, None))
        else:
            self.world.after_on(self.node, 0.0, lambda: self._settle(number, None))
        return number

    def send(self, message: object) -> None:
        """Send something that is neither call nor answer."""
        if self._channel is not None:
            self._channel.send(self.node, message)

    def answer(self, number: int, message: object) -> None:
        """Reply to the request that was served under this number."""
        theirs = self._served.pop(number)
        message = _carried(self.world, message)
        if self._channel is not None:
            self._channel.send(self.node, Answer(theirs, message))

    def receive(self, message: object) -> None:
        """Something has arrived."""
        if isinstance(message, Answer):
            self._settle(message.number, message.message)
        elif isinstance(message, Call):
            self._last_served += 1
            self._served[self._last_served] = message.number
            self._serve(self, self._last_served, message.message)
        else:
            self._serve(self, 0, message)

    def caller_number(self, served: int) -> int:
        """The caller's own number of a request that is being served."""
        return self._served[served]

    def _settle(self, number: int, reply: object | None) -> None:
        done = self._calls.pop(number, None)
        if done is not None:
            done(reply)

    def ended(self) -> None:
        """The connection is gone, by the other side or the network."""
        self._on_end(self)
        self._fail_calls()

    def close(self) -> None:
        """End the connection from this side; `ended` is not told."""
        if self._channel is not None:
            self._channel.close(self.node)
        self._fail_calls()

    def _fail_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for done in calls.values():
            done(None)


def _carried(world: World, message: object) -> object:
    """The message as it comes out at the other end; now and then it really goes through bytes."""
    if not isinstance(message, Message) or not world.chance(ENCODED):
        return message
    carried = decode(encode(message))
    assert carried == message, message
    return carried
