"""An inference worker's place in its fleet: it joins, beats, and is told what is not its any more.

A master that cannot be reached is no reason to stop: what runs goes on, the next beat tells.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstore.client.tickets import beat, join_fleet, leave_fleet
from kvstore.errors import CallerError, Fenced, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.client.store import KVStore
    from kvstore.client.tickets import Member
    from kvstore.wire.messages.tickets import FleetBeat, JoinFleet, Running

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
        try:
            fenced = await self._told()
        except Fenced:
            LOG.warning("the master does not know this life: joining again")
            join = join_fleet(self._wish)
            self.member = await asyncio.to_thread(self._store.carry_out, join)
            fenced = await self._told()
        self._drop(fenced)

    async def _told(self) -> tuple[Running, ...]:
        """Of what this beat says that runs here, what is somebody else's."""
        message = self._report(self.member)
        fenced = await asyncio.to_thread(self._store.carry_out, beat(message))
        return tuple(each for each in message.running if each.ticket in fenced)

    def leave(self) -> None:
        """Say that this life has ended; the master finds out by itself where it does not hear."""
        try:
            self._store.carry_out(leave_fleet(self.member))
        except KVStoreError as error:
            LOG.warning("leave: %s", error)
