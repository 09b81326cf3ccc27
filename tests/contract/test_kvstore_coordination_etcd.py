"""What only a store that masters share can meet: strangers, other versions, compaction."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

import pytest

from kvstore.coordination import etcd
from kvstore.coordination.etcd import EtcdStore
from kvstore.coordination.etcd_calls import EtcdCalls
from kvstore.coordination.metadata_store import Term
from kvstore.errors import ConfigError, Unavailable
from kvstore.ids import Epoch
from tests.contract.metadata_places import A, B, EtcdPlace, endpoints, leading, loaded, until

if TYPE_CHECKING:
    from tests.etcd_server import EtcdServers


@pytest.fixture
def place(etcd_servers: EtcdServers, _channels_end: None) -> EtcdPlace:
    """A cluster name that nobody has used."""
    return EtcdPlace(etcd_servers)


def refused(place: EtcdPlace) -> str:
    """The text of the ConfigError that opening gives."""

    async def life() -> None:
        store = place.store()
        try:
            await store.open()
        finally:
            await store.close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(life())
    return str(caught.value)


async def nothing(_: EtcdStore) -> None:
    pass


def test_the_layout_is_said_and_a_newer_one_is_refused(place: EtcdPlace) -> None:
    leading(place, nothing)
    said = json.loads(place.get("config"))
    assert said["layout"] == 1
    place.put("config", json.dumps(said | {"layout": 2, "new": True}))
    assert "says layout 2, this master knows 1" in refused(place)


def test_a_standby_does_not_follow_a_master_of_a_newer_layout(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        await store.resign()
        said = place.get("config")
        place.put("config", said.replace('"layout":1', '"layout":2'))
        with pytest.raises(Unavailable, match="says layout 2, this master knows 1"):
            await store.campaign(A)
        place.delete("config")
        with pytest.raises(Unavailable, match="/config is gone; a master that is started"):
            await store.campaign(A)
        place.put("config", said)
        assert isinstance(await store.campaign(A), Term)

    leading(place, use)


def test_a_config_of_somebody_else_is_refused(place: EtcdPlace) -> None:
    place.put("config", "port: 80")
    assert f"/kvharbor/{place.cluster}/config is not kvharbor's" in refused(place)


def test_another_secret_is_refused_until_the_operator_says_that_it_is_meant(
    place: EtcdPlace,
) -> None:
    async def use() -> None:
        other = place.stranger()
        with pytest.raises(ConfigError, match=r"two clusters are called .* delete this key"):
            await other.open()
        place.delete("config")
        await other.open()
        outcome = await other.campaign(B)
        assert isinstance(outcome, Term)
        assert outcome.epoch == 2
        await other.close()

    async def resigned(store: EtcdStore) -> None:
        await store.resign()

    leading(place, resigned)
    asyncio.run(use())
    assert "under another secret" in refused(place)


def test_a_lost_epoch_is_not_begun_anew(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        await store.resign()
        place.delete("epoch")
        with pytest.raises(Unavailable, match="higher than all epochs of this cluster"):
            await store.campaign(A)
        place.put("epoch", "-1")
        with pytest.raises(Unavailable, match="holds b'-1', want a number"):
            await store.campaign(A)
        other = place.store()
        with pytest.raises(ConfigError, match="holds b'-1', want a number"):
            await other.open()
        await other.close()
        place.put("epoch", "7")
        assert await store.campaign(A) == Term(Epoch(8), 2.0)

    leading(place, use)


def test_a_leader_without_a_lease_is_named(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        await store.resign()
        place.put("leader", "me")
        with pytest.raises(Unavailable, match=r"/leader has no lease, .* delete it"):
            await store.campaign(A)
        place.delete("leader")
        assert isinstance(await store.campaign(A), Term)

    leading(place, use)


def test_keys_of_others_are_counted_and_left_alone(
    place: EtcdPlace, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(_: EtcdStore) -> None:
        store = EtcdStore(place.config, place.cluster, place.secret, ("ours/", "mine/"))
        place.put("mine/a", "1")
        place.put("theirs/b", "2")
        place.put_bytes(b"mine/\xff", b"3")
        await store.open()
        assert await loaded(store) == [("mine/a", b"1")]
        assert place.get("theirs/b") == "2"
        await store.close()

    with caplog.at_level(logging.WARNING):
        leading(place, use)
    first = f"/kvharbor/{place.cluster}/mine/\\xff"
    assert caplog.messages == [f"etcd: 2 keys are not ours and left alone, e.g. {first}"]


def test_clusters_whose_names_begin_alike_are_apart(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        await store.write([("k", b"1")], [])
        near = EtcdStore(place.config, f"{place.cluster}-b", place.secret)
        await near.open()
        assert isinstance(await near.campaign(A), Term)
        await near.write([("k", b"2")], [])
        assert await loaded(store) == [("k", b"1")]
        await near.close()

    leading(place, use)


def test_a_compaction_between_pages_ends_a_load_which_may_start_over(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        for start in range(0, 300, 100):
            await store.write([(f"k{start + each:03}", b"") for each in range(100)], [])
        pages = store.load("")
        assert await anext(pages)
        await store.write([("later", b"")], [])
        place.compact()
        with pytest.raises(Unavailable, match="compacted during a load: start over"):
            await anext(pages)
        assert len(await loaded(store)) == 301

    leading(place, use)


def test_pages_have_the_bytes_that_they_shall_have(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        for number in range(60):
            await store.write([(f"k{number:02}", bytes(200_000))], [])
        sizes = [len(page) async for page in store.load("")]
        assert sizes[0] + 2 == etcd.PAGE_KEYS_FIRST  # the store's own config and epoch
        assert set(sizes[2:-1]) == {etcd.PAGE_BYTES // 200_000}
        assert sum(sizes) == 60

    leading(place, use)


def test_only_in_an_etcd_of_its_own_a_master_compacts(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "COMPACT_EVERY_S", 0.02)
    compacted: list[int] = []

    async def compact(_: EtcdCalls, revision: int) -> None:
        compacted.append(revision)

    monkeypatch.setattr(EtcdCalls, "compact", compact)

    async def life(owned: bool) -> None:
        store = EtcdStore(place.configured(owned=owned), place.cluster, place.secret)
        await store.open()
        assert isinstance(await store.campaign(A), Term)
        if owned:
            await until(lambda: len(compacted) >= 3)
            await store.resign()
            compacted.clear()
        await asyncio.sleep(0.2)
        assert not compacted
        await store.resign()
        await store.close()

    asyncio.run(life(owned=False))
    asyncio.run(life(owned=True))


def test_a_bug_that_ends_the_compaction_is_heard_at_the_next_renewal(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the history of a master that leads for months would only grow, and nobody hear why."""
    monkeypatch.setattr(etcd, "COMPACT_EVERY_S", 0.02)

    class Bug(Exception):
        """What nobody expects."""

    async def compact(*_: object) -> None:
        raise Bug

    monkeypatch.setattr(EtcdCalls, "compact", compact)

    async def life() -> None:
        store = EtcdStore(place.configured(owned=True), place.cluster, place.secret)
        await store.open()
        await store.campaign(A)
        await store.renew()
        upkeep = store._upkeep  # noqa: SLF001 -- the test waits for its end
        assert upkeep is not None
        await until(upkeep.done)
        with pytest.raises(Bug):
            await store.renew()
        await store.close()

    asyncio.run(life())


