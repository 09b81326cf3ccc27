"""The places that the contract of the MetadataStore is tried on."""

from __future__ import annotations

import asyncio
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvstore.coordination.etcd import EtcdStore
from kvstore.coordination.etcd_config import EtcdConfig
from kvstore.coordination.metadata_store import Candidate, Term
from kvstore.coordination.sqlite import SqliteStore
from kvstore.rpc.address import TcpAddress
from tests.fake_metadata_store import FakeMetadataStore, MetadataDisk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kvstore.coordination.metadata_store import Entry, MetadataStore
    from tests.etcd_server import EtcdServers

A = Candidate("a", ("10.0.0.1:7700",))
B = Candidate("b", ("10.0.0.2:7700",))
USURPER = Candidate("usurper", ())
SECRET = b"the secret of this cluster"


class Place(Protocol):
    """Where stores of one cluster meet."""

    lease_s: float

    def store(self) -> MetadataStore:
        """A store that was not opened."""
        ...

    def stranger(self) -> MetadataStore:
        """A store of another cluster that was pointed at the same place."""
        ...

    async def usurp(self) -> None:
        """Let whoever leads lose it without knowing, and the epoch rise in a term that is over."""
        ...


class FakePlace:
    """A disk in memory."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._disk = MetadataDisk("c", lease_s=lease_s)

    def store(self) -> MetadataStore:
        return FakeMetadataStore(self._disk, "c")

    def stranger(self) -> MetadataStore:
        return FakeMetadataStore(self._disk, "other")

    async def usurp(self) -> None:
        self._disk.expire_lease()
        await usurp(self.store())


class SqlitePlace:
    """A file."""

    lease_s = inf

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metadata.db"

    def store(self) -> MetadataStore:
        return SqliteStore(self._path, "c")

    def stranger(self) -> MetadataStore:
        return SqliteStore(self._path, "other")

    async def usurp(self) -> None:
        await usurp(self.store())


class EtcdPlace:
    """A cluster name in a real etcd."""

    lease_s = 2.0
    _numbers = count()

    def __init__(self, servers: EtcdServers) -> None:
        self._servers = servers
        self.cluster = f"c{next(self._numbers)}"
        self.secret = SECRET
        self._root = f"/kvharbor/{self.cluster}/"
        self.config = EtcdConfig(endpoints(servers))

    def store(self) -> EtcdStore:
        return EtcdStore(self.config, self.cluster, SECRET)

    def stranger(self) -> EtcdStore:
        return EtcdStore(self.config, self.cluster, b"another cluster's secret")

    async def usurp(self) -> None:
        self.delete("leader")
        await usurp(self.store())

    def configured(self, **changed: object) -> EtcdConfig:
        """The configuration of its stores, with changes."""
        return msgspec.structs.replace(self.config, **changed)

    def get(self, key: str) -> str:
        """What lies there; empty where nothing does."""
        return self._servers.get(self._root + key) or ""

    def put(self, key: str, value: str) -> None:
        """Write as a stranger would."""
        self.put_bytes(key.encode(), value.encode())

    def put_bytes(self, key: bytes, value: bytes) -> None:
        """As `put`."""
        self._servers.put_bytes(self._root.encode() + key, value)

    def delete(self, key: str) -> None:
        """Delete as an operator would."""
        self._servers.delete(self._root + key)

    def compact(self) -> None:
        """Forget all but the present."""
        self._servers.compact()

    def revision(self) -> int:
        """The present."""
        return self._servers.revision()

    def has_revision(self, revision: int) -> bool:
        """Whether it was not forgotten."""
        return self._servers.has_revision(revision)

    def freeze(self) -> None:
        """Let nothing be answered."""
        self._servers.members[0].freeze()

    def thaw(self) -> None:
        """Let what waits be answered."""
        self._servers.members[0].thaw()


def endpoints(servers: EtcdServers) -> tuple[TcpAddress, ...]:
    """Of all members."""
    return tuple(TcpAddress("127.0.0.1", each.port) for each in servers.members)


async def loaded(store: MetadataStore) -> list[Entry]:
    """All that lies there."""
    return [entry async for page in store.load("") for entry in page]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it; it must be within ten seconds."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never was")


def leading(place: EtcdPlace, use: Callable[[EtcdStore], Awaitable[None]]) -> None:
    """Open, win, use and close one store."""

    async def life() -> None:
        store = place.store()
        try:
            await store.open()
            assert isinstance(await store.campaign(A), Term)
            await use(store)
        finally:
            await store.close()

    asyncio.run(life())


async def usurp(store: MetadataStore) -> None:
    """A term of no length."""
    await store.open()
    await store.campaign(USURPER)
    await store.resign()
    await store.close()


def fake(_folder: Path, _servers: EtcdServers) -> Place:
    """Like the embedded store."""
    return FakePlace(inf)


def leased_fake(_folder: Path, _servers: EtcdServers) -> Place:
    """Like etcd."""
    return FakePlace(2.0)


def sqlite(folder: Path, _servers: EtcdServers) -> Place:
    """The embedded store."""
    return SqlitePlace(folder)


def etcd(_folder: Path, servers: EtcdServers) -> Place:
    """A real one, shared by all tests."""
    return EtcdPlace(servers)


PLACES = [fake, leased_fake, sqlite, etcd]
