"""Plans of calls as generators: they yield steps and are sent what came of them.

One planning code for the blocking store, the asyncio face and the simulation. A generator decides
what to ask, move and retry; whoever drives it has the sockets, threads and memory. Time comes
from a Clock that is handed in. What a step raises, be it an interrupt, is thrown into the
generator, which may ask for more steps before it lets that pass.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from kvstore.errors import MalformedMessage
from kvstore.transfer.transport import IngestSpan, ReadSpan
from kvstore.wire.messages.base import Message

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ask(msgspec.Struct, frozen=True):
    """Send this to the master; answered by its reply message."""

    message: Message
    timeout_s: float


class IngestPages(msgspec.Struct, frozen=True):
    """Have workers pull these from the source; answered by Outcome bytes for each span."""

    spans: tuple[IngestSpan, ...]
    timeout_s: float


class ReadPages(msgspec.Struct, frozen=True):
    """Bring these to the destination, verified; answered by Outcome bytes for each span."""

    spans: tuple[ReadSpan, ...]
    timeout_s: float
    others: tuple[ReadSpan | None, ...] = ()
    """Where reads may be hedged: for each span the same pages at another worker, if they are."""


class WipePages(msgspec.Struct, frozen=True):
    """Take back what ReadPages delivered to these places; answered by None."""

    places: tuple[int, ...]
    size_bytes: int


class Pause(msgspec.Struct, frozen=True):
    """Let time pass; answered by None."""

    seconds: float


Step = Ask | IngestPages | ReadPages | WipePages | Pause
Answer = Message | list[bytes] | None
T = TypeVar("T")
M = TypeVar("M", bound=Message)
Steps = Generator[Step, Answer, T]


class Performer(Protocol):
    """Whoever can carry out steps, blocking."""

    def ask(self, message: Message, timeout_s: float) -> Message:
        """The master's reply, or its typed error raised."""
        ...

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        """Outcome bytes for each span."""
        ...

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        """Outcome bytes for each span."""
        ...

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Undo a read."""
        ...

    def pause(self, seconds: float) -> None:
        """Return after that time."""
        ...


def perform(step: Step, performer: Performer) -> Answer:
    """Carry out one step."""
    if isinstance(step, Ask):
        return performer.ask(step.message, step.timeout_s)
    if isinstance(step, ReadPages):
        return performer.read(step.spans, step.timeout_s, step.others)
    if isinstance(step, IngestPages):
        return performer.ingest(step.spans, step.timeout_s)
    if isinstance(step, WipePages):
        performer.wipe(step.places, step.size_bytes)
    else:
        performer.pause(step.seconds)
    return None


def drive(steps: Steps[T], performer: Performer) -> T:
    """Run a plan to its end, blocking, and return its result."""
    try:
        step = next(steps)
        while True:
            try:
                answer = perform(step, performer)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def ask(message: Message, want: type[M], timeout_s: float) -> Steps[M]:
    """Ask the master; MalformedMessage when the reply is of another type."""
    reply = yield Ask(message, timeout_s)
    if not isinstance(reply, want):
        raise MalformedMessage(f"{type(reply).__name__} in answer to {type(message).__name__}")
    return reply


def move(step: IngestPages | ReadPages) -> Steps[list[bytes]]:
    """Move pages; each span's Outcome bytes are as long as the span."""
    reply = yield step
    assert isinstance(reply, list), step
    spans: Sequence[IngestSpan | ReadSpan] = step.spans
    for span, outcomes in zip(spans, reply, strict=True):
        assert len(outcomes) == len(span.places), (span, outcomes)
    return reply
