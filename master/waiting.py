"""Puts whose answer is held back until there is something to plan, or until their time is up.

Bounded by limits.WAITING_PUTS_MAX (I7). Owns who is woken by what; must not know how to plan.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from kvstore import limits
from kvstore.wire.messages.puts import BeginPut
from master.events import SessionId
from master.packed import split_keys
from master.wheel import NOWHERE, Wakeup, Wheel

GRAIN_S: Final = 0.05
WOKEN_FOR_ROOM: Final = 16
"""Puts that try again when there is more room; those that fail queue up again."""
RETRIES_PER_EVENT: Final = 32


class Waiting(msgspec.Struct, eq=False):
    """One held-back answer."""

    session: SessionId
    request_id: int
    message: BeginPut
    deadline_s: float
    blocked_on: tuple[bytes, ...] = ()
    """Pages that another put has open."""
    wants_room: bool = False
    bucket: int = NOWHERE


class WaitingPuts:
    """All held-back answers, by what they wait for."""

    __slots__ = ("_by_page", "_for_room", "by_deadline", "woken")

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self.by_deadline: Wheel[Waiting] = Wheel(GRAIN_S, wakeup)
        self._by_page: dict[bytes, dict[Waiting, None]] = {}
        self._for_room: dict[Waiting, None] = {}
        self.woken: dict[Waiting, None] = {}
        """Those to be tried again, longest first."""

    def __len__(self) -> int:
        return len(self.by_deadline)

    @property
    def is_full(self) -> bool:
        """Whether another one would exceed the bound."""
        return len(self) >= limits.WAITING_PUTS_MAX

    def park(self, waiting: Waiting) -> None:
        """Hold this answer back."""
        self.by_deadline.place(waiting, waiting.deadline_s)
        for key in waiting.blocked_on:
            self._by_page.setdefault(key, {})[waiting] = None
        if waiting.wants_room:
            self._for_room[waiting] = None

    def forget(self, waiting: Waiting) -> None:
        """Stop holding it back, whatever it waited for."""
        self.by_deadline.discard(waiting)
        self._for_room.pop(waiting, None)
        self.woken.pop(waiting, None)
        for key in waiting.blocked_on:
            others = self._by_page.get(key)
            if others is not None:
                others.pop(waiting, None)
                if not others:
                    del self._by_page[key]

    def wake_pages(self, keys: bytes) -> None:
        """Another put of these pages has ended."""
        if self._by_page:
            for key in split_keys(keys):
                self.woken.update(self._by_page.get(key, {}))

    def wake_for_room(self) -> None:
        """There is more room: some try again, those that have waited longest."""
        self.woken.update(dict.fromkeys(islice(self._for_room, WOKEN_FOR_ROOM)))

    def take_woken(self) -> list[Waiting]:
        """Some of those to try again, in the order in which they were woken; forgotten here."""
        woken = list(islice(self.woken, RETRIES_PER_EVENT))
        for waiting in woken:
            self.forget(waiting)
        return woken
