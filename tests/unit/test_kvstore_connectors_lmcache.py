"""LMCache's objects in the pool, without LMCache: names, tasks, accounts, and trouble as misses."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final, cast

import msgspec
import pytest

from kvstore import limits
from kvstore.client.outcomes import MissReason
from kvstore.connectors.lmcache import l2_objects
from kvstore.connectors.lmcache.l2_objects import L2Objects, News
from kvstore.connectors.lmcache.lane import Lane
from kvstore.connectors.lmcache.naming import name_of
from kvstore.connectors.lmcache.pooled import Item, PooledObjects
from kvstore.connectors.lmcache.settings import Settings, engine_of, settings_of
from kvstore.errors import BadValue, Unavailable
from kvstore.page import name_key
from tests.fakes import ManualClock
from tests.unit.object_store import ObjectStore

if TYPE_CHECKING:
    from kvstore.client.store import KVStore

SHAPE: Final = (2, 2, 4)
SIZE: Final = 64
NAMESPACE: Final = "lmcache 0.5 "


pytestmark = pytest.mark.usefixtures("leases_end_at_once")


class Key(msgspec.Struct, frozen=True):
    """As LMCache's."""

    chunk_hash: bytes
    model_name: str = "some/model"
    kv_rank: int = 1 << 24 | 1 << 8
    object_group_id: int = 0
    cache_salt: str = ""


class Layout(msgspec.Struct):
    """As LMCache's, of one group; as an object's metadata, too."""

    shapes: tuple[tuple[int, ...], ...] = (SHAPE,)
    dtypes: tuple[str, ...] = ("torch.float32",)
    shape: tuple[int, ...] = SHAPE
    dtype: str = "torch.float32"


class Object:
    """As LMCache's."""

    def __init__(self, data: bytes = b"", layout: Layout | None = None, size: int = SIZE) -> None:
        self.byte_array = bytearray(data or size)
        self.metadata = layout or Layout()


class Cache:
    """The second level on a store of no pool, and what it tells LMCache."""

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.connected = 0
        self.news: list[tuple[str, News]] = []
        self.clock = ManualClock()
        self.pooled = PooledObjects(self._connect, NAMESPACE, self.clock)
        self.objects = L2Objects(
            self.pooled,
            lambda news: self.news.append(("stored", news)),
            lambda news: self.news.append(("accessed", news)),
            lambda news: self.news.append(("deleted", news)),
        )

    def _connect(self) -> KVStore:
        self.connected += 1
        if self.store.fail is not None:
            raise self.store.fail
        return cast("KVStore", self.store)


def bytes_of(number: int, size: int = SIZE) -> bytes:
    return bytes((number + i) % 251 for i in range(size))


def test_what_is_stored_is_found_and_loaded() -> None:
    cache, keys = Cache(), [Key(b"one"), Key(b"two"), Key(b"three")]
    assert cache.objects.store(keys[:2], [Object(bytes_of(1)), Object(bytes_of(2))]) == 2 * SIZE
    assert cache.objects.look_up(keys, {0: Layout()}) == [True, True, False]
    into = [Object(), Object(), Object()]
    assert cache.objects.load(keys, into) == [True, True, False]
    assert [each.byte_array for each in into] == [bytes_of(1), bytes_of(2), bytes(SIZE)]
    assert cache.news == [
        ("stored", News(keys[:2], [SIZE, SIZE])),
        ("accessed", News(keys[:2], [])),
    ]


def test_locks_are_leases_that_end_with_the_last_who_looked() -> None:
    cache, keys = Cache(), [Key(b"one"), Key(b"two"), Key(b"three")]
    cache.objects.store(keys[:2], [Object(bytes_of(1)), Object(bytes_of(2))])
    cache.objects.look_up(keys, {0: Layout()})
    cache.objects.look_up(keys[:1], {0: Layout()})
    assert cache.store.objects_leased == 3
    assert cache.objects.load(keys[:2], [Object(), Object()]) == [True, True]
    assert cache.store.objects_leased == 3, "LMCache has not unlocked them"
    cache.objects.unlock(keys[:2])
    assert cache.store.objects_leased == 1
    cache.objects.unlock([keys[0], Key(b"never found")])
    assert cache.store.objects_leased == 0
    cache.objects.look_up([Key(b"never found")], {0: Layout()})
    assert cache.store.asked["give_back_lease"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_hash", b"other"),
        ("model_name", "some/other"),
        ("kv_rank", 2 << 24),
        ("object_group_id", 1),
        ("cache_salt", "another tenant"),
    ],
)
def test_a_key_that_differs_in_any_field_is_another_object(field: str, value: object) -> None:
    cache, key = Cache(), Key(b"one")
    other = msgspec.structs.replace(key, **{field: value})
    assert cache.objects.store([key], [Object(bytes_of(1))]) == SIZE
    assert cache.objects.look_up([other], {0: Layout(), 1: Layout()}) == [False]
    assert cache.objects.load([other], [Object()]) == [False]


