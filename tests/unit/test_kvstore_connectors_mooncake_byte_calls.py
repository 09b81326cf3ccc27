"""The Mooncake drop-in's calls about whole objects, on a store that is a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.outcomes import MissReason, Refused, RefusedReason
from kvstore.connectors.mooncake import ReplicaStatus, objects
from kvstore.connectors.mooncake.addresses import gather
from kvstore.errors import CorruptPage, DeadlineExceeded, OutOfSpace, Unavailable
from kvstore.namespace import opaque
from kvstore.page import NAME_BYTES_MAX, name_key
from tests.unit.object_store import installed, set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.connectors.mooncake import MooncakeDistributedStore
    from kvstore.connectors.mooncake.addresses import Slices
    from tests.unit.object_store import ObjectStore

HEADS = opaque("tests", "mooncake", keeps_names=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    return installed(monkeypatch)


@pytest.fixture
def store(fake: ObjectStore) -> Iterator[MooncakeDistributedStore]:
    with set_up(fake) as made:
        yield made


def key_of(name: str) -> bytes:
    return name_key(HEADS.id, name.encode())


def test_what_is_put_comes_back_by_every_call(store: MooncakeDistributedStore) -> None:
    assert store.put("a", b"one") == 0
    assert store.put_parts("b", b"two", bytearray(b" and "), memoryview(b"three")) == 0
    assert store.put_batch(["c", "d"], [b"4", b"55"]) == 0
    assert store.get("a") == b"one"
    assert store.get_batch(["b", "no", "a"]) == [b"two and three", b"", b"one"]
    handle = store.get_buffer("b")
    assert handle is not None
    assert (bytes(handle), handle.size()) == (b"two and three", 13)
    assert store.batch_get_buffer(["no", "a"])[0] is None
    assert [store.get_size(key) for key in ("a", "d", "no")] == [3, 2, -704]
    assert store.batch_is_exist(["a", "no", "a", "d"]) == [1, 0, 1, 1]
    assert store.is_exist("no") == 0


def test_a_put_keeps_what_is_there_and_an_upsert_replaces_it(
    store: MooncakeDistributedStore,
) -> None:
    assert [store.put("a", b"old"), store.put("a", b"new")] == [0, 0]
    assert store.get("a") == b"old"
    assert store.upsert("a", b"newer and longer") == 0
    assert store.get("a") == b"newer and longer"
    assert store.upsert_batch(["a", "b"], [b"1", b"2"]) == 0
    assert store.upsert_parts("b", b"x", b"y") == 0
    assert store.get_batch(["a", "b"]) == [b"1", b"xy"]


def test_of_a_name_that_comes_twice_one_value_is_stored(store: MooncakeDistributedStore) -> None:
    assert store.put_batch(["a", "a"], [b"1", b"2"]) == 0
    assert store.get("a") == b"1"
    assert store.upsert_batch(["a", "a"], [b"3", b"4"]) == 0
    assert store.get("a") == b"4"


def test_what_cannot_be_stored_is_refused_and_the_rest_is_stored(
    store: MooncakeDistributedStore,
) -> None:
    assert store.put("empty", b"") == -600
    assert store.put("", b"x") == -600
    assert store.put("x" * (NAME_BYTES_MAX + 1), b"x") == -600
    assert store.put("x" * NAME_BYTES_MAX, b"x") == 0
    assert store.put_batch(["a"], [b"1", b"2"]) == -600
    assert store.put_batch(["a", "empty", "b"], [b"1", b"", b"2"]) == -600
    assert store.batch_is_exist(["a", "empty", "b"]) == [1, 0, 1]
    with pytest.raises(TypeError):
        store.put(1, b"x")  # type: ignore[arg-type]  # as a program might
    with pytest.raises(TypeError):
        store.put("a", "text")


def test_buffers_that_do_not_lie_in_one_stretch_are_refused(
    store: MooncakeDistributedStore,
) -> None:
    every_second = memoryview(b"abcdef")[::2]
    assert store.put("a", every_second) == store.upsert("a", every_second) == -600
    assert store.put_parts("a", b"1", every_second) == -600, "not without it"
    assert store.put_batch(["a", "b"], [every_second, b"x"]) == -600
    assert store.batch_is_exist(["a", "b"]) == [0, 1]


def test_buffers_keep_their_size_while_they_are_put(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = bytearray(b"x")

    def gather_late(slices: Slices, to: int) -> None:
        with pytest.raises(BufferError):  # as another thread might, and move it
            value.extend(bytes(1 << 20))
        gather(slices, to)

    monkeypatch.setattr(objects, "gather", gather_late)
    assert store.put("a", value) == 0
    value.extend(b"y")
    assert store.get("a") == b"x"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (RefusedReason.OUT_OF_SPACE, -200),
        (RefusedReason.TRANSPORT, -800),
        (RefusedReason.DEADLINE, -900),
        (RefusedReason.IN_PROGRESS, -703),
        (RefusedReason.OTHER, -1),
    ],
)
def test_refusals_are_codes(
    store: MooncakeDistributedStore, fake: ObjectStore, reason: RefusedReason, code: int
) -> None:
    fake.refuse[key_of("a")] = Refused(reason)
    assert store.put("a", b"x") == code
    fake.refuse[key_of("b")] = Refused(reason)
    assert store.put_batch(["a", "b", "c"], [b"1", b"2", b"3"]) == code
    assert store.get_batch(["a", "b", "c"]) == [b"1", b"", b"3"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("away"), -900),
        (DeadlineExceeded("late"), -900),
        (OutOfSpace("full"), -200),
        (CorruptPage("?"), -1),
    ],
)
def test_no_error_of_the_pool_reaches_the_program(
    store: MooncakeDistributedStore, fake: ObjectStore, error: Exception, code: int
) -> None:
    store.put("a", b"x")
    fake.fail = error  # type: ignore[assignment]  # all are KVStoreErrors
    assert store.put("a", b"x") == code
    assert store.get("a") == b""
    assert store.get_batch(["a", "b"]) == [b"", b""]
    assert store.get_buffer("a") is None
    assert store.get_size("a") == store.is_exist("a") == store.remove("a") == code
    assert store.batch_is_exist(["a", "b"]) == store.batch_remove(["a", "b"]) == [code, code]
    assert store.remove_all() == store.remove_by_regex("a") == code
    assert store.get_replica_desc("a") == []
    assert store.health_check() == 2


def test_bytes_that_do_not_verify_are_no_object(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    store.put_batch(["a", "b"], [b"1", b"2"])
    fake.spoil[key_of("a")] = MissReason.CHECKSUM
    assert store.get_batch(["a", "b"]) == [b"", b"2"]
    assert store.batch_get_buffer(["a"]) == [None]


def test_removed_objects_are_gone(store: MooncakeDistributedStore, fake: ObjectStore) -> None:
    names = [f"layer/{number}" for number in range(5)]
    store.put_batch([*names, "other"], [b"x"] * 6)
    assert store.remove("other") == 0
    assert store.remove("other", True) == -704
    assert store.batch_remove(["layer/0", "no", "layer/0"], force=True) == [0, -704, -704]
    assert store.remove_by_regex("^layer/[12]$") == 2
    for wrong in ("(", "a{4294967296}", "(" * 5000 + ")" * 5000):
        assert store.remove_by_regex(wrong) == -600
    assert store.batch_is_exist(names) == [0, 0, 0, 1, 1]
    assert store.batch_replica_clear(["layer/3", "no"]) == ["layer/3"]
    assert store.batch_replica_clear(["layer/4"], "segment") == []
    assert store.remove_all() == 1
    assert not fake.held


def test_an_object_whose_name_cannot_be_read_now_matches_no_pattern(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    store.put_batch(["a", "b"], [b"1", b"2"])
    fake.spoil[key_of("a")] = MissReason.UNREACHABLE
    assert store.remove_by_regex(".") == 1
    assert store.batch_is_exist(["a", "b"]) == [1, 0]


def test_replicas_are_described(store: MooncakeDistributedStore) -> None:
    store.put("a", b"four")
    (replica,) = store.get_replica_desc("a")
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    assert not replica.is_local_disk_replica()
    assert replica.status is ReplicaStatus.COMPLETE
    place = replica.get_memory_descriptor().buffer_descriptor
    assert (place.size, place.transport_endpoint) == (4, "/nowhere/near")
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()
    assert store.get_replica_desc("no") == []
    assert list(store.batch_get_replica_desc(["a", "no"])) == ["a"]


def test_before_setup_and_after_close_calls_are_refused(store: MooncakeDistributedStore) -> None:
    assert store.health_check() == 0
    assert store.get_hostname() == "host:1"
    store.close()
    assert store.close() == 0
    assert store.health_check() == 1
    assert (store.put("a", b"x"), store.get("a"), store.is_exist("a")) == (-600, b"", -600)


def test_keys_are_text_of_any_kind_and_nothing_else(store: MooncakeDistributedStore) -> None:
    odd = ["plain", "\u00fc\U0001f600", "lone \udc80"]
    assert [store.put(key, key.encode("utf-8", "replace")) for key in odd] == [0, 0, 0]
    assert store.batch_is_exist([*odd, "absent"]) == [1, 1, 1, 0]
    assert store.get_batch(odd[:2]) == [b"plain", odd[1].encode()]
    mixed: list[Any] = ["plain", 7]
    for call in (store.batch_is_exist, store.get_batch, store.batch_remove):
        with pytest.raises(TypeError, match="a key is text, not int"):
            call(mixed)
    assert store.batch_remove(odd) == [0, 0, 0]
