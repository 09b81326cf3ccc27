"""What a program does with a pool, by every transport, against real processes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import AlreadyThere, AsyncKVStore, Hit, KVStore, Miss, MissReason, Stored
from kvstore.client import staging
from kvstore.page import PageChain
from tests.cluster.pages import SIZE, Pages
from tests.fakes import payload

if TYPE_CHECKING:
    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB])
def test_pages_come_back_byte_for_byte(pages: Pages, size: int) -> None:
    count = min(64, 16 * MIB // size)
    opened = pages.open(size)
    chain = opened.chain(range(count * 4 + 3))
    assert len(chain) == count
    store = pages.store
    assert store.probe(opened, chain) == [False] * count
    assert store.match_prefix(opened, chain).pages == 0
    pages.store_all(opened, chain)
    assert store.probe(opened, chain) == [True] * count
    pages.assert_readable(opened, chain)
    assert pages.put(opened, chain) == [AlreadyThere()] * count
    assert store.remove(opened, chain) == [True] * count
    assert store.probe(opened, chain) == [False] * count
    assert store.remove(opened, chain) == [False] * count
    pages.store_all(opened, chain)
    pages.assert_readable(opened, chain)
    store.remove(opened, chain)


def test_a_removed_page_is_a_miss_for_who_found_it_before(pages: Pages) -> None:
    opened = pages.open()
    chain = opened.chain(range(12))
    pages.store_all(opened, chain)
    match = pages.store.match_prefix(opened, chain)
    pages.store.remove(opened, chain.slice(2, 3))
    outcomes = pages.read_back(match, 3)
    assert outcomes[:2] == [Hit()] * 2
    assert outcomes[2] == Miss(MissReason.STALE)


def test_the_longest_prefix_is_found_and_branches_are_apart(pages: Pages) -> None:
    opened = pages.open()
    trunk = list(range(32))
    left, right = opened.chain([*trunk, 1, 2, 3, 4]), opened.chain([*trunk, 9, 9, 9, 9])
    pages.store_all(opened, opened.chain(trunk))
    assert pages.put(opened, left) == [*[AlreadyThere()] * 8, Stored()]
    match = pages.store.match_prefix(opened, right)
    assert (match.pages, len(right)) == (8, 9)
    assert pages.read_back(match, 8) == [Hit()] * 8
    pages.assert_readable(opened, left)
    stranger = opened.chain(range(100, 132))
    assert pages.store.match_prefix(opened, stranger).pages == 0


def test_a_lookup_sees_beyond_a_gap(pages: Pages) -> None:
    opened = pages.open()
    chain = opened.chain(range(24))
    pages.store_all(opened, chain)
    pages.store.remove(opened, chain.slice(2, 4))
    found = pages.store.lookup(opened, chain)
    assert found.hits == [True, True, False, False, True, True]
    assert pages.store.match_prefix(opened, chain).pages == 2
    absent = Miss(MissReason.ABSENT)
    outcomes = pages.read_back(found, 6, misses=(2, 3))
    assert outcomes == [Hit(), Hit(), absent, absent, Hit(), Hit()]
    assert pages.put(opened, chain.slice(2, 4)) == [Stored()] * 2
    pages.assert_readable(opened, chain)


def test_reads_without_lease(pages: Pages) -> None:
    opened = pages.open()
    chain = opened.chain(range(8))
    pages.store_all(opened, chain)
    match = pages.store.match_prefix(opened, chain, lease=False)
    assert match.leased_until_s == 0
    assert pages.read_back(match, 2) == [Hit()] * 2


def test_any_memory_may_be_source_and_destination(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 3 * SIZE)
    opened = pages.open()
    chain = opened.chain(range(32))
    whole = b"".join(payload(key, 0, SIZE) for key in chain)
    backwards = list(range(7 * SIZE, -1, -SIZE))
    array = np.frombuffer(whole, np.uint8).reshape(8, SIZE)[::-1].copy()
    assert pages.store.put(opened, chain, array, backwards) == [Stored()] * 8
    buffer = pages.store.buffer(8 * SIZE)
    match = pages.store.match_prefix(opened, chain)
    assert pages.store.read(match, buffer, range(0, 8 * SIZE, SIZE)) == [Hit()] * 8
    assert bytes(buffer.view) == whole
    into = np.zeros(8 * SIZE + 7, np.uint8)
    assert pages.store.read(match, into, [7 + i * SIZE for i in range(8)]) == [Hit()] * 8
    assert into[7:].tobytes() == whole
    buffer.close()


def test_a_page_of_several_parts_is_there_when_all_are(pages: Pages) -> None:
    opened = pages.open(ranks=2)
    chain = opened.chain(range(12))
    assert pages.put(opened, chain, part=1) == [Stored(visible=False)] * 3
    assert pages.store.match_prefix(opened, chain).pages == 0
    assert pages.put(opened, chain, part=1) == [AlreadyThere()] * 3
    assert pages.put(opened, chain, part=0) == [Stored(visible=True)] * 3
    match = pages.store.match_prefix(opened, chain, parts=(1,))
    assert match.pages == 3
    assert pages.read_back(match, 3, part=1) == [Hit()] * 3
    pages.store.remove(opened, chain)
    size = opened.namespace.parts[0].size_bytes
    both = bytearray(6 * size)
    for i, key in enumerate(chain):
        for part in (0, 1):
            place = (2 * i + part) * size
            both[place : place + size] = payload(key, part, size)
    places = {part: [(2 * i + part) * size for i in range(3)] for part in (0, 1)}
    assert pages.store.put_parts(opened, chain, both, places) == [Stored()] * 3
    for part in (0, 1):
        match = pages.store.match_prefix(opened, chain)
        assert pages.read_back(match, 3, part=part) == [Hit()] * 3


def test_one_chain_put_from_two_sides_is_stored_once(pages: Pages) -> None:
    opened = pages.open()
    chain = opened.chain(range(256))
    outcomes: list[list[object]] = []

    def put() -> None:
        with Pages(pages.master, "tcp", pages.model) as other:
            outcomes.append(other.put(opened, chain))

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    for column in zip(*outcomes, strict=True):
        assert sorted(column, key=str) == [AlreadyThere()] * 3 + [Stored()]
    pages.assert_readable(opened, chain)


def test_threads_share_a_store(pages: Pages) -> None:
    opened = pages.open()
    failures: list[BaseException] = []

    def work(nth: int) -> None:
        try:
            chain = opened.chain([nth, *range(63)])
            pages.store_all(opened, chain)
            pages.assert_readable(opened, chain)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(nth,)) for nth in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_asks_for_nothing(pages: Pages) -> None:
    opened = pages.open()
    nothing = opened.chain([])
    store = pages.store
    assert store.put(opened, nothing, b"", []) == []
    assert store.probe(opened, nothing) == []
    assert store.read(store.match_prefix(opened, nothing), bytearray(), []) == []
    assert store.lookup(opened, nothing).hits == []
    assert store.remove(opened, nothing) == []


def test_a_million_keys_are_cut(pages: Pages) -> None:
    opened = pages.open()
    stored = opened.chain(range(8))
    pages.store_all(opened, stored)
    million = PageChain(stored.packed + payload(b"keys", 0, 32 * (1_000_000 - 2)))
    flags = pages.store.probe(opened, million, timeout_s=60)
    assert (len(flags), sum(flags)) == (1_000_000, 2)
    assert pages.store.match_prefix(opened, million).pages == 2


def test_named_objects(pages: Pages) -> None:
    opened = pages.store.open_opaque(f"objects {pages.model}")
    names = opened.names([b"one", b"two"])
    source = b"".join(payload(key, 0, 1000) for key in names)
    assert pages.store.put_objects(opened, names, source, [0, 1000], 1000) == [Stored()] * 2
    other = opened.names([b"three"])
    big = payload(other.key(0), 0, 70_000)
    assert pages.store.put_objects(opened, other, big, [0], 70_000) == [Stored()]
    every = opened.names([b"two", b"no", b"three"])
    found = pages.store.lookup(opened, every)
    assert found.hits == [True, False, True]
    into = bytearray(3 * 70_000)
    outcomes = pages.store.read(found, into, [0, 70_000, 140_000])
    assert outcomes == [Hit(), Miss(MissReason.ABSENT), Hit()]
    assert into[:1000] == source[1000:]
    assert into[140_000:] == big
    assert pages.store.remove(opened, every) == [True, False, True]


def test_the_asyncio_face_does_the_same(shared_pool: Up, transport: str) -> None:
    async def work() -> None:
        async with await AsyncKVStore.connect(shared_pool.master, transports=(transport,)) as store:
            with Pages(shared_pool.master, transport, f"asyncio {transport}") as blocking:
                opened = blocking.open()
            chain = opened.chain(range(64))
            whole = b"".join(payload(key, 0, SIZE) for key in chain)
            offsets = range(0, len(whole), SIZE)
            halves = (chain.slice(0, 8), offsets[:8]), (chain.slice(8, 16), offsets[8:])
            assert await store.put(opened, *_with_source(halves[0], whole)) == [Stored()] * 8
            assert await store.put(opened, *_with_source(halves[1], whole)) == [Stored()] * 8
            assert await store.probe(opened, chain) == [True] * 16
            match = await store.match_prefix(opened, chain)
            into = store.buffer(len(whole))
            assert await store.read(match, into, offsets) == [Hit()] * 16
            assert bytes(into.view) == whole
            if transport == "shm":
                async with store.views(match) as views:
                    hits = [view for view in views if isinstance(view, memoryview)]
                    assert b"".join(hits) == whole
            assert (await store.lookup(opened, chain)).hits == [True] * 16
            assert await store.remove(opened, chain) == [True] * 16
            assert (await store.stat()).pages >= 0

    asyncio.run(work())


def _with_source(half: tuple[PageChain, range], whole: bytes) -> tuple[PageChain, bytes, range]:
    return half[0], whole, half[1]


def test_closing_is_final_and_may_be_repeated(shared_pool: Up, transport: str) -> None:
    store = KVStore.connect(shared_pool.master, transports=(transport,))
    buffer = store.buffer(SIZE)
    store.close()
    store.close()
    assert buffer.closed
