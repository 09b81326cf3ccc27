"""Terms and writes under leases of a real etcd, and what answers that were lost may do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.coordination.etcd_calls import EtcdCalls
from kvstore.coordination.metadata_store import Leader, Term
from kvstore.errors import DeadlineExceeded, StaleEpoch, Unavailable
from kvstore.ids import Epoch
from tests.contract.metadata_places import A, B, EtcdPlace, leading, loaded, until

if TYPE_CHECKING:
    from kvstore.coordination.etcd import EtcdStore
    from tests.etcd_server import EtcdServers


@pytest.fixture
def place(etcd_servers: EtcdServers, _channels_end: None) -> EtcdPlace:
    """A cluster name that nobody has used."""
    return EtcdPlace(etcd_servers)


def test_a_write_whose_answer_was_lost_may_be_tried_again(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact = EtcdCalls.transact

    async def unheard(self: EtcdCalls, request: object, timeout_s: float | None = None) -> object:
        await transact(self, request, timeout_s)
        raise DeadlineExceeded("lost")

    async def use(store: EtcdStore) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(EtcdCalls, "transact", unheard)
            for value in (b"1", b"2"):
                with pytest.raises(DeadlineExceeded):
                    await store.write([("k", value)], [])
        assert await loaded(store) == [("k", b"1")]  # the second named a revision that was gone
        await store.write([("k", b"3")], [])
        assert await loaded(store) == [("k", b"3")]

    leading(place, use)


def test_a_write_that_arrives_after_a_later_one_has_no_effect(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact = EtcdCalls.transact
    held: list[object] = []

    async def hold(self: EtcdCalls, request: object, timeout_s: float | None = None) -> object:
        held.append(request)
        raise DeadlineExceeded("on its way")

    async def use(store: EtcdStore) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(EtcdCalls, "transact", hold)
            with pytest.raises(DeadlineExceeded):
                await store.write([("k", b"early")], [])
        await store.write([("k", b"late")], [])
        calls = EtcdCalls(place.config)
        assert not (await transact(calls, held[0])).succeeded
        await calls.close()
        assert await loaded(store) == [("k", b"late")]

    leading(place, use)


def test_an_election_whose_answer_was_lost_keeps_nobody_out(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact = EtcdCalls.transact

    async def unheard(self: EtcdCalls, request: object, timeout_s: float | None = None) -> object:
        answer = await transact(self, request, timeout_s)
        if getattr(request, "compare", ()):
            raise DeadlineExceeded("lost")
        return answer

    async def use(store: EtcdStore) -> None:
        await store.resign()
        with monkeypatch.context() as patched:
            patched.setattr(EtcdCalls, "transact", unheard)
            with pytest.raises(DeadlineExceeded):
                await store.campaign(A)
        with pytest.raises(StaleEpoch):
            await store.write([], [])
        assert place.get("epoch") == "2"
        assert await store.campaign(B) == Term(Epoch(3), 2.0)

    leading(place, use)


def test_an_election_that_takes_longer_than_its_lease_is_lost(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = EtcdCalls.grant

    async def late(self: EtcdCalls, lease_s: int, timeout_s: float) -> object:
        granted = await grant(self, lease_s, timeout_s)
        await self.revoke(granted.ID, timeout_s)
        return granted

    async def use(store: EtcdStore) -> None:
        await store.resign()
        with monkeypatch.context() as patched:
            patched.setattr(EtcdCalls, "grant", late)
            with pytest.raises(Unavailable, match="ended before it was used"):
                await store.campaign(A)
        assert await store.campaign(A) == Term(Epoch(2), 2.0)

    leading(place, use)


def test_no_more_of_a_lease_is_counted_on_than_was_asked_for(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = EtcdCalls.grant

    async def longer(self: EtcdCalls, lease_s: int, timeout_s: float) -> object:
        return await grant(self, 4 * lease_s, timeout_s)  # as where elections take long

    async def use(store: EtcdStore) -> None:
        await store.resign()
        with monkeypatch.context() as patched:
            patched.setattr(EtcdCalls, "grant", longer)
            assert await store.campaign(A) == Term(Epoch(2), 2.0)

    leading(place, use)


def test_a_lease_that_nobody_renews_ends_the_term(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        other = place.store()
        await other.open()
        async with asyncio.timeout(10):
            while isinstance(outcome := await other.campaign(B), Leader):
                assert outcome == Leader(Epoch(1), A.name, A.where)
                await asyncio.sleep(0.2)
        assert outcome == Term(Epoch(2), 2.0)
        with pytest.raises(StaleEpoch, match="epoch 1 is over: b leads"):
            await store.write([("k", b"")], [])
        with pytest.raises(StaleEpoch, match="epoch 1 is over: b leads"):
            await store.renew()
        assert await loaded(other) == []
        await other.close()

    leading(place, use)


def test_a_renewal_after_the_lease_has_ended_says_so(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        await until(lambda: not place.get("leader"))
        with pytest.raises(StaleEpoch, match="epoch 1 is over: its lease has ended"):
            await store.renew()

    leading(place, use)


def test_a_term_is_over_whoever_took_its_key(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        place.delete("leader")
        place.put("leader", "me")
        with pytest.raises(StaleEpoch, match="epoch 1 is over: somebody leads"):
            await store.renew()

    leading(place, use)


def test_a_renewal_notices_that_its_key_was_taken_away(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        place.delete("leader")
        with pytest.raises(StaleEpoch, match="epoch 1 is over: nobody leads"):
            await store.renew()

    leading(place, use)
