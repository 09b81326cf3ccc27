"""The store in etcd while etcd is killed, stopped, cut off, full, or asks who we are."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import msgspec
import pytest

from kvstore.config_values import Seconds
from kvstore.coordination.etcd import EtcdStore
from kvstore.coordination.etcd_config import EtcdConfig
from kvstore.coordination.metadata_store import Candidate, Term
from kvstore.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    OutOfSpace,
    StaleEpoch,
    Unavailable,
)
from kvstore.rpc.address import TcpAddress, parse_address
from tests.cluster.tcp_proxy import Proxies
from tests.contract.metadata_places import endpoints
from tests.etcd_certificates import make_certificates
from tests.etcd_server import EtcdOptions, EtcdServers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from kvstore.coordination.metadata_store import Entry
    from tests.etcd_certificates import Certificate
    from tests.etcd_server import EtcdMember

A = Candidate("a", ())
B = Candidate("b", ())
QUICK_S = Seconds(0.3)

pytestmark = pytest.mark.usefixtures("_channels_end")


async def loaded(store: EtcdStore) -> list[Entry]:
    return [entry async for page in store.load("") for entry in page]


def with_store(config: EtcdConfig, use: Callable[[EtcdStore], Awaitable[None]]) -> None:
    async def life() -> None:
        store = EtcdStore(config, "c")
        try:
            await use(store)
        finally:
            await store.close()

    asyncio.run(life())


async def lead(store: EtcdStore, candidate: Candidate = A) -> None:
    await store.open()
    assert isinstance(await store.campaign(candidate), Term)


async def persist(call: Callable[[], Awaitable[None]], within_s: float) -> list[type[Exception]]:
    """Try until it succeeds; what went wrong before. Every try must end in time."""
    failures: list[type[Exception]] = []
    async with asyncio.timeout(within_s):
        while True:
            begun = time.monotonic()
            try:
                await call()
            except Unavailable as error:
                failures.append(type(error))
                assert time.monotonic() - begun < 1.0
                await asyncio.sleep(0.02)
            else:
                return failures


@pytest.fixture
def one(tmp_path: Path) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path) as servers:
        yield servers


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd3"), 3) as servers:
        yield servers


@pytest.fixture
def fresh_three(tmp_path: Path) -> Iterator[EtcdServers]:
    """For tests that start a member anew."""
    with EtcdServers(tmp_path, 3) as servers:
        yield servers


def follower_first(servers: EtcdServers) -> tuple[EtcdMember, EtcdConfig]:
    """A member without which the others go on, and a configuration that begins with it."""
    leader = servers.leader()
    members = sorted(servers.members, key=lambda each: each is leader)
    places = tuple(TcpAddress("127.0.0.1", each.port) for each in members)
    return members[0], EtcdConfig(places, timeout_s=QUICK_S)


@pytest.mark.slow
def test_a_kill_loses_nothing_and_the_store_finds_back_by_itself(one: EtcdServers) -> None:
    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        one.members[0].kill()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await store.write([("k", b"2")], [])
            with pytest.raises(Unavailable):
                await store.renew()
        one.restart(one.members[0])
        await persist(store.renew, within_s=10)
        await store.write([("l", b"3")], [])
        assert await loaded(store) == [("k", b"1"), ("l", b"3")]

    with_store(EtcdConfig(endpoints(one)), use)


def test_a_stopped_member_costs_a_deadline_and_no_more(three: EtcdServers) -> None:
    stopped, config = follower_first(three)

    async def use(store: EtcdStore) -> None:
        await lead(store)
        stopped.freeze()
        try:
            with pytest.raises(DeadlineExceeded):
                await store.write([("k", b"1")], [])
            await store.write([("k", b"2")], [])
            await store.renew()
        finally:
            stopped.thaw()
        await asyncio.sleep(QUICK_S)
        assert await loaded(store) == [("k", b"2")]
        await store.resign()

    with_store(config, use)


def test_reads_pass_over_a_stopped_member(three: EtcdServers) -> None:
    stopped, config = follower_first(three)

    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        stopped.freeze()
        try:
            assert await loaded(store) == [("k", b"1")]
        finally:
            stopped.thaw()
        await store.resign()

    with_store(config, use)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_term_outlives_the_leader_of_etcd(fresh_three: EtcdServers, how: str) -> None:
    three = fresh_three
    config = EtcdConfig(endpoints(three), timeout_s=QUICK_S)

    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        leader = three.leader()
        if how == "kill":
            leader.kill()
        else:
            leader.freeze()
        try:
            await persist(store.renew, within_s=10)
            await persist(lambda: store.write([("k", b"2")], []), within_s=5)
            assert await loaded(store) == [("k", b"2")]
        finally:
            if how == "freeze":
                leader.thaw()

    with_store(config, use)


@pytest.mark.slow
def test_whoever_is_cut_off_is_fenced_when_it_is_back(one: EtcdServers) -> None:
    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        proxy.cut()
        with pytest.raises(Unavailable):
            await store.renew()
        other = EtcdStore(EtcdConfig(endpoints(one)), "c")
        await other.open()
        async with asyncio.timeout(10):
            while not isinstance(await other.campaign(B), Term):
                with pytest.raises(Unavailable):
                    await store.renew()
                await asyncio.sleep(0.1)
        proxy.heal()
        with pytest.raises(StaleEpoch, match="epoch 1 is over"):
            await store.write([("k", b"2")], [])
        with pytest.raises(StaleEpoch):
            await store.renew()
        await other.write([("l", b"3")], [])
        assert await loaded(store) == [("k", b"1"), ("l", b"3")]
        await other.close()

    with Proxies() as proxies:
        proxy = proxies.front_of(one.members[0].address)
        address = parse_address(proxy.address)
        assert isinstance(address, TcpAddress)
        with_store(EtcdConfig((address,)), use)


def test_a_silent_network_costs_a_deadline_and_heals(one: EtcdServers) -> None:
    async def use(store: EtcdStore) -> None:
        await lead(store)
        proxy.hold(forward=False)
        for call in (store.write([("k", b"1")], []), store.renew(), store.write([("l", b"1")], [])):
            with pytest.raises(DeadlineExceeded):
                await call
        proxy.heal()
        await store.write([("m", b"2")], [])
        assert ("m", b"2") in await loaded(store)

    with Proxies() as proxies:
        proxy = proxies.front_of(one.members[0].address)
        address = parse_address(proxy.address)
        assert isinstance(address, TcpAddress)
        with_store(EtcdConfig((address,), timeout_s=QUICK_S), use)


@pytest.mark.parametrize("host", ["127.0.0.1", "no..name"])
def test_nobody_at_the_address_is_said_at_once(three: EtcdServers, host: str) -> None:
    gone = TcpAddress(host, 1)

    async def fail(store: EtcdStore) -> None:
        async with asyncio.timeout(2):
            with pytest.raises(Unavailable, match=f"etcd at {re.escape(host)}:1: "):
                await store.open()
            with pytest.raises(Unavailable):
                await store.open()

    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.resign()

    with_store(EtcdConfig((gone,)), fail)
    with_store(EtcdConfig((gone, *endpoints(three))), use)


def test_a_server_that_is_no_etcd_is_named() -> None:
    async def life() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        store = EtcdStore(EtcdConfig((TcpAddress("127.0.0.1", port),)), "c")
        with pytest.raises(ConfigError, match=f":{port}: .*: this is no etcd of version 3"):
            await store.open()
        await store.close()
        await server.stop(None)

    asyncio.run(life())


@pytest.mark.slow
def test_a_full_etcd_refuses_writes_and_goes_on_otherwise(tmp_path: Path) -> None:
    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        with suppress(OutOfSpace):
            for number in range(100):
                await store.write([("big", bytes([number]) * 1_000_000)], [])
        with pytest.raises(OutOfSpace, match="space exceeded"):
            await store.write([("k", b"2")], [])
        await store.renew()
        assert (await loaded(store))[-1] == ("k", b"1")
        other = EtcdStore(EtcdConfig(endpoints(servers)), "other")
        with pytest.raises(Unavailable, match="space exceeded"):
            await other.open()
        await other.close()
        await store.resign()
        with pytest.raises(Unavailable, match="space exceeded"):
            await store.campaign(A)
        servers.clear_space()
        assert isinstance(await store.campaign(A), Term)
        await store.write([("k", b"3")], ["big"])
        assert await loaded(store) == [("k", b"3")]

    options = EtcdOptions(quota_bytes=24 << 20)
    with EtcdServers(tmp_path, 1, options) as servers:
        with_store(EtcdConfig(endpoints(servers)), use)


def password(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@pytest.mark.slow
def test_user_and_password(one: EtcdServers, tmp_path: Path) -> None:
    one.require_users("kvharbor", "right", "/kvharbor/c/")
    right, wrong = password(tmp_path / "r", "right\n"), password(tmp_path / "w", "wrong\n")
    places = endpoints(one)

    async def refused(store: EtcdStore) -> None:
        with pytest.raises(AccessDenied, match="etcd at 127"):
            await store.open()

    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        # A member that starts anew has forgotten who had come.
        one.members[0].kill()
        one.restart(one.members[0])
        await persist(store.renew, within_s=10)
        await store.write([("k", b"2")], [])
        assert await loaded(store) == [("k", b"2")]

    with_store(EtcdConfig(places), refused)
    with_store(EtcdConfig(places, user="kvharbor", password_file=wrong), refused)
    with_store(EtcdConfig(places, user="nobody", password_file=right), refused)
    with_store(EtcdConfig(places, user="kvharbor", password_file=right), use)

    async def elsewhere() -> None:
        store = EtcdStore(EtcdConfig(places, user="kvharbor", password_file=right), "other")
        with pytest.raises(AccessDenied, match="want readwrite on the prefix"):
            await store.open()
        await store.close()

    asyncio.run(elsewhere())


def test_a_password_that_nobody_asks_for(one: EtcdServers, tmp_path: Path) -> None:
    async def refused(store: EtcdStore) -> None:
        with pytest.raises(AccessDenied, match="authentication is not enabled"):
            await store.open()

    file = password(tmp_path / "p", "p")
    with_store(EtcdConfig(endpoints(one), user="u", password_file=file), refused)


def with_tls(config: EtcdConfig, ca: Path, ours: Certificate) -> EtcdConfig:
    files = {"ca_file": ca, "cert_file": ours.cert, "key_file": ours.key}
    return msgspec.structs.replace(config, **files)


@pytest.mark.slow
def test_tls(tmp_path: Path) -> None:
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")

    async def use(store: EtcdStore) -> None:
        await lead(store)
        await store.write([("k", b"1")], [])
        await store.renew()
        assert await loaded(store) == [("k", b"1")]

    async def refused(store: EtcdStore) -> None:
        with pytest.raises(ConfigError, match="ca_file, cert_file and key_file decide"):
            await store.open()

    async def closed(store: EtcdStore) -> None:
        """etcd may end the connection without a word of why."""
        with pytest.raises((ConfigError, Unavailable), match="etcd at 127"):
            await store.open()

    with EtcdServers(tmp_path, 1, EtcdOptions(tls=ours)) as servers:
        plain = EtcdConfig(endpoints(servers))
        with_store(with_tls(plain, ours.ca, ours.client), use)
        with_store(with_tls(plain, theirs.ca, ours.client), refused)
        with_store(with_tls(plain, ours.ca, theirs.client), closed)
        with_store(msgspec.structs.replace(plain, ca_file=ours.ca), closed)
        with_store(plain, closed)
