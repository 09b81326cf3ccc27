"""Two masters over one metadata store that knows leases, in one loop, and ways to spoil things.

Time is the loop's own, put forward by hand where a test waits for a lease to end.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import pytest

from kvstore import limits
from kvstore.clock import SystemClock
from kvstore.coordination.metadata_store import Candidate
from kvstore.errors import ConfigError, NotLeader, Unavailable
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.server import dial_peer
from kvstore.standing import Standing
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.reads import GetStatus, Status
from master.office import Office
from master.reception import Reception
from master.state import MasterState
from master.tunables import Tunables
from tests.fake_metadata_store import FakeMetadataStore, MetadataDisk
from tests.unit.master_rig import TENANT, small_content, small_layout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvstore.coordination.metadata_store import Entry
    from kvstore.ids import Epoch
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from master.leadership import Leadership

LEASE_S: Final = limits.LEADER_LEASE_S
OPEN: Final = OpenNamespace(small_content(), small_layout())
CALL_S: Final = 5.0
PATIENCE_S: Final = 10.0


class MovedClock(SystemClock):
    """The system's clock, which a test puts forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


class OneMaster:
    """A master, with what its test looks at and spoils."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.store = FakeMetadataStore(world.disk)
        self.reception = Reception(ListenerIdentity("test"))
        self.clock = world.clock
        self.tunables = Tunables(cluster="test", master=name, where=(f"{name}:7700",))
        self.states: list[MasterState] = []
        self.standings: list[tuple[Standing, int]] = []
        self.address = ""
        self.changed = asyncio.Event()
        self.bad_metadata = False
        self.office = Office(
            self.reception, self.store, world.clock, Candidate(name, self.tunables.where),
            self._make, self._stands,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    def _make(self, epoch: Epoch, restored: Sequence[Entry], until_s: float) -> MasterState:
        if self.bad_metadata:
            raise ConfigError("a value that is not ours")
        self.states.append(MasterState(self.tunables, epoch, restored, until_s))
        return self.states[-1]

    def _stands(self, leadership: Leadership) -> None:
        self.standings.append((leadership.standing, leadership.epoch))
        self.changed.set()

    async def start(self) -> None:
        self.address = await self.reception.listen("127.0.0.1:0")
        self.running = asyncio.create_task(self.office.run())

    async def until(self, standing: Standing, epoch: int | None = None) -> None:
        """Wait until it is that, in that epoch if one is named."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := self.office.leadership).standing is not standing or (
                epoch is not None and found.epoch != epoch
            ):
                self.changed.clear()
                await self.changed.wait()

    async def stepped_down(self) -> None:
        """Wait until its first term is over."""
        await eventually(lambda: (Standing.STANDBY, 1) in self.standings)

    async def dial(self, role: Role = Role.ENGINE) -> Peer:
        def answer(peer: Peer, request_id: int, message: Message) -> None:
            del peer, request_id, message

        identity = Identity(role, TENANT, "n", session=os.urandom(16))
        return await dial_peer(self.address, identity, answer, lambda _: None)

    async def ask(self, message: Message, role: Role = Role.ENGINE) -> Message:
        """The answer to one question over a connection of its own."""
        peer = await self.dial(role)
        try:
            return await peer.call(message, CALL_S)
        finally:
            peer.close()

    async def status(self) -> Status:
        answer = await self.ask(GetStatus(), Role.OPERATOR)
        assert isinstance(answer, Status)
        return answer

    async def stop(self) -> None:
        self.office.stop()
        await self.ended()

    async def ended(self) -> None:
        """Its end; raises what it ended of."""
        assert self.running is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.running


class World:
    """Two masters, and the disk that they share."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.disk = MetadataDisk(lease_s=LEASE_S, now=self.clock.now_s)
        self.first = OneMaster(self, "m1")
        self.second = OneMaster(self, "m2")

    async def both(self) -> None:
        """Start both; the first leads."""
        await self.first.start()
        await self.first.until(Standing.LEADING)
        await self.second.start()
        await eventually(lambda: self.second.office.leadership.leader is not None)


def run(use: Callable[[World], Awaitable[None]]) -> None:
    """Let `use` work with two masters, and stop those that it has left running."""

    async def life() -> None:
        world = World()
        try:
            await use(world)
        finally:
            for each in (world.first, world.second):
                each.store.reaches.set()
                each.office.stop()
            running = [each.running for each in (world.first, world.second) if each.running]
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(life())


async def eventually(is_so: Callable[[], bool]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 -- what is waited for tells nobody
            await asyncio.sleep(0.005)


async def open_namespace(master: OneMaster) -> bytes:
    opened = await master.ask(OPEN)
    assert isinstance(opened, NamespaceOpened)
    return opened.namespace


async def refusal(master: OneMaster, message: Message) -> Exception:
    """What a question is refused by."""
    with pytest.raises((NotLeader, Unavailable)) as caught:
        await master.ask(message)
    return caught.value
