"""What every MetadataStore keeps: the SQLite one on a real file, and the fake, by one suite."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.coordination.metadata_store import VALUE_BYTES_MAX
from kvstore.coordination.sqlite import SqliteStore
from kvstore.errors import BadValue, ConfigError, StaleEpoch
from tests.fake_metadata_store import FakeMetadataStore, MetadataDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from kvstore.coordination.metadata_store import MetadataStore


@pytest.fixture(params=["sqlite", "fake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], MetadataStore]:
    """Make a store over one place that outlives it, for the cluster named."""
    if request.param == "fake":
        return partial(FakeMetadataStore, MetadataDisk("c"))
    return partial(SqliteStore, tmp_path / "metadata.db")


def opened(
    place: Callable[[str], MetadataStore],
    use: Callable[[MetadataStore], Coroutine[object, object, None]],
) -> int:
    """Open, use and close one store in a loop of its own; returns the epoch."""

    async def life() -> int:
        store = place("c")
        epoch = await store.open()
        try:
            await use(store)
        finally:
            await store.close()
        return epoch

    return asyncio.run(life())


async def nothing(store: MetadataStore) -> None:
    assert await store.load("") == []


def test_every_opening_raises_the_epoch(place: Callable[[str], MetadataStore]) -> None:
    epochs = [opened(place, nothing) for _ in range(5)]
    assert epochs == [1, 2, 3, 4, 5]


def test_what_was_written_is_found_by_the_next_opener(
    place: Callable[[str], MetadataStore],
) -> None:
    value = bytes(range(256))

    async def write(store: MetadataStore) -> None:
        await store.write([("a/1", value), ("a/2", b"")], [])

    async def read(store: MetadataStore) -> None:
        assert await store.load("a/") == [("a/1", value), ("a/2", b"")]

    opened(place, write)
    opened(place, read)


def test_a_prefix_selects_and_keys_come_in_order(place: Callable[[str], MetadataStore]) -> None:
    keys = ["a", "a/", "a/b", "a/ba", "a0", "b", "a/%", "a/_", "a/\U0010ffff", "A/b", "a/é"]

    async def use(store: MetadataStore) -> None:
        await store.write([(key, key.encode()) for key in keys], [])
        for prefix in ("", "a/", "a/b", "a/%", "a/_", "c", "a/é"):
            want = sorted(key for key in keys if key.startswith(prefix))
            assert [key for key, _ in await store.load(prefix)] == want, prefix

    opened(place, use)


def test_a_put_replaces_and_a_delete_of_nothing_is_no_error(
    place: Callable[[str], MetadataStore],
) -> None:
    async def use(store: MetadataStore) -> None:
        await store.write([("k", b"1"), ("l", b"1")], ["absent"])
        await store.write([("k", b"2")], ["l"])
        await store.write([], [])
        assert await store.load("") == [("k", b"2")]

    opened(place, use)


def test_deletes_come_before_puts(place: Callable[[str], MetadataStore]) -> None:
    async def use(store: MetadataStore) -> None:
        await store.write([("k", b"1")], [])
        await store.write([("k", b"2")], ["k"])
        assert await store.load("") == [("k", b"2")]

    opened(place, use)


def test_a_fenced_opener_writes_nothing(place: Callable[[str], MetadataStore]) -> None:
    async def use() -> None:
        old, new = place("c"), place("c")
        first = await old.open()
        await old.write([("k", b"old")], [])
        assert await new.open() > first
        with pytest.raises(StaleEpoch, match="epoch 1 was followed by epoch 2"):
            await old.write([("k", b"late"), ("l", b"late")], [])
        with pytest.raises(StaleEpoch):
            await old.write([], ["k"])
        assert await new.load("") == [("k", b"old")]
        await new.write([("k", b"new")], [])
        await old.close()
        await new.close()

    asyncio.run(use())


def test_a_refused_value_leaves_the_rest_unwritten(
    place: Callable[[str], MetadataStore],
) -> None:
    async def use(store: MetadataStore) -> None:
        with pytest.raises(BadValue, match="big"):
            await store.write([("small", b""), ("big", bytes(VALUE_BYTES_MAX + 1))], [])
        assert await store.load("") == []
        await store.write([("big", bytes(VALUE_BYTES_MAX))], [])

    opened(place, use)


def test_writes_at_the_same_time_all_land(place: Callable[[str], MetadataStore]) -> None:
    async def use(store: MetadataStore) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(store.write([(f"k/{number:02}", b"x")], []))
        assert len(await store.load("k/")) == 40

    opened(place, use)


def test_another_clusters_metadata_is_refused(place: Callable[[str], MetadataStore]) -> None:
    async def use() -> None:
        stranger = place("other")
        with pytest.raises(ConfigError, match="cluster 'c', not 'other'"):
            await stranger.open()
        await stranger.close()

    opened(place, nothing)
    asyncio.run(use())
    assert opened(place, nothing) == 2


def test_closing_twice_is_no_error(place: Callable[[str], MetadataStore]) -> None:
    async def use(store: MetadataStore) -> None:
        await store.close()

    opened(place, use)
