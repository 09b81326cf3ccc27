"""The asyncio link to the masters, against real servers: it reconnects, follows, and ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.client.async_link import AsyncMasterLink
from kvstore.errors import BadValue, CallerError, DeadlineExceeded, NotLeader, Unavailable
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.server import Server
from kvstore.wire.messages.reads import Located, Lookup, Probe, Probed, Remove
from tests.vanishing import vanish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message

PROBE = Probe(bytes(32), bytes(64))
ME = Identity(Role.ENGINE)
LONG_S = 10.0


class Master:
    """A listener that answers Probe, or says that it does not lead."""

    def __init__(self, epoch: int = 1) -> None:
        self.leads = True
        self.where: tuple[str, ...] = ()
        """Who it says leads instead."""
        self.answers = True
        self.found = Located(epoch, 10.0, (), ())
        self.asked = 0
        self.peers: list[Peer] = []
        listener = ListenerIdentity("test", epoch=epoch)
        self._server = Server(listener, self._opened, self._requested, lambda peer: None)

    async def listen(self, address: str = "127.0.0.1:0") -> str:
        """Begin to answer; where."""
        return await self._server.listen(address)

    async def close(self) -> None:
        """End."""
        await self._server.close()

    def _opened(self, peer: Peer, hello: object) -> None:
        del hello
        self.peers.append(peer)

    def _requested(self, peer: Peer, request_id: int, message: Message) -> None:
        self.asked += 1
        if not self.leads:
            raise NotLeader(self.where)
        if not self.answers:
            return
        if isinstance(message, Lookup):
            peer.reply(request_id, self.found)
            return
        if isinstance(message, Remove):
            raise CallerError("no")
        peer.reply(request_id, Probed(b"\1\0"))


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * LONG_S):
            await body()

    asyncio.run(bounded())


def test_calls_share_a_connection_and_errors_arrive_typed() -> None:
    async def body() -> None:
        master = Master()
        link = AsyncMasterLink([await master.listen()], ME)
        replies = await asyncio.gather(*(link.call(PROBE, LONG_S) for _ in range(50)))
        assert replies == [Probed(b"\1\0")] * 50
        with pytest.raises(CallerError):
            await link.call(Remove(bytes(32), bytes(32), 1.0), LONG_S)
        assert len(master.peers) == 1
        link.close()
        link.close()
        with pytest.raises(Unavailable, match="closed"):
            await link.call(PROBE, LONG_S)
        await master.close()

    run(body)


def test_a_lost_connection_is_made_anew() -> None:
    async def body() -> None:
        master = Master()
        address = await master.listen()
        link = AsyncMasterLink([address], ME)
        await link.call(PROBE, LONG_S)
        master.peers[0].close()
        assert await link.call(PROBE, LONG_S) == Probed(b"\1\0")
        await master.close()
        later = Master(epoch=2)
        await later.listen(address)
        assert await link.call(PROBE, LONG_S) == Probed(b"\1\0")
        link.close()
        await later.close()

    run(body)


def test_who_leads_is_found_by_asking() -> None:
    async def body() -> None:
        first, second = Master(), Master()
        first.leads = False
        link = AsyncMasterLink([await first.listen(), await second.listen()], ME)
        for _ in range(3):
            assert await link.call(PROBE, LONG_S) == Probed(b"\1\0")
        assert (first.asked, second.asked) == (1, 3)
        link.close()
        await asyncio.gather(first.close(), second.close())

    run(body)


def test_a_leader_that_is_named_is_followed_though_it_is_not_listed() -> None:
    async def body() -> None:
        first, second = Master(), Master()
        first.leads = False
        first.where = (await second.listen(),)
        link = AsyncMasterLink([await first.listen()], ME)
        for _ in range(3):
            assert await link.call(PROBE, LONG_S) == Probed(b"\1\0")
        assert (first.asked, second.asked) == (1, 3)
        link.close()
        await asyncio.gather(first.close(), second.close())

    run(body)


def test_a_silent_leader_is_left_for_one_of_a_higher_epoch() -> None:
    async def body() -> None:
        old, new = Master(epoch=3), Master(epoch=4)
        link = AsyncMasterLink([await old.listen(), await new.listen()], ME)
        await link.call(PROBE, LONG_S)
        old.answers = False
        replies = await asyncio.gather(*(link.call(PROBE, LONG_S) for _ in range(5)))
        assert replies == [Probed(b"\1\0")] * 5
        assert len(new.peers) == 1
        link.close()
        await asyncio.gather(old.close(), new.close())

    run(body)


def test_a_leader_that_nothing_gets_to_is_asked_at_another_of_its_addresses() -> None:
    async def body() -> None:
        first, second = Master(epoch=3), Master(epoch=3)
        link = AsyncMasterLink([await first.listen(), await second.listen()], ME)
        await link.call(PROBE, LONG_S)
        transport = first.peers[0]._transport  # noqa: SLF001 -- nothing else has its socket
        assert transport is not None
        vanish(transport.get_extra_info("socket"))
        assert await link.call(PROBE, LONG_S) == Probed(b"\1\0")
        assert (first.asked, second.asked) == (1, 1)
        link.close()
        await asyncio.gather(first.close(), second.close())

    run(body)


def test_a_leader_that_can_grant_no_lease_is_left_for_another() -> None:
    async def body() -> None:
        old, new = Master(epoch=3), Master(epoch=4)
        old.found = Located(3, 0.0, (), ())
        link = AsyncMasterLink([await old.listen(), await new.listen()], ME)
        assert await link.call(Lookup(bytes(32), bytes(32)), LONG_S) == new.found
        link.close()
        await asyncio.gather(old.close(), new.close())

    run(body)


def test_a_master_of_a_lower_epoch_is_passed_over() -> None:
    async def body() -> None:
        old, new = Master(epoch=3), Master(epoch=4)
        link = AsyncMasterLink([await new.listen(), await old.listen()], ME)
        await link.call(PROBE, LONG_S)
        await new.close()
        with pytest.raises(DeadlineExceeded):
            await link.call(PROBE, 0.2)
        assert old.asked == 0
        link.close()
        await old.close()

    run(body)


def test_an_unreachable_master_is_tried_until_the_deadline() -> None:
    async def body() -> None:
        master = Master()
        address = await master.listen()
        await master.close()
        link = AsyncMasterLink([address], ME)
        with pytest.raises(DeadlineExceeded, match="tries"):
            await link.call(PROBE, 0.2)
        link.close()

    run(body)


@pytest.mark.parametrize("addresses", [[], ["nowhere"], ["127.0.0.1:1", "::1"]])
def test_what_is_no_address_is_refused_at_once(addresses: list[str]) -> None:
    with pytest.raises(BadValue):
        AsyncMasterLink(addresses, ME)
