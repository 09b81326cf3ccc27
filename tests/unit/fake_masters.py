"""Masters at addresses, for links to them: what each dial and each call gives. Not a test."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.rpc.identity import Identity, Role
from kvstore.rpc.link import MasterLink
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.hello import Done
from tests.fakes import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

IDENTITY = Identity(Role.ENGINE)
Step = KVStoreError | Message | str


class FakeConnection:
    """Answers each call by the next entry of its script; an empty script answers Done."""

    def __init__(self, pool: FakeMasters, script: list[Step], epoch: int) -> None:
        self.epoch = epoch
        self.is_open = True
        self.is_cut_off = False
        self._pool = pool
        self._script = script

    def call(
        self, message: Message, timeout_s: float, on_silence: Callable[[], None] | None = None
    ) -> Message:
        self._pool.asked.append(message)
        self._pool.timeouts.append(timeout_s)
        step = self._script.pop(0) if self._script else None
        self.is_cut_off = step == "cut off"
        if step == "cut off":
            step = "silent"
        if step == "silent" and on_silence is not None:
            self._wait(timeout_s, on_silence)
            timeout_s = 0.0
        if step == "lost":
            self.is_open = False
            raise Unavailable("connection lost")
        if step == "silent":
            self._pool.clock.advance(timeout_s)
            raise DeadlineExceeded("no answer within the deadline")
        if isinstance(step, KVStoreError):
            raise step
        return step if isinstance(step, Message) else Done()

    def _wait(self, timeout_s: float, on_silence: Callable[[], None]) -> None:
        """As Connection.call does."""
        clock = self._pool.clock
        deadline_s = clock.now_s() + timeout_s
        while self.is_open and clock.now_s() + limits.CALL_PATIENCE_S < deadline_s:
            clock.advance(limits.CALL_PATIENCE_S)
            on_silence()
        if not self.is_open:
            raise Unavailable("this side closed the connection")
        clock.advance(deadline_s - clock.now_s())

    def close(self) -> None:
        self.is_open = False
        self._pool.closed += 1


class FakeMasters:
    """Masters by address: a queue of what each dial gives, an error or a script of answers."""

    def __init__(self, **dials: list[KVStoreError | list[Step]]) -> None:
        self.clock = ManualClock(100.0)
        self.dialled: list[str] = []
        self.patience: list[float] = []
        self.pauses: list[float] = []
        self.timeouts: list[float] = []
        self.asked: list[Message] = []
        self.closed = 0
        self.epochs: dict[str, int] = {}
        self._dials = dials

    def dial(self, address: str, identity: Identity, timeout_s: float) -> FakeConnection:
        assert identity.role is Role.ENGINE
        assert timeout_s > 0
        name = address.partition(":")[0]
        self.dialled.append(name)
        self.patience.append(timeout_s)
        waiting = self._dials.get(name, [])
        step = waiting.pop(0) if waiting else []
        if isinstance(step, DeadlineExceeded):
            self.clock.advance(timeout_s)
        if isinstance(step, KVStoreError):
            raise step
        return FakeConnection(self, step, self.epochs.get(name, 1))

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    def link(self, *names: str) -> MasterLink:
        return MasterLink(
            [f"{name}:1" for name in names],
            IDENTITY,
            self.clock,
            random=Random(7),
            pause=self.pause,
            dial=self.dial,
        )
