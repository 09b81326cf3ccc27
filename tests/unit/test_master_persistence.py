"""The queue of durable writes against a fake disk: order, merging, retries, the end by epoch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.coordination.metadata_store import WRITE_KEYS_MAX, Candidate
from kvstore.errors import OutOfSpace, StaleEpoch, Unavailable
from master.events import Persist, WriteId
from master.persistence import BATCHES_MAX, Persistence
from tests.fake_metadata_store import FakeMetadataStore, MetadataDisk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Bench:
    """A Persistence over a fake disk, run to its end inside one loop."""

    def __init__(self) -> None:
        self.disk = MetadataDisk()
        self.durable: list[int] = []
        self.slept: list[float] = []
        self.store = FakeMetadataStore(self.disk)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def live(self, use: Callable[[Persistence], Awaitable[None]]) -> None:
        await self.store.open()
        await self.store.campaign(Candidate("m", ()))
        persistence = Persistence(self.store, self.durable.append, self.sleep)
        running = asyncio.create_task(persistence.run())
        try:
            await use(persistence)
            done = asyncio.create_task(persistence.drain())
            await asyncio.wait({done, running}, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            if running.done():
                running.result()
        finally:
            running.cancel()

    def run(self, *actions: Persist) -> Persistence:
        kept: list[Persistence] = []

        async def use(persistence: Persistence) -> None:
            kept.append(persistence)
            for action in actions:
                persistence.submit(action)

        asyncio.run(self.live(use))
        return kept[0]


def persist(write: int, *puts: tuple[str, bytes], deletes: tuple[str, ...] = ()) -> Persist:
    return Persist(WriteId(write), puts, deletes)


def test_actions_become_durable_in_order() -> None:
    bench = Bench()
    persistence = bench.run(*(persist(each, (f"k/{each}", b"v")) for each in range(1, 400)))
    assert bench.durable == list(range(1, 400))
    assert len(bench.disk.entries) == 399
    assert persistence.pending == 0
    # 399 keys fit four transactions.
    assert persistence.writes == -(-399 // WRITE_KEYS_MAX)


def test_the_last_action_on_a_key_wins() -> None:
    bench = Bench()
    bench.run(
        persist(1, ("a", b"1"), ("b", b"1")),
        persist(2, ("c", b"1"), deletes=("a",)),
        persist(3, ("b", b"2"), deletes=("b", "c")),
        persist(4, ("a", b"4")),
        persist(5, deletes=("a",)),
    )
    assert bench.disk.entries == {"b": b"2"}
    assert bench.durable == [1, 2, 3, 4, 5]


def test_an_action_larger_than_a_transaction_is_cut_and_counts_once() -> None:
    bench = Bench()
    large = persist(2, *((f"l/{each}", b"") for each in range(2 * WRITE_KEYS_MAX)))
    persistence = bench.run(persist(1, ("a", b"")), large, persist(3, ("z", b"")))
    assert persistence.writes == 4
    assert len(bench.disk.entries) == 2 * WRITE_KEYS_MAX + 2
    assert bench.durable == [1, 2, 3]


def test_large_values_are_spread_over_transactions() -> None:
    bench = Bench()
    persistence = bench.run(*(persist(each, (f"k{each}", bytes(600_000))) for each in range(4)))
    assert persistence.writes == 4


def test_values_of_one_action_are_spread_over_transactions() -> None:
    bench = Bench()
    persistence = bench.run(persist(1, *((f"k{each}", bytes(600_000)) for each in range(3))))
    assert persistence.writes == 3
    assert len(bench.disk.entries) == 3


def test_a_full_or_absent_store_is_tried_again() -> None:
    bench = Bench()
    bench.disk.refusals = [OutOfSpace("full"), Unavailable("away"), OutOfSpace("full")] * 3
    persistence = bench.run(persist(1, ("a", b"1")))
    assert bench.durable == [1]
    assert bench.disk.entries == {"a": b"1"}
    assert persistence.failures == 9
    assert persistence.failing is None
    assert bench.slept[:4] == [0.05, 0.1, 0.2, 0.4]
    assert max(bench.slept) == 2.0


def test_nothing_counts_as_durable_under_a_higher_epoch() -> None:
    bench = Bench()

    async def take_over(persistence: Persistence) -> None:
        bench.disk.epoch += 1  # type: ignore[assignment]  # NewType of an int
        persistence.submit(persist(1, ("a", b"1")))

    with pytest.raises(StaleEpoch):
        asyncio.run(bench.live(take_over))
    assert bench.durable == []
    assert bench.disk.entries == {}


def test_what_is_written_behind_waits_for_all_others() -> None:
    bench = Bench()
    behind = [
        Persist(WriteId(each), ((f"s/{each}", bytes(600_000)),), (), behind=True)
        for each in (1, 2, 3)
    ]
    bench.run(*behind, persist(4, ("a", b"1")), persist(5, ("b", b"1")))
    assert bench.durable == [4, 5, 1, 2, 3]
    assert len(bench.disk.entries) == 5


def test_nobody_waits_for_more_than_one_transaction_of_what_is_behind() -> None:
    async def live() -> list[int]:
        durable: list[int] = []

        def note(write: int) -> None:
            durable.append(write)
            if write == 1:
                persistence.submit(persist(4, ("a", b"1")))

        store = FakeMetadataStore(MetadataDisk())
        persistence = Persistence(store, note)
        for each in (1, 2, 3):
            value = f"s/{each}", bytes(600_000)
            persistence.submit(Persist(WriteId(each), (value,), (), behind=True))
        await store.open()
        await store.campaign(Candidate("m", ()))
        running = asyncio.create_task(persistence.run())
        await persistence.drain()
        running.cancel()
        return durable

    assert asyncio.run(live()) == [1, 4, 2, 3]


def test_while_the_store_is_away_the_queue_is_bounded_by_its_keys() -> None:
    async def fill() -> None:
        durable: list[int] = []
        disk = MetadataDisk()
        store = FakeMetadataStore(disk)
        persistence = Persistence(store, durable.append)
        value = bytes(600_000)  # two of them fit no transaction
        count = 3 * BATCHES_MAX
        for each in range(count):
            persistence.submit(persist(each, (f"k{each % 2}", value + bytes((each % 251,)))))
        assert persistence.pending == count
        await store.open()
        await store.campaign(Candidate("m", ()))
        running = asyncio.create_task(persistence.run())
        await persistence.drain()
        running.cancel()
        assert durable == list(range(count))
        assert persistence.writes <= BATCHES_MAX + 2
        last = {f"k{each % 2}": value + bytes((each % 251,)) for each in (count - 2, count - 1)}
        assert disk.entries == last

    asyncio.run(fill())
