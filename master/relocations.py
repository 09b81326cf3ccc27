"""The book of relocations: what operators began, how far it is, and which workers are drained.

Owns the keys `relocations/<id>`. A drain stays in the book, and in the store, until it is
cancelled: whoever leads knows which workers are to stay empty. What is copied, and what goes, is in
master.relocation; must not know trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import CorruptPage, InvariantBroken, MalformedMessage
from kvstore.replica import ExtentState
from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.relocation import RelocationKind, RelocationState, StartRelocation
from master import moves
from master.lately import Lately
from master.moves import MoveKind
from master.plans import Plan
from master.segments import Segment, SegmentState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.ids import Epoch
    from master.core import Core
    from master.namespaces import Namespaces
    from master.run import Copy, Run
    from master.wheel import Wakeup

PREFIX: Final = "relocations/"
ENDED_KEPT: Final = 64
"""For whoever asks how they ended."""
BALANCE_AFTER_S: Final = 5.0
"""After a worker came: others may come with it."""
_RUNNING: Final = RelocationState.RUNNING


class Amount(msgspec.Struct):
    """Parts of pages, and the bytes of their extents."""

    pages: int = 0
    size_bytes: int = 0

    def add(self, pages: int, size_bytes: int) -> None:
        """Count so much more."""
        self.pages += pages
        self.size_bytes += size_bytes


class Copying(msgspec.Struct, eq=False):
    """Pages that are on their way; once they are there, what lies in `source` may go."""

    plan: Plan
    source: Segment


class Relocation(msgspec.Struct, eq=False):
    """One wish, and how far it is."""

    id: str
    wish: StartRelocation
    by_operator: bool = True
    state: RelocationState = _RUNNING
    done: Amount = msgspec.field(default_factory=Amount)
    passed: Amount = msgspec.field(default_factory=Amount)
    """Was right already, as the first look at everything found."""
    stuck: Amount = msgspec.field(default_factory=Amount)
    """No place was found for it when everything was last looked at."""
    reason: str = ""
    copying: list[Copying] = []
    lately: Lately = msgspec.field(default_factory=Lately)
    """How fast it gets on."""
    next_s: float = -inf
    """It is looked at again then."""
    walk: Iterator[float] | None = None
    """A look at everything, in steps; each says when to go on."""

    @property
    def kind(self) -> str:
        """What is done: one of RelocationKind."""
        return self.wish.kind

    def did(self, pages: int, size_bytes: int, now_s: float) -> None:
        """So much more is done now."""
        self.done.add(pages, size_bytes)
        self.lately.add(size_bytes, now_s)


class Relocations:
    """Those that run, drains that are done, and some that have ended."""

    def __init__(self, epoch: Epoch, wakeup: Wakeup) -> None:
        """None is known; `wakeup` hears of looks."""
        self._epoch = epoch
        self._wakeup = wakeup
        self._begun = 0
        self.open: dict[str, Relocation] = {}
        """By id; with the drains that hold a worker empty."""
        self.ended: deque[Relocation] = deque(maxlen=ENDED_KEPT)
        self.look_at_s = inf
        self.balance_at_s = inf
        """A worker has come: then it is looked whether segments are filled unevenly."""

    def look(self, at_s: float) -> None:
        """A look is wanted at `at_s`, if not sooner."""
        self.look_at_s = min(self.look_at_s, at_s)
        self._wakeup.by(at_s)

    def want_balance(self, now_s: float) -> None:
        """Have the master look soon whether segments are filled unevenly."""
        self.balance_at_s = now_s + BALANCE_AFTER_S
        self.look(self.balance_at_s)

    def wake(self, now_s: float) -> None:
        """A copy has ended: whoever waits for one is looked at."""
        for each in self.open.values():
            if each.copying and each.state is _RUNNING:
                each.next_s = now_s
                self.look(now_s)

    @property
    def is_full(self) -> bool:
        """Whether no more may be begun (I7)."""
        return len(self.open) >= limits.RELOCATIONS_MAX

    def new_id(self) -> str:
        """One that no relocation of any master has had."""
        self._begun += 1
        return f"{self._epoch}-{self._begun}"

    def add(self, relocation: Relocation, now_s: float) -> None:
        """Take one in."""
        self.open[relocation.id] = relocation
        relocation.next_s = now_s
        self.look(now_s)

    def end(self, relocation: Relocation, state: RelocationState) -> None:
        """It has come to its end: a drain only when it is cancelled."""
        del self.open[relocation.id]
        relocation.state = state
        relocation.walk = None
        relocation.copying.clear()
        self.ended.append(relocation)

    def all(self) -> list[Relocation]:
        """Oldest first."""
        return [*self.ended, *self.open.values()]

    def find(self, number: str) -> Relocation | None:
        """The one of this id, open or ended not long ago."""
        return next((each for each in self.all() if each.id == number), None)

    def like(self, wish: StartRelocation) -> Relocation | None:
        """One that is open and does what is wished for."""
        return next((each for each in self.open.values() if each.wish == wish), None)

    def drain_of(self, worker: str) -> Relocation | None:
        """Why this worker is filled no more."""
        drains = (each for each in self.open.values() if each.kind == RelocationKind.DRAIN)
        return next((each for each in drains if each.wish.source == worker), None)

    def joined(self, segment: Segment, now_s: float) -> None:
        """Its worker has registered; whatever lies there after all is to go."""
        drain = self.drain_of(segment.worker)
        segment.drained = drain is not None
        if drain is not None:
            drain.state = _RUNNING
            drain.next_s = now_s
            self.look(now_s)

    def check(self, segments: Iterable[Segment]) -> None:
        """Raise InvariantBroken where a drained worker is filled, or holds something (I36)."""
        if len(self.open) > limits.RELOCATIONS_MAX:
            raise InvariantBroken(f"I7: {len(self.open)} relocations")
        for segment in segments:
            drain = self.drain_of(segment.worker)
            if segment.drained != (drain is not None):
                raise InvariantBroken(f"I36: {segment.id} drained: {segment.drained}")
            is_done = drain is not None and drain.state is RelocationState.DONE
            if is_done and segment.state is SegmentState.LIVE and _holds(segment):
                raise InvariantBroken(f"I36: {segment.id} is drained and holds pages")

    def restore(self, namespaces: Namespaces, key: str, value: bytes) -> None:
        """Take in one durable value; CorruptPage when it is not ours: that relocation is over."""
        try:
            wish = decode(value)
        except MalformedMessage as error:
            raise CorruptPage(f"metadata value {key}: {error}") from error
        if not isinstance(wish, StartRelocation) or wish.kind not in set(RelocationKind):
            raise CorruptPage(f"metadata value {key}: no relocation")
        if wish.namespace and namespaces.find(wish.namespace) is None:
            raise CorruptPage(f"metadata value {key}: of an unknown namespace")
        number = key.removeprefix(PREFIX)
        self.open[number] = Relocation(number, wish)
        self.look(-inf)


def _holds(segment: Segment) -> bool:
    held = segment.allocator.bytes_in
    return bool(held[ExtentState.SEALED] or held[ExtentState.RESERVED])


def is_empty(segment: Segment) -> bool:
    """Whether nothing lies there, or waits for the end of a lease."""
    return segment.state is SegmentState.LIVE and not segment.allocator.used_bytes


def name_of(relocation: Relocation) -> str:
    """Key of its durable value."""
    return PREFIX + relocation.id


def value_of(relocation: Relocation) -> bytes:
    """Its durable value: the request that would begin it."""
    return encode(relocation.wish)


def end(
    core: Core,
    relocation: Relocation,
    state: RelocationState,
    reason: str = "",
    then: Callable[[], None] | None = None,
) -> None:
    """Take it out of the book and the store; what was copied stays. `then`: once that is so."""
    relocation.reason = reason
    core.relocations.end(relocation, state)
    core.note(f"{relocation.kind} {relocation.id} is {state}{': ' if reason else ''}{reason}")
    if relocation.by_operator:
        core.persist(deletes=(name_of(relocation),), then=then)
    elif then is not None:
        then()


def begin_copy(
    core: Core, relocation: Relocation, run: Run, copy: Copy, pages: range, target: Segment
) -> int:
    """Have as many of these pages copied as are at once, and find room; how many."""
    begun = moves.start(core, MoveKind.COPY, run, copy, pages, target)
    if begun:
        relocation.copying.append(Copying(run.plans[-1], copy.segment))
    return begun
