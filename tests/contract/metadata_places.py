"""The places that the contract of the MetadataStore is tried on."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol

from kvstore.coordination.metadata_store import Candidate
from kvstore.coordination.sqlite import SqliteStore
from tests.fake_metadata_store import FakeMetadataStore, MetadataDisk

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.coordination.metadata_store import MetadataStore

USURPER = Candidate("usurper", ())


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


async def usurp(store: MetadataStore) -> None:
    """A term of no length."""
    await store.open()
    await store.campaign(USURPER)
    await store.resign()
    await store.close()


def fake(_folder: Path, _request: pytest.FixtureRequest) -> Place:
    """Like the embedded store."""
    return FakePlace(inf)


def leased_fake(_folder: Path, _request: pytest.FixtureRequest) -> Place:
    """Like etcd."""
    return FakePlace(2.0)


def sqlite(folder: Path, _request: pytest.FixtureRequest) -> Place:
    """The embedded store."""
    return SqlitePlace(folder)


PLACES = [fake, leased_fake, sqlite]