def test_what_is_compacted_is_history(place: EtcdPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "COMPACT_EVERY_S", 0.02)

    async def life() -> None:
        store = EtcdStore(place.configured(owned=True), place.cluster, place.secret)
        await store.open()
        await store.campaign(A)
        before = place.revision()
        for number in range(5):
            await store.write([("k", bytes([number]))], [])
        await until(lambda: not place.has_revision(before))
        assert await loaded(store) == [("k", b"\4")]
        await store.close()

    asyncio.run(life())


def test_a_close_ends_what_waits(etcd_servers: EtcdServers, place: EtcdPlace) -> None:
    assert endpoints(etcd_servers) == place.config.endpoints

    async def use(store: EtcdStore) -> None:
        place.freeze()
        try:
            writing = asyncio.create_task(store.write([("k", b"")], []))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(0.5):
                await store.close()
                with pytest.raises(Unavailable, match="closed meanwhile"):
                    await writing
        finally:
            place.thaw()

    leading(place, use)


def test_a_cancelled_call_is_cancelled(place: EtcdPlace) -> None:
    async def use(store: EtcdStore) -> None:
        place.freeze()
        try:
            writing = asyncio.create_task(store.write([("k", b"")], []))
            await asyncio.sleep(0.05)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        finally:
            place.thaw()
        await store.write([("k", b"2")], [])
        assert await loaded(store) == [("k", b"2")]

    leading(place, use)