@pytest.mark.parametrize(
    "other",
    [
        Layout(dtypes=("torch.int32",)),
        Layout(shapes=((2, 4, 2),)),
        Layout(shapes=((2, 2, 2), (2, 2, 2)), dtypes=("torch.float32",) * 2),
    ],
)
def test_another_layout_of_as_many_bytes_is_not_there(other: Layout) -> None:
    cache, key = Cache(), Key(b"one")
    assert cache.objects.store([key], [Object(bytes_of(1))]) == SIZE
    assert cache.objects.look_up([key], {0: other}) == [False]
    into = Object(layout=other)
    assert cache.objects.load([key], [into]) == [False]
    assert into.byte_array == bytes(SIZE)


def test_an_object_of_another_size_does_not_come() -> None:
    cache, key = Cache(), Key(b"one")
    cache.objects.store([key], [Object(bytes_of(1))])
    for size in (SIZE - 1, SIZE + 1):
        into = Object(size=size)
        assert cache.objects.load([key], [into]) == [False]
        assert into.byte_array == bytes(size)


def test_what_a_serde_made_is_found_as_bytes_and_may_leave_room() -> None:
    """LMCache describes a group as it is before its serde, and gives room for the worst case."""
    cache, key = Cache(), Key(b"one")
    plain = Layout(dtypes=("torch.uint8",), shapes=((SIZE,),))
    assert cache.objects.store([key], [Object(bytes_of(1, 40), plain)]) == 40
    assert cache.objects.look_up([key], {0: Layout()}) == [True]
    into = Object(layout=plain)
    assert cache.objects.load([key], [into]) == [True]
    assert into.byte_array == bytes_of(1, 40) + bytes(24)
    assert cache.objects.load([key], [Object(layout=plain, size=39)]) == [False]


def test_kv_of_a_type_that_torch_calls_bytes_has_its_shape_in_its_name() -> None:
    """vLLM's fp8 and int4 caches are uint8, and the one is half of the other."""
    cache, key = Cache(), Key(b"one")
    half, whole = [Layout(((2, 2, n),), ("torch.uint8",)) for n in (8, 16)]
    assert cache.objects.store([key], [Object(bytes_of(1, 32), half)]) == 32
    assert cache.objects.look_up([key], {0: whole}) == [False]
    assert cache.objects.load([key], [Object(layout=whole)]) == [False]
    assert cache.objects.look_up([key], {0: half}) == [True]


def test_an_object_that_says_its_shape_in_the_singular_has_the_same_layout() -> None:
    cache, key = Cache(), Key(b"one")
    single = Layout(shapes=(), dtypes=())
    assert cache.objects.store([key], [Object(bytes_of(1), single)]) == SIZE
    assert cache.objects.look_up([key], {0: Layout()}) == [True]


def test_without_a_description_of_the_group_only_bytes_are_found() -> None:
    cache, keys = Cache(), [Key(b"one"), Key(b"two")]
    plain = Layout(dtypes=("torch.uint8",), shapes=((SIZE,),))
    cache.objects.store(keys, [Object(bytes_of(1)), Object(bytes_of(2), plain)])
    assert cache.objects.look_up(keys, {}) == [False, True]


def test_objects_larger_than_a_chunk_of_the_pool_are_stored_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.connectors.mooncake.large.PIECE_BYTES", 100)
    cache, key = Cache(), Key(b"one")
    assert cache.objects.store([key], [Object(bytes_of(1, 250))]) == 250
    assert cache.objects.look_up([key], {0: Layout()}) == [True]
    into = Object(size=250)
    assert cache.objects.load([key], [into]) == [True]
    assert into.byte_array == bytes_of(1, 250)


