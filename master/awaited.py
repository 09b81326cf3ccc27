"""Callers that wait until pages have their replicas, or until their time is up.

Bounded (I7). A wait is blocked on the first page that may still get more, and looked at again when
a copy of that page has ended. Must not know how copies come about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.replicas import AwaitReplicas, ReplicasCounted
from master import replica_counts
from master.directory import Stretch, Tree
from master.packed import split_keys
from master.reads import asked_namespace
from master.seconds import check_seconds
from master.sessions import Caller
from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from master.core import Core
    from master.run import Run
    from master.sessions import Session

WAITS_MAX: Final = 1024
GRAIN_S: Final = 0.02
PER_LOOK: Final = 16
PAGES_AT_ONCE: Final = 64
_COUNT_MAX: Final = 255


class Wait(msgspec.Struct, eq=False):
    """One held-back answer."""

    caller: Caller
    tree: Tree
    keys: bytes
    blocked_on: bytes = b""
    page: int = 0
    """Those before it had what they want when they were looked at."""
    bucket: int = NOWHERE


class Awaited:
    """All of them, by what they wait for."""

    __slots__ = ("_by_page", "_woken", "by_deadline")

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self.by_deadline: Wheel[Wait] = Wheel(GRAIN_S, wakeup)
        self._by_page: dict[tuple[int, bytes], dict[Wait, None]] = {}
        self._woken: dict[Wait, None] = {}

    def __len__(self) -> int:
        return len(self.by_deadline)

    def __bool__(self) -> bool:
        return bool(self._by_page)

    def park(self, wait: Wait, page: bytes) -> None:
        """Look at it again when something has become of this page."""
        wait.blocked_on = page
        self._by_page.setdefault((wait.tree.namespace, page), {})[wait] = None

    def _unpark(self, wait: Wait) -> None:
        place = wait.tree.namespace, wait.blocked_on
        others = self._by_page[place]
        del others[wait]
        if not others:
            del self._by_page[place]

    def wake(self, namespace: int, keys: bytes) -> None:
        """Copies of these pages have ended."""
        for key in split_keys(keys):
            self._woken.update(self._by_page.get((namespace, key), {}))

    def wake_all(self) -> None:
        """Fewer replicas can be had by now: some may wait in vain."""
        self._woken.update(dict.fromkeys(self.by_deadline))

    def drop(self, session: Session) -> None:
        """Nobody is there any more who could be answered."""
        for wait in [each for each in self.by_deadline if each.caller.session is session]:
            self._forget(wait)

    def _forget(self, wait: Wait) -> None:
        self.by_deadline.discard(wait)
        self._woken.pop(wait, None)
        self._unpark(wait)

    def look(self, core: Core) -> None:
        """Answer those that have what they wait for, and those whose time is up."""
        for wait in self.by_deadline.take_due(core.now, PER_LOOK):
            self._forget(wait)
            core.reply(wait.caller, _counted(core, wait))
        for wait in list(self._woken)[:PER_LOOK]:
            del self._woken[wait]
            blocked_on = _blocked_on(core, wait)
            if blocked_on:
                self._unpark(wait)
                self.park(wait, blocked_on)
            else:
                self._forget(wait)
                core.reply(wait.caller, _counted(core, wait))
        if self._woken:
            core.replication.look(core.now)


def await_replicas(core: Core, caller: Caller, message: AwaitReplicas) -> None:
    """Answer ReplicasCounted once no page can get more replicas that it wants, or in time."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    check_seconds("timeout_s", message.timeout_s)
    awaited, tree = core.replication.awaited, known.tree
    wait = Wait(caller, tree, message.keys)
    if not message.timeout_s:
        core.reply(caller, _counted(core, wait))
        return
    runs = dict.fromkeys([stretch.run for stretch in tree.stretches(message.keys)])
    _want(core, tree, [run for run in runs if run.thinned])
    blocked_on = _blocked_on(core, wait)
    if not blocked_on:
        core.reply(caller, _counted(core, wait))
        return
    if len(awaited) >= WAITS_MAX:  # I7
        raise OutOfSpace(f"{len(awaited)} callers wait for replicas already")
    _want(core, tree, runs)
    awaited.park(wait, blocked_on)
    timeout_s = min(message.timeout_s, limits.CALL_TIMEOUT_MAX_S)
    awaited.by_deadline.place(wait, core.now + timeout_s)


def _want(core: Core, tree: Tree, runs: Iterable[Run]) -> None:
    """Have these pages looked at before others, also those that eviction has thinned out."""
    for run in runs:
        run.thinned = False
        core.replication.note(core, tree, run.keys, core.now, presses=True, is_awaited=True)


def _blocked_on(core: Core, wait: Wait) -> bytes:
    """The first page that may still get more, from where the wait stood on; empty: none."""
    tree, pages = wait.tree, len(wait.keys) // KEY_BYTES
    for first in range(wait.page, pages, PAGES_AT_ONCE):
        keys = wait.keys[first * KEY_BYTES : (first + PAGES_AT_ONCE) * KEY_BYTES]
        for stretch in tree.stretches(keys):
            possible = min(replica_counts.asked(core, stretch.run), core.domains)
            counts = _got(core, tree, stretch) if not stretch.run.thinned else b""
            behind = next((i for i, each in enumerate(counts) if 0 < each < possible), None)
            if behind is not None:
                wait.page = first + stretch.first + behind
                return stretch.run.key(stretch.page + behind)
    return b""


def _got(core: Core, tree: Tree, stretch: Stretch) -> bytes:
    counts = replica_counts.got(core, stretch.run, tree.parts)
    return counts[stretch.page : stretch.page + stretch.count]


def _counted(core: Core, wait: Wait) -> ReplicasCounted:
    """Wanted and got: one byte a page, 0 of none there."""
    tree, pages = wait.tree, len(wait.keys) // KEY_BYTES
    wanted, got = bytearray(pages), bytearray(pages)
    for stretch in tree.stretches(wait.keys):
        first, count = stretch.first, stretch.count
        number = min(_COUNT_MAX, replica_counts.asked(core, stretch.run))
        wanted[first : first + count] = bytes([number]) * count
        got[first : first + count] = _got(core, tree, stretch)
    return ReplicasCounted(bytes(wanted), bytes(got))
