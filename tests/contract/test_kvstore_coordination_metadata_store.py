"""What every MetadataStore keeps: the real ones and the fake, with and without leases."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.coordination.metadata_store import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITE_BYTES_MAX,
    WRITE_KEYS_MAX,
    Candidate,
    Leader,
    Term,
)
from kvstore.errors import BadValue, ConfigError, StaleEpoch
from kvstore.ids import Epoch
from tests.contract.metadata_places import PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from kvstore.coordination.metadata_store import Entry, MetadataStore
    from tests.contract.metadata_places import Place
    from tests.etcd_server import EtcdServers

A = Candidate("a", ("10.0.0.1:7700",))
B = Candidate("b", ("10.0.0.2:7700", "unix:/b.sock"))


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, etcd_servers: EtcdServers) -> Place:
    """A place for the metadata of a cluster that outlives its stores."""
    kind: Callable[[Path, EtcdServers], Place] = request.param
    return kind(tmp_path, etcd_servers)


def term(place: Place, use: Callable[[MetadataStore], Coroutine[object, object, None]]) -> int:
    """Open, win, use, resign and close one store in a loop of its own; returns the epoch."""

    async def life() -> int:
        store = place.store()
        try:
            epoch = await won(store)
            await use(store)
            await store.resign()
        finally:
            await store.close()
        return epoch

    return asyncio.run(life())


async def won(store: MetadataStore, candidate: Candidate = A) -> Epoch:
    await store.open()
    outcome = await store.campaign(candidate)
    assert isinstance(outcome, Term), outcome
    return outcome.epoch


async def loaded(store: MetadataStore, prefix: str = "") -> list[Entry]:
    return [entry async for page in store.load(prefix) for entry in page]


async def nothing(store: MetadataStore) -> None:
    assert await loaded(store) == []


def test_every_term_raises_the_epoch(place: Place) -> None:
    assert [term(place, nothing) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_an_epoch_is_above_every_one_that_the_candidate_knows_of(place: Place) -> None:
    """As after the place was put back to an earlier state."""

    async def use(store: MetadataStore) -> None:
        await store.resign()
        for above, epoch in ((0, 2), (7, 8), (3, 9)):
            candidate = msgspec.structs.replace(A, above=Epoch(above))
            assert await store.campaign(candidate) == Term(Epoch(epoch), place.lease_s)
            await store.write([("k", b"")], [])
            await store.resign()

    term(place, use)
    assert term(place, nothing_but_k) == 10


def test_one_store_serves_terms_one_after_another(place: Place) -> None:
    async def use(store: MetadataStore) -> None:
        await store.write([("k", b"1")], [])
        await place.usurp()
        with pytest.raises(StaleEpoch):
            await store.write([("k", b"2")], [])
        assert await store.campaign(A) == Term(Epoch(3), place.lease_s)
        await store.write([("k", b"3")], [])
        await store.resign()
        assert await store.campaign(A) == Term(Epoch(4), place.lease_s)
        assert await loaded(store) == [("k", b"3")]

    term(place, use)


def test_outside_of_a_term_nothing_is_written(place: Place) -> None:
    async def use() -> None:
        store = place.store()
        await store.open()
        for call in (store.write([("k", b"")], []), store.write([], ["k"]), store.renew()):
            with pytest.raises(StaleEpoch):
                await call
        assert await loaded(store) == []
        await won_again(store)
        await store.resign()
        with pytest.raises(StaleEpoch):
            await store.write([("k", b"")], [])
        with pytest.raises(StaleEpoch):
            await store.renew()
        await store.close()

    async def won_again(store: MetadataStore) -> None:
        assert isinstance(await store.campaign(A), Term)
        await store.write([("k", b"")], [])

    asyncio.run(use())
    assert term(place, nothing_but_k) == 2


async def nothing_but_k(store: MetadataStore) -> None:
    assert await loaded(store) == [("k", b"")]


def test_a_renewed_term_goes_on(place: Place) -> None:
    async def use(store: MetadataStore) -> None:
        for number in range(3):
            await store.renew()
            await store.write([("k", bytes([number]))], [])
        assert await loaded(store) == [("k", b"\2")]

    term(place, use)


def test_who_loses_learns_who_leads(place: Place) -> None:
    async def use() -> None:
        first, second = place.store(), place.store()
        epoch = await won(first, B)
        await second.open()
        outcome = await second.campaign(A)
        if place.lease_s == inf:  # nobody is kept out, and the first is over
            assert outcome == Term(Epoch(epoch + 1), inf)
        else:
            assert outcome == Leader(epoch, B.name, B.where)
            await first.write([("k", b"1")], [])
            with pytest.raises(StaleEpoch):
                await second.write([("k", b"2")], [])
            with pytest.raises(StaleEpoch):
                await second.renew()
            await first.resign()
            outcome = await second.campaign(A)
            assert isinstance(outcome, Term)
            assert outcome.epoch == epoch + 1
        await first.close()
        await second.close()

    asyncio.run(use())


def test_of_many_candidates_one_leads_at_the_end(place: Place) -> None:
    async def use() -> None:
        stores = [place.store() for _ in range(5)]
        for store in stores:
            await store.open()
        outcomes = await asyncio.gather(*(store.campaign(A) for store in stores))
        terms = [each.epoch for each in outcomes if isinstance(each, Term)]
        assert len(set(terms)) == len(terms)
        assert len(terms) == (5 if place.lease_s == inf else 1)
        written = 0
        for store in stores:
            try:
                await store.write([("k", b"")], [])
            except StaleEpoch:
                pass
            else:
                written += 1
        assert written == 1
        for store in stores:
            await store.close()

    asyncio.run(use())


def test_what_was_written_is_found_in_the_next_term(place: Place) -> None:
    value = bytes(range(256))

    async def write(store: MetadataStore) -> None:
        await store.write([("a/1", value), ("a/2", b"")], [])

    async def read(store: MetadataStore) -> None:
        assert await loaded(store, "a/") == [("a/1", value), ("a/2", b"")]

    term(place, write)
    term(place, read)


def test_a_prefix_selects_and_keys_come_in_order(place: Place) -> None:
    keys = ["a", "a/", "a/b", "a/ba", "a0", "b", "a/%", "a/_", "a/\U0010ffff", "A/b", "a/é"]

    async def use(store: MetadataStore) -> None:
        await store.write([(key, key.encode()) for key in keys], [])
        for prefix in ("", "a/", "a/b", "a/%", "a/_", "c", "a/é"):
            want = sorted(key for key in keys if key.startswith(prefix))
            assert [key for key, _ in await loaded(store, prefix)] == want, prefix

    term(place, use)


def test_pages_are_of_one_moment_and_in_order(place: Place) -> None:
    async def use(store: MetadataStore) -> None:
        keys = [f"k/{number:04}" for number in range(1000)]
        for start in range(0, 1000, 100):
            await store.write([(key, b"old") for key in keys[start : start + 100]], [])
        found: list[Entry] = []
        pages = 0
        async for page in store.load("k/"):
            assert page
            found += page
            pages += 1
            if pages == 1:
                await store.write([("k/0998", b"new"), ("k/9999", b"new")], ["k/0999"])
        assert pages > 1
        assert found == [(key, b"old") for key in keys]
        assert [key for key, _ in await loaded(store, "k/")][-2:] == ["k/0998", "k/9999"]

    term(place, use)


def test_a_put_replaces_and_a_delete_of_nothing_is_no_error(place: Place) -> None:
    async def use(store: MetadataStore) -> None:
        await store.write([("k", b"1"), ("l", b"1")], ["absent"])
        await store.write([("k", b"2")], ["l"])
        await store.write([], [])
        assert await loaded(store) == [("k", b"2")]

    term(place, use)


def test_deletes_come_before_puts(place: Place) -> None:
    async def use(store: MetadataStore) -> None:
        await store.write([("k", b"1")], [])
        await store.write([("k", b"2")], ["k", "k"])
        assert await loaded(store) == [("k", b"2")]

    term(place, use)


def test_a_fenced_master_writes_nothing(place: Place) -> None:
    async def use() -> None:
        old, new = place.store(), place.store()
        first = await won(old)
        await old.write([("k", b"old")], [])
        await place.usurp()
        await new.open()
        outcome = await new.campaign(B)
        assert isinstance(outcome, Term)
        assert outcome.epoch > first
        for puts, deletes in ([("k", b"late"), ("l", b"late")], []), ([], ["k"]), ([], []):
            with pytest.raises(StaleEpoch, match="epoch 1"):
                await old.write(puts, deletes)
        with pytest.raises(StaleEpoch, match="epoch 1"):
            await old.renew()
        assert await loaded(new) == [("k", b"old")]
        await new.write([("k", b"new")], [])
        await old.resign()  # takes nothing from the one that leads now
        await new.write([("k", b"newer")], [])
        await old.close()
        await new.close()

    asyncio.run(use())


REFUSED = {
    "a large value": ([("small", b""), ("big", bytes(VALUE_BYTES_MAX + 1))], []),
    "much together": ([("a", bytes(WRITE_BYTES_MAX // 2)), ("b", bytes(VALUE_BYTES_MAX))], []),
    "many keys": ([(f"{each}", b"") for each in range(100)], [f"d{each}" for each in range(28)]),
    "a key twice": ([("k", b"1"), ("k", b"2")], []),
    "the epoch": ([("epoch", b"0")], []),
    "no leader": ([], ["leader"]),
    "no key": ([("", b"")], []),
    "a long key": ([("é" * (KEY_BYTES_MAX // 2) + "e", b"")], []),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_write_beyond_the_bounds_is_refused_whole(place: Place, kind: str) -> None:
    async def use(store: MetadataStore) -> None:
        puts, deletes = REFUSED[kind]
        with pytest.raises(BadValue):
            await store.write(puts, deletes)
        assert await loaded(store) == []

    term(place, use)


def test_a_write_at_the_bounds_is_taken(place: Place) -> None:
    long = "é" * (KEY_BYTES_MAX // 2)

    async def use(store: MetadataStore) -> None:
        await store.write([("big", bytes(VALUE_BYTES_MAX))], [])
        names = [f"{each:03}{long}"[: -3 // 2] for each in range(WRITE_KEYS_MAX)]
        size = WRITE_BYTES_MAX // WRITE_KEYS_MAX
        await store.write([(name, bytes(size)) for name in names], names)
        assert len(await loaded(store)) == 1 + WRITE_KEYS_MAX

    term(place, use)


def test_writes_at_the_same_time_all_land(place: Place) -> None:
    async def use(store: MetadataStore) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(store.write([(f"k/{number:02}", b"x")], []))
        assert len(await loaded(store, "k/")) == 40

    term(place, use)


def test_another_clusters_metadata_is_refused(place: Place) -> None:
    async def use() -> None:
        stranger = place.stranger()
        with pytest.raises(ConfigError, match="cluster"):
            await stranger.open()
        await stranger.close()

    term(place, nothing)
    asyncio.run(use())
    assert term(place, nothing) == 2


def test_closing_twice_is_no_error(place: Place) -> None:
    async def use() -> None:
        store = place.store()
        await store.close()
        store = place.store()
        await store.open()
        await store.close()
        await store.close()

    asyncio.run(use())
