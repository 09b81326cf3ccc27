"""A worker that stands still (SIGSTOP) while others have its pages: readers hardly notice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, KVStore, Stored
from kvstore.aio import AsyncKVStore
from kvstore.transfer.choice import Choice
from tests.cluster.pages import PAGE_TOKENS, SIZE, Pages
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.locations import Locations

pytestmark = pytest.mark.cluster

CHAINS = 12
TIMEOUT_S = 30.0


class Pool:
    """A rig of two workers that both hold every page; each page is a chain of its own."""

    def __init__(self, rig: Rig, pages: Pages) -> None:
        self.rig = rig
        self.pages = pages
        opened = self.opened = pages.open()
        self.chains = [opened.chain([i + 1] * PAGE_TOKENS) for i in range(CHAINS)]
        for chain in self.chains:
            source = payload(chain.key(0), 0, SIZE)
            outcomes = pages.store.put(
                opened, chain, source, [0], replicas=2, replicas_now=True, timeout_s=TIMEOUT_S
            )
            assert outcomes == [Stored(replicas_wanted=2, replicas=2)]

    def located(self, store: KVStore) -> list[Locations]:
        """Where each page lies: on both workers."""
        found: list[Locations] = [store.match_prefix(self.opened, chain) for chain in self.chains]
        for match in found:
            (piece,) = match.pieces
            assert {each.worker for each in piece.located.segments} == {"w0", "w1"}
        return found

    def assert_read(self, number: int, outcomes: object, into: bytearray) -> None:
        assert outcomes == [Hit()]
        assert bytes(into) == payload(self.chains[number].key(0), 0, SIZE)

    def read_all(self, store: KVStore, located: list[Locations]) -> None:
        """All pages, right."""
        into = bytearray(SIZE)
        for number, match in enumerate(located):
            self.assert_read(number, store.read(match, into, [0]), into)

    def store(self) -> KVStore:
        """Over the network."""
        return KVStore.connect(self.rig.addresses, transports=("tcp",))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    shape = Shape(masters=1, workers=2, members=0)
    with Rig(tmp_path_factory.mktemp("pool") / "pool", shape) as rig, rig.pages("tcp") as pages:
        yield Pool(rig, pages)


@pytest.fixture(params=[0, 1])
def stopped(pool: Pool, request: pytest.FixtureRequest) -> Iterator[int]:
    """One that a test is to stop; it goes on afterwards."""
    yield request.param
    pool.rig.workers[request.param].go_on()
    until("both workers serve", pool.rig.is_serving)


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each time that somebody waited for a worker in vain."""
    found: list[object] = []
    pause = Choice._pause  # noqa: SLF001 -- the one place that knows

    def noting(self: Choice, key: tuple[str, str], *, was_silent: bool) -> None:
        if was_silent:
            found.append(key)
        pause(self, key, was_silent=was_silent)

    monkeypatch.setattr(Choice, "_pause", noting)
    return found


def test_all_pages_are_read_and_one_stall_is_all_that_it_costs(
    pool: Pool, stopped: int, stalls: list[object]
) -> None:
    with pool.store() as store:
        into, located = bytearray(SIZE), pool.located(store)
        for number in range(4):  # from both
            pool.assert_read(number, store.read(located[number], into, [0]), into)
        pool.rig.workers[stopped].stop()
        pool.read_all(store, located)
    assert len(stalls) <= 1


def test_a_store_that_meets_it_first_reads_all_pages(
    pool: Pool, stopped: int, stalls: list[object]
) -> None:
    with pool.store() as store:
        located = pool.located(store)
        pool.rig.workers[stopped].stop()
        pool.read_all(store, located)
    assert len(stalls) <= 1


def test_reads_of_an_event_loop_are_served_by_the_other(pool: Pool, stopped: int) -> None:
    async def work() -> None:
        async with await AsyncKVStore.connect(pool.rig.addresses, transports=("tcp",)) as store:
            into = bytearray(SIZE)
            located = [await store.match_prefix(pool.opened, chain) for chain in pool.chains]
            pool.rig.workers[stopped].stop()
            for number, match in enumerate(located):
                pool.assert_read(number, await store.read(match, into, [0]), into)

    asyncio.run(work())