def test_an_object_is_counted_once_until_it_is_deleted() -> None:
    cache, keys = Cache(), [Key(b"one"), Key(b"two", cache_salt="a")]
    objects = [Object(bytes_of(1)), Object(bytes_of(2))]
    assert cache.objects.store(keys[:1], objects[:1]) == SIZE
    assert cache.objects.store(keys, objects) == SIZE
    cache.objects.delete([keys[0], Key(b"of another server")])
    assert cache.objects.look_up(keys, {0: Layout()}) == [False, True]
    assert cache.objects.store(keys[:1], objects[:1]) == SIZE
    assert cache.news == [
        ("stored", News([keys[0]], [SIZE])),
        ("stored", News(keys, [0, SIZE])),
        ("deleted", News([keys[0]], [SIZE])),
        ("stored", News([keys[0]], [SIZE])),
    ]


def test_what_the_pool_has_evicted_is_no_longer_counted() -> None:
    cache, key = Cache(), Key(b"one")
    cache.objects.store([key], [Object(bytes_of(1))])
    cache.store.held.clear()
    assert cache.objects.look_up([key], {0: Layout()}) == [False]
    assert cache.news[-1] == ("deleted", News([key], [SIZE]))


def test_accounts_are_bounded_and_the_oldest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool that makes room by itself most objects are gone before anybody looks for them."""
    monkeypatch.setattr(l2_objects, "ACCOUNTS_MAX", 2)
    cache, keys = Cache(), [Key(b"one"), Key(b"two"), Key(b"three")]
    objects = [Object(bytes_of(number)) for number in range(3)]
    cache.objects.store(keys[:2], objects[:2])
    cache.objects.store([keys[0], keys[2]], [objects[0], objects[2]])
    assert cache.news[1:] == [
        ("stored", News([keys[0], keys[2]], [0, SIZE])),
        ("deleted", News([keys[1]], [SIZE])),
    ]
    assert cache.objects.look_up(keys, {0: Layout()}) == [True] * 3
    assert cache.objects.store([keys[1]], [objects[1]]) == SIZE, "it is counted anew"


def test_what_is_not_there_in_another_layout_is_still_counted() -> None:
    cache, key = Cache(), Key(b"one")
    cache.objects.store([key], [Object(bytes_of(1))])
    assert cache.objects.look_up([key], {0: Layout(dtypes=("torch.int32",))}) == [False]
    assert cache.news == [("stored", News([key], [SIZE]))]
    assert cache.objects.look_up([key], {0: Layout()}) == [True]


def test_bytes_that_are_not_the_object_s_are_a_miss() -> None:
    cache, keys = Cache(), [Key(b"one"), Key(b"two")]
    cache.objects.store(keys, [Object(bytes_of(1)), Object(bytes_of(2))])
    for held, reason in zip(list(cache.store.held), MissReason, strict=False):
        cache.store.spoil = {held: reason}
        assert sorted(cache.objects.load(keys, [Object(), Object()])) == [False, True]


def test_trouble_is_a_miss_and_nothing_is_forgotten_for_it() -> None:
    cache, key = Cache(), Key(b"one")
    cache.objects.store([key], [Object(bytes_of(1))])
    cache.store.fail = Unavailable("no master answers")
    news = list(cache.news)
    assert cache.objects.look_up([key], {0: Layout()}) == [False]
    assert not cache.pooled.pool.is_worth_asking
    asked = cache.store.asked.total()
    assert cache.objects.load([key], [Object()]) == [False]
    assert cache.objects.store([key], [Object(bytes_of(1))]) is None
    cache.objects.delete([key])
    assert cache.objects.page(None, 10, None) == ([], None)
    assert cache.store.asked.total() == asked, "it was left alone"
    assert cache.news == news
    cache.store.fail = None
    cache.clock.advance(limits.CALL_TIMEOUT_MAX_S)
    assert cache.objects.look_up([key], {0: Layout()}) == [True]


def test_a_pool_that_is_absent_at_first_is_found_later() -> None:
    cache, key = Cache(), Key(b"one")
    cache.store.fail = Unavailable("no master answers")
    assert cache.objects.store([key], [Object(bytes_of(1))]) is None
    cache.store.fail = None
    cache.clock.advance(limits.CALL_TIMEOUT_MAX_S)
    assert cache.objects.store([key], [Object(bytes_of(1))]) == SIZE
    cache.pooled.close()
    assert cache.objects.look_up([key], {0: Layout()}) == [False]


def test_a_store_that_fails_while_it_opens_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()

    def fail(*_: object, **__: object) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(cache.store, "open_opaque", fail)
    assert cache.pooled.sizes([b"one"], lease_id=1) is None
    assert cache.store.asked["close"] == 1


def test_keys_of_all_servers_are_listed_in_pages() -> None:
    cache, another = Cache(), Cache()
    another.store = cache.store
    keys = [Key(bytes([number]), cache_salt="a" * (number % 2)) for number in range(5)]
    strange = Key(b"one", "other/model")
    another.objects.store([*keys, strange], [Object(bytes_of(1))] * 6)
    cache.pooled.store([Item(b"no name of ours", bytes_of(1))])
    found, cursor, pages = [], None, 0
    while pages == 0 or cursor:
        page, cursor = cache.objects.page("some/model", 2, cursor)
        found += page
        pages += 1
    assert pages == 3
    assert [size for _, size in found] == [SIZE] * 5
    assert sorted(each[:5] for each, _ in found) == sorted(msgspec.structs.astuple(k) for k in keys)
    assert len(cache.objects.page(None, 10, None)[0]) == 6
    with pytest.raises(ValueError, match="page_size 0"):
        cache.objects.page(None, 0, None)
    with pytest.raises(ValueError, match="hexadecimal"):
        cache.objects.page(None, 1, "no cursor")


def test_a_lane_tells_of_each_task_once() -> None:
    lane: Lane[int] = Lane("some")
    told = threading.Event()

    def last() -> int:
        told.set()
        return 33

    first = lane.submit(lambda: 11, -1)
    second = lane.submit(lambda: 1 // 0, -1)
    third = lane.submit(last, -1)
    assert told.wait(30)
    lane._thread.close(30)  # noqa: SLF001 -- so that the last result is told, too
    assert os.eventfd_read(lane.descriptor) == 3
    assert lane.take(first) == 11
    assert lane.take(first) is None
    assert lane.take_all() == {second: -1, third: 33}
    assert lane.take_all() == {}
    assert lane.take(lane.submit(lambda: 44, -2)) == -2
    lane.close(1)


def test_a_lane_closes_though_a_task_is_under_way() -> None:
    lane: Lane[int] = Lane("some")
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        return int(go_on.wait(30))

    number = lane.submit(slow, -1)
    assert begun.wait(30)
    lane.close(0)
    lane.close(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lane.descriptor)
    go_on.set()
    assert lane.take(number) is None


def test_settings_have_defaults_and_wrong_ones_are_named() -> None:
    assert settings_of({}, "adapter_params") == Settings()
    assert settings_of({"masters": "a:1", "revision": "r"}, "adapter_params").masters == "a:1"
    for wrong in (
        {"mastre": "a"},
        {"capacity_bytes": -1},
        {"revision": "r" * 257},
        {"timeout_s": 0},
    ):
        with pytest.raises(BadValue, match="adapter_params"):
            settings_of(wrong, "adapter_params")
    assert engine_of("0.5.6") == "0.5"
    with pytest.raises(BadValue, match=r"lmcache: got '0\.6\.0'"):
        engine_of("0.6.0")


def test_an_object_whose_name_is_too_long_is_refused_alone() -> None:
    cache, keys = Cache(), [Key(b"one"), Key(b"two", "m" * 1000)]
    assert cache.objects.store(keys, [Object(bytes_of(1)), Object(bytes_of(2))]) is None
    assert cache.objects.look_up(keys, {0: Layout()}) == [True, False]
    assert cache.pooled.pool.troubles == 0


def test_names_are_in_the_namespace_of_the_revision() -> None:
    cache, key = Cache(), Key(b"one")
    cache.objects.store([key], [Object(bytes_of(1))])
    opened = cache.store.open_opaque(NAMESPACE, keep_names=True)
    name = name_of(key, "float32:2x2x4")
    assert list(cache.store.held) == [name_key(opened.namespace.id, name)]
