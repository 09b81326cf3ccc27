"""The Mooncake drop-in's calls about memory by address, and its sessions of ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.connectors.mooncake import BufferPool
from kvstore.connectors.mooncake.addresses import cut, joined
from tests.fakes import payload
from tests.unit.object_store import installed, region, set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.connectors.mooncake import MooncakeDistributedStore
    from tests.unit.object_store import ObjectStore


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    return installed(monkeypatch)


@pytest.fixture
def store(fake: ObjectStore) -> Iterator[MooncakeDistributedStore]:
    with set_up(fake) as made:
        yield made


def test_slices_are_joined_and_cut() -> None:
    assert joined([(100, 10), (110, 5), (200, 0), (115, 1), (300, 2)]) == ((100, 16), (300, 2))
    pieces = (100, 10), (300, 20), (500, 5)
    assert cut(pieces, 5, 20) == ((105, 5), (300, 15))
    assert cut(pieces, 0, 35) == pieces
    assert cut(pieces, 30, 5) == ((500, 5),)


def test_memory_is_stored_and_read_where_it_lies(store: MooncakeDistributedStore) -> None:
    data = bytes(payload(b"region", 0, 4096))
    source, at = region(data)
    into, to = region(bytes(4096))
    assert store.register_buffer(at, 4096) == store.register_buffer(to, 4096) == 0
    assert store.batch_put_from(["a", "b"], [at, at + 100], [100, 3000]) == [0, 0]
    assert store.batch_get_into(["b", "no", "a"], [to, to, to + 3000], [3000, 9, 150]) == [
        3000, -704, 100,
    ]  # fmt: skip
    assert into.raw[:3100] == data[100:3100] + data[:100]
    assert store.get_into("a", to, 99) == -600
    assert store.upsert_from("a", at + 7, 50) == 0
    assert store.get("a") == data[7:57]
    assert store.put_from("c", 0, 10) == store.put_from("c", at, 0) == -600
    assert store.batch_put_from(["a", "b"], [at], [1, 1]) == [-600, -600]
    assert store.batch_get_into(["a", "b"], [to], [1, 1]) == [-600, -600]
    assert store.put_from_with_metadata("m", at + 10, at, 20, 5) == 0
    assert store.get("m") == data[:5] + data[10:30]
    assert store.register_buffer(at, 4096) == -600, "again"
    assert (store.unregister_buffer(at), store.unregister_buffer(at)) == (0, -600)
    del source


def test_numbers_of_numpy_name_memory_as_well(store: MooncakeDistributedStore) -> None:
    _source, base = region(b"0123456789")
    into, base_to = region(bytes(10))
    at: Any = np.uint64(base)  # no int, to whoever checks types
    to: Any = np.uint64(base_to)
    ten: Any = np.int64(10)
    four: Any = np.int32(4)
    assert store.register_buffer(to, ten) == store.put_from("a", at, ten) == 0
    assert store.put_from_with_metadata("m", at, at, ten, four) == 0
    assert store.get_batch(["a", "m"]) == [b"0123456789", b"01230123456789"]
    assert store.get_into("a", to, ten) == 10
    assert into.raw == b"0123456789"
    assert store.batch_get_into_multi_buffers(["a"], [[to + 4, to]], [[ten - four, four]]) == [10]
    assert into.raw == b"6789012345"
    assert store.get_into_ranges([to], [["a"]], [[[four]]], [[[four]]], [[[four]]]) == [[[4]]]
    assert into.raw == b"6789456745"
    with pytest.raises(TypeError):
        store.get_into("a", float(base_to), 10)  # type: ignore[arg-type]  # no number of memory
    assert store.unregister_buffer(base_to) == 0


def test_several_buffers_are_one_object(store: MooncakeDistributedStore) -> None:
    data = bytes(payload(b"layers", 0, 3000))
    _source, at = region(data)
    into, to = region(bytes(3000))
    pointers, sizes = [[at, at + 2000], [at + 1000]], [[500, 700], [900]]
    assert store.batch_put_from_multi_buffers(["x", "y"], pointers, sizes) == [0, 0]
    assert store.get("x") == data[:500] + data[2000:2700]
    targets, rooms = [[to + 2000, to], [to + 1000]], [[1000, 200], [900]]
    assert store.batch_get_into_multi_buffers(["x", "y"], targets, rooms) == [1200, 900]
    assert into.raw[2000:3000] + into.raw[:200] == data[:500] + data[2000:2700]
    assert into.raw[1000:1900] == data[1000:1900]
    assert store.batch_get_into_multi_buffers(["x"], [[to]], [[1199]]) == [-600]
    assert store.batch_put_from_multi_buffers(["z"], [[at]], [[1, 2]]) == [-600]
    assert store.batch_get_into_multi_buffers(["x"], [[to, to]], [[1]]) == [-600]


def test_more_than_is_staged_at_a_time_goes_both_ways(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    size, count = 20_000, 20
    data = bytes(payload(b"many", 0, size * count))
    _source, at = region(data)
    into, to = region(bytes(size * count))
    keys = [str(number) for number in range(count)]
    halves = [[at + n * size, at + n * size + 5000] for n in range(count)]
    shares = [[5000, size - 5000]] * count
    assert store.batch_put_from_multi_buffers(keys, halves, shares) == [0] * count
    assert fake.asked["put_objects"] > 5
    swapped = [[to + n * size + size - 5000, to + n * size] for n in range(count)]
    assert store.batch_get_into_multi_buffers(keys, swapped, shares) == [size] * count
    assert into.raw[:size] == data[5000:size] + data[:5000]
    assert into.raw[-size:] == data[5000 - size :] + data[-size : 5000 - size]


def test_an_object_that_is_asked_for_twice_is_read_to_both_places(
    store: MooncakeDistributedStore,
) -> None:
    store.put("a", b"abc")
    into, to = region(bytes(8))
    assert store.batch_get_into(["a", "a"], [to, to + 4], [4, 4]) == [3, 3]
    assert into.raw == b"abc\0abc\0"


def test_ranges_are_copied_each_to_its_offset(store: MooncakeDistributedStore) -> None:
    first, second = bytes(range(64)), bytes(range(100, 164))
    store.put_batch(["k1", "k2"], [first, second])
    one, at_one = region(bytes(32))
    two, at_two = region(bytes(32))
    for at in (at_one, at_two):
        store.register_buffer(at, 32)
    assert store.get_into_ranges(
        [at_one, at_two],
        [["k1", "k2"], ["k2", "no"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    ) == [[[4, 3], [5]], [[6], [-704]]]
    assert one.raw[:4] + one.raw[8:13] + one.raw[20:23] == first[1:5] + second[2:7] + first[30:33]
    assert two.raw[4:10] == second[:6]
    ranges = store.get_into_ranges(
        [at_one], [["k1"]], [[[30, 0, 0]]], [[[0, 60, 0]]], [[[3, 5, 64]]]
    )
    assert ranges == [[[-600, -600, -600]]], "beyond the buffer, the object, the buffer"
    assert store.get_into_ranges([at_one], [["k1"]], [[[0]]], [[[0]]], [[[1], [2]]]) == [
        [[-600], [-600]]
    ]


def test_an_object_of_a_put_session_is_seen_when_that_ends(
    store: MooncakeDistributedStore,
) -> None:
    data = bytes(payload(b"session", 0, 100))
    _source, at = region(data)
    store.put("old", b"x")
    assert store.batch_put_session_start(["a", "b", "old", "no"], [100, 50, 5, 0]) == [
        0, 0, -705, -600,
    ]  # fmt: skip
    assert store.batch_put_session_start(["a", "c"], [100, 1 << 62]) == [-705, -200]
    assert store.batch_put_session_revoke(["c"]) == [-704]
    layers = store.batch_put_from_multi_buffer_ranges
    assert layers(["a", "b"], [[at], [at]], [[60], [50]], [[40], [0]]) == [60, 50]
    assert layers(["a", "no"], [[at + 60], [at]], [[40], [1]], [[0], [0]]) == [40, -704]
    assert layers(["a"], [[at]], [[60]], [[41]]) == [-600]
    assert store.batch_is_exist(["a", "b"]) == [0, 0]
    assert store.batch_put_session_revoke(["b", "no"]) == [0, -704]
    assert store.batch_put_session_end(["a", "b"]) == [0, -704]
    assert store.get_batch(["a", "b"]) == [data[60:] + data[:60], b""]


def test_a_get_session_reads_what_was_there_when_it_began(
    store: MooncakeDistributedStore,
) -> None:
    store.put("a", b"0123456789")
    into, to = region(bytes(8))
    assert store.batch_get_session_start(["a", "no"]) == [0, -704]
    store.remove("a")
    ranges = store.batch_get_into_multi_buffer_ranges
    assert ranges(["a", "no"], [[to, to + 4], [to]], [[2, 3], [1]], [[8, 0], [0]]) == [5, -704]
    assert into.raw == b"89\0\0" + b"012\0"
    assert ranges(["a"], [[to]], [[3]], [[8]]) == [-600]
    assert store.batch_get_session_end(["a"]) == 0
    assert ranges(["a"], [[to]], [[1]], [[0]]) == [-704]


def test_a_buffer_pool_lends_registered_memory(store: MooncakeDistributedStore) -> None:
    store.put("a", b"abc")
    pool = BufferPool(store, max_bytes=100)
    with pool.buffer(60) as lease:
        assert store.get_into("a", lease.ptr, lease.size) == 3
        assert bytes(lease.buffer[:3]) == b"abc"
        assert store.get_into_ranges([lease.ptr], [["a"]], [[[5]]], [[[1]]], [[[2]]]) == [[[2]]]
        with pytest.raises(RuntimeError, match="40 are left"):
            pool.acquire(41, block=False)
        with pytest.raises(RuntimeError, match="1 leases are active"):
            pool.close()
    lease.release()
    with pytest.raises(RuntimeError, match="released"):
        _ = lease.buffer
    assert store.unregister_buffer(lease.ptr) == -600
    pool.acquire(100).release()
    pool.close()
