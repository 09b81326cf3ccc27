"""A master's shell over real sockets around a scripted core. Not a test."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.coordination.metadata_store import Candidate
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.server import dial_peer
from kvstore.standing import Standing
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import GetStatus, Probe, Status
from master import events
from master.office import Office
from master.reception import Reception
from tests.fake_metadata_store import FakeMetadataStore, MetadataDisk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from master.leadership import Leadership

STATUS = Status("test", 1, 0.0, 3, 1, 1, 1, 0, (), (), (), {"hits": 7})
PROBE = Probe(bytes(32), bytes(32))


class ScriptedCore:
    """Remembers every event and answers by a function that the test gives."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.wakeup_s = math.inf
        self.answer: Callable[[events.Event], list[events.Action]] = lambda _: []
        self.seen = asyncio.Event()

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        assert now > 0
        self.events.append(event)
        self.seen.set()
        match event:
            case events.Request(session, request_id, GetStatus()):
                return [events.Reply(session, request_id, STATUS)]
        return self.answer(event)

    async def until(self, kind: type[events.Event], count: int = 1) -> list[events.Event]:
        """Wait for that many events of a kind."""
        async with asyncio.timeout(10):
            while True:
                found = [event for event in self.events if isinstance(event, kind)]
                if len(found) >= count:
                    return found
                self.seen.clear()
                await self.seen.wait()


class Bench:
    """A master around a scripted core, running in the test's loop, and a way to dial it."""

    def __init__(self) -> None:
        self.disk = MetadataDisk()
        self.core = ScriptedCore()
        self.reception = Reception(ListenerIdentity("test"))
        self.leads = asyncio.Event()
        self.office = Office(
            self.reception, FakeMetadataStore(self.disk), SystemClock(), Candidate("m", ("m:1",)),
            lambda *_: self.core, self._stands,
        )  # fmt: skip
        self.address = ""
        self.commands: list[Message] = []
        self.command_answer: Message | None = Done()
        self.lost = asyncio.Event()
        """Some dialled connection has ended."""

    def _stands(self, leadership: Leadership) -> None:
        if leadership.standing is Standing.LEADING:
            self.leads.set()

    async def dial(self, role: Role = Role.ENGINE) -> Peer:
        return await dial_peer(
            self.address, Identity(role, name="n"), self._command, lambda _: self.lost.set()
        )

    def _command(self, peer: Peer, request_id: int, message: Message) -> None:
        self.commands.append(message)
        if self.command_answer is None:
            peer.close()
        else:
            peer.reply(request_id, self.command_answer)


def run(use: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Run the master while `use` works with it, then stop it; raises what the master raises."""

    async def life() -> Bench:
        bench = Bench()
        bench.address = await bench.reception.listen("127.0.0.1:0")
        running = asyncio.create_task(bench.office.run())
        try:
            async with asyncio.timeout(10):
                await bench.leads.wait()
            await use(bench)
            bench.office.stop()
        finally:
            async with asyncio.timeout(10):
                await running
        return bench

    return asyncio.run(life())
