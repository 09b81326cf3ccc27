"""Masters over one metadata store that knows leases, in one loop: who leads, and what peers hear.

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
from kvstore.errors import ConfigError, InvariantBroken, NotLeader, Unavailable
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.server import dial_peer
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.reads import GetStatus, Located, MatchPrefix, Status
from master.leadership import IN_DOUBT, Standing
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


def test_a_standby_names_the_leader_and_its_epoch() -> None:
    async def use(world: World) -> None:
        await world.both()
        error = await refusal(world.second, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ("m1:7700",)
        for master in (world.first, world.second):
            peer = await master.dial()
            assert peer.welcome is not None
            assert peer.welcome.epoch == 1
        told = await world.second.status()
        assert (told.master, told.standing, told.epoch) == ("m2", "standby", 1)
        assert told.leader == ("m1:7700",)
        told = await world.first.status()
        assert (told.master, told.standing, told.leader) == ("m1", "leading", ("m1:7700",))

    run(use)


def test_an_engine_is_sent_on_by_a_standby_even_when_it_asks_for_the_status() -> None:
    async def use(world: World) -> None:
        await world.both()
        assert isinstance(await refusal(world.second, GetStatus()), NotLeader)

    run(use)


def test_who_stops_lets_another_lead_at_once() -> None:
    async def use(world: World) -> None:
        await world.both()
        namespace = await open_namespace(world.first)
        began_s = world.clock.now_s()
        await world.first.stop()
        await world.second.until(Standing.LEADING, 2)
        assert world.clock.now_s() < began_s + LEASE_S / 2
        assert await open_namespace(world.second) == namespace
        found = await world.second.ask(MatchPrefix(namespace, b""))
        assert isinstance(found, Located)
        assert (found.epoch, found.lease_ttl_s > 0) == (2, True)

    run(use)


def test_what_waits_for_the_store_is_stored_before_another_leads() -> None:
    async def use(world: World) -> None:
        await world.both()
        world.disk.refusals = [Unavailable("away for a moment")]
        asked = asyncio.create_task(world.first.ask(OPEN))
        await eventually(lambda: not world.disk.refusals)
        await world.first.stop()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert any(key.startswith("namespaces/") for key in world.disk.entries)

    run(use)


def test_a_leader_that_is_gone_is_followed_when_its_lease_has_ended() -> None:
    async def use(world: World) -> None:
        await world.both()
        world.first.store.is_cut_off = True
        world.clock.ahead_s += LEASE_S
        await world.second.until(Standing.LEADING, 2)
        assert world.first.office.leadership.standing is Standing.LEADING  # and knows nothing
        assert (await world.first.status()).standing == IN_DOUBT
        error = await refusal(world.first, OPEN)
        assert "in doubt" in str(error)
        await open_namespace(world.second)

    run(use)


def test_the_deposed_leader_closes_its_sessions_and_stands_by() -> None:
    async def use(world: World) -> None:
        await world.both()
        peer = await world.first.dial()
        world.first.store.is_cut_off = True
        world.clock.ahead_s += LEASE_S
        await world.second.until(Standing.LEADING, 2)
        world.first.store.is_cut_off = False
        await world.first.stepped_down()
        with pytest.raises(Unavailable):
            await peer.call(OPEN, CALL_S)
        await eventually(lambda: world.first.office.leadership.leader is not None)
        error = await refusal(world.first, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ("m2:7700",)
        # The core of the old term heard nothing of its end: nothing can follow from it.
        assert len(world.first.states[0].core.sessions) > 1

    run(use)


def test_lookups_are_answered_in_doubt_and_the_term_goes_on_when_it_held() -> None:
    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        namespace = await open_namespace(world.first)
        peer = await world.first.dial()
        world.first.store.is_cut_off = True
        leads_until_s = world.first.office.leadership.leads_until_s
        # In doubt by its own margin; the store has not ended the lease.
        world.clock.ahead_s += leads_until_s - world.clock.now_s()
        found = await peer.call(MatchPrefix(namespace, b""), CALL_S)
        assert isinstance(found, Located)
        assert found.lease_ttl_s == 0.0
        with pytest.raises(Unavailable, match="in doubt"):
            await peer.call(OPEN, CALL_S)
        world.disk.prolong()  # a renewal did come through, but its answer was lost
        world.first.store.is_cut_off = False
        await eventually(lambda: world.first.office.look()[0].standing == Standing.LEADING)
        found = await peer.call(MatchPrefix(namespace, b""), CALL_S)
        assert isinstance(found, Located)
        assert (found.epoch, found.lease_ttl_s > 0) == (1, True)
        assert len(world.first.states) == 1

    run(use)


def test_a_leader_whose_key_is_gone_leads_anew_in_another_term() -> None:
    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        namespace = await open_namespace(world.first)
        peer = await world.first.dial()
        world.first.store.is_cut_off = True
        world.clock.ahead_s += LEASE_S
        found = await peer.call(MatchPrefix(namespace, b""), CALL_S)
        assert isinstance(found, Located)
        assert found.lease_ttl_s == 0.0
        world.first.store.is_cut_off = False
        await world.first.until(Standing.LEADING, 2)
        assert await open_namespace(world.first) == namespace
        assert world.first.standings == [
            (Standing.LOADING, 1), (Standing.LEADING, 1), (Standing.STANDBY, 1),
            (Standing.LOADING, 2), (Standing.LEADING, 2),
        ]  # fmt: skip

    run(use)


def test_a_write_that_is_refused_ends_the_term() -> None:
    async def use(world: World) -> None:
        await world.both()
        both = (world.first, world.second)
        world.disk.expire_lease()  # falsely, and the renewal is not due yet
        asked = asyncio.create_task(world.first.ask(OPEN))
        await world.first.stepped_down()
        with pytest.raises(Unavailable):
            await asked
        await eventually(
            lambda: any(each.office.leadership.leads(world.clock.now_s()) for each in both)
        )
        assert not any(key.startswith("namespaces/") for key in world.disk.entries)

    run(use)


def test_a_term_that_is_over_does_not_go_on_trying_to_write() -> None:
    async def use(world: World) -> None:
        await world.both()
        world.disk.is_full = True
        asked = asyncio.create_task(world.first.ask(OPEN))
        await eventually(lambda: world.first.office.look()[1].persist_failures > 0)
        world.disk.expire_lease()
        await world.first.stepped_down()
        world.disk.is_full = False
        with pytest.raises(Unavailable):
            await asked
        world.clock.ahead_s += LEASE_S
        await asyncio.sleep(0.3)
        assert not any(key.startswith("namespaces/") for key in world.disk.entries)

    run(use)


def test_a_store_that_is_away_at_the_start_is_waited_for() -> None:
    async def use(world: World) -> None:
        world.first.store.is_cut_off = True
        await world.first.start()
        error = await refusal(world.first, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ()
        assert (await world.first.status()).standing == "standby"
        world.first.store.is_cut_off = False
        await world.first.until(Standing.LEADING, 1)

    run(use)


def test_a_store_that_hangs_at_the_start_does_not_keep_the_master_from_ending() -> None:
    async def use(world: World) -> None:
        world.first.store.reaches.clear()
        await world.first.start()
        assert isinstance(await refusal(world.first, OPEN), NotLeader)
        await world.first.stop()

    run(use)


def test_a_place_of_another_cluster_ends_the_start() -> None:
    async def use(world: World) -> None:
        world.disk.cluster = "other"
        await world.first.start()
        with pytest.raises(ConfigError, match="holds cluster 'other'"):
            await world.first.ended()

    run(use)


def test_metadata_that_cannot_be_taken_over_ends_the_master_and_frees_the_lead() -> None:
    async def use(world: World) -> None:
        world.first.bad_metadata = True
        await world.first.start()
        with pytest.raises(ConfigError, match="not ours"):
            await world.first.ended()
        assert world.disk.leader is None
        assert (Standing.LEADING, 1) not in world.first.standings

    run(use)


def test_a_bug_in_the_core_frees_the_lead() -> None:
    async def use(world: World) -> None:
        await world.both()

        def broken(*_: object) -> list[object]:
            raise InvariantBroken("I5: two extents overlap")

        world.first.states[0].handle = broken  # type: ignore[method-assign,assignment]
        assert isinstance(await refusal(world.first, OPEN), Unavailable)
        with pytest.raises(InvariantBroken, match="I5"):
            await world.first.ended()
        began_s = world.clock.now_s()
        await world.second.until(Standing.LEADING, 2)
        assert world.clock.now_s() < began_s + LEASE_S / 2

    run(use)


def test_who_waits_at_a_standby_learns_that_it_leads() -> None:
    async def use(world: World) -> None:
        await world.both()
        waiting = await world.second.dial()
        await world.first.stop()
        await eventually(lambda: waiting.closed_because is not None)
        await world.second.until(Standing.LEADING, 2)
        peer = await world.second.dial()
        assert peer.welcome is not None
        assert peer.welcome.epoch == 2

    run(use)


def test_the_first_life_of_a_master_is_not_told_as_its_leader() -> None:
    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        world.second = OneMaster(world, "m1")
        await world.second.start()
        await eventually(lambda: world.second.office.leadership.leader is not None)
        error = await refusal(world.second, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ()

    run(use)


def test_lost_renewals_are_counted() -> None:
    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        world.first.store.is_cut_off = True
        await eventually(lambda: world.first.office.look()[1].renewals_failed >= 2)
        _, counts = world.first.office.look()
        assert (counts.terms, counts.lease_left_s < LEASE_S) == (1, True)

    run(use)
