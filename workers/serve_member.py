"""An inference worker's place in its fleet: it joins, beats, and is told what is not its any more.

A master that cannot be reached is no reason to stop: what runs goes on, the next beat tells.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.client.tickets import beat, join_fleet, leave_fleet
from kvstore.errors import CallerError, Fenced, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.client.steps import Steps
    from kvstore.client.store import KVStore
    from kvstore.client.tickets import Member
    from kvstore.wire.messages.tickets import FleetBeat, FleetNoted, JoinFleet, Running

T = TypeVar("T")

LOG: Final = logging.getLogger(__name__)


class Membership:
    """One worker's membership."""

    def __init__(
        self,
        store: KVStore,
        wish: JoinFleet,
        report: Callable[[Member], FleetBeat],
        drop: Callable[[tuple[Running, ...]], None],
    ) -> None:
        """`report` makes a beat of the present state, `drop` stops what is others'."""
        self._store = store
        self._wish = wish
        self._report = report
        self._drop = drop
        # Of its own: pulls and puts may hold up all other threads for longer than a master waits.
        self._thread = ThreadPoolExecutor(1, "beats")
        self._is_speaking = asyncio.Lock()
        """Held while a beat or a change of life is under way: one must not see half of another."""
        self._asked = asyncio.Event()
        self._wanted_role = ""
        self._is_member = True
        self.member: Member = store.carry_out(join_fleet(wish))

    async def beat_on(self) -> None:
        """Beat until cancelled. A life that the master has given up is followed by another."""
        while True:
            await asyncio.sleep(self.member.beat_every_s)
            await self.beat_if_heard()

    async def beat_if_heard(self) -> None:
        """One beat now; a master that cannot be reached is told by the next one."""
        try:
            await self.beat_once()
        except CallerError:
            raise
        except KVStoreError as error:
            LOG.warning("beat: %s", error)

    async def beat_once(self) -> None:
        """One beat now. What runs goes on in another life, but for what its first beat loses."""
        async with self._is_speaking:
            try:
                if not self._is_member:
                    await self._join()
                noted, lost = await self._told()
            except Fenced:
                LOG.warning("the master does not know this life: joining again")
                await self._join()
                noted, lost = await self._told()
        self._drop(lost)
        if noted.role:
            self._wanted_role = noted.role
            self._asked.set()

    async def asked(self) -> str:
        """The role that the master asks for, once it does."""
        await self._asked.wait()
        self._asked.clear()
        return self._wanted_role

    async def change(self, wish: JoinFleet) -> None:
        """Leave, and join as that; where the master is away, with the next beat that it hears."""
        async with self._is_speaking:
            self._wish, self._is_member = wish, False
            await self._leave()
        await self.beat_if_heard()

    async def leave(self) -> None:
        """Say that this life has ended; the master finds out by itself where it does not hear."""
        async with self._is_speaking:
            await self._leave()

    def close(self) -> None:
        """Nothing is said any more."""
        self._thread.shutdown()

    async def _join(self) -> None:
        join = join_fleet(self._wish)
        self.member = await self._carry_out(join)
        self._is_member = True

    async def _told(self) -> tuple[FleetNoted, tuple[Running, ...]]:
        """What the master says to the present state; what of it is somebody else's."""
        message = self._report(self.member)
        noted = await self._carry_out(beat(message))
        return noted, _lost(message.running, noted.fenced)

    async def _leave(self) -> None:
        try:
            await self._carry_out(leave_fleet(self.member))
        except KVStoreError as error:
            LOG.warning("leave: %s", error)

    async def _carry_out(self, plan: Steps[T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._store.carry_out, plan)


def _lost(running: tuple[Running, ...], fenced: tuple[int, ...]) -> tuple[Running, ...]:
    """Those that are not this worker's: of two claims of one ticket the one that it had before."""
    left, lost = Counter(fenced), []
    for each in running:
        if left[each.ticket]:
            left[each.ticket] -= 1
            lost.append(each)
    return tuple(lost)
