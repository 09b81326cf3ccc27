"""What the Mooncake drop-in stores: pins, replicas, races, and objects of several pieces."""

from __future__ import annotations

import os
from math import inf
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.client.outcomes import MissReason, Refused, RefusedReason
from kvstore.connectors.mooncake import ReplicateConfig, SoftPinAction, large, puts
from kvstore.connectors.mooncake.large import MANIFEST_BYTES, MARK, Manifest
from kvstore.errors import OutOfSpace
from kvstore.namespace import opaque
from kvstore.page import name_key
from tests.fakes import payload
from tests.unit.client_scripts import opened
from tests.unit.object_store import installed, region, set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.connectors.mooncake import MooncakeDistributedStore
    from tests.unit.object_store import ObjectStore

HEADS = opaque("tests", "mooncake", keeps_names=True)
PIECES = opaque("tests", "mooncake/pieces")
PIECE = 1000
LARGE = bytes(payload(b"large", 0, 2 * PIECE + 1))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(large, "PIECE_BYTES", PIECE)
    return installed(monkeypatch)


@pytest.fixture
def store(fake: ObjectStore) -> Iterator[MooncakeDistributedStore]:
    with set_up(fake) as made:
        yield made


def key_of(name: str) -> bytes:
    return name_key(HEADS.id, name.encode())


def pieces_in(fake: ObjectStore) -> list[bytes]:
    return [key for key, number in fake.where.items() if number == 2 and key in fake.held]


def test_an_object_larger_than_a_chunk_is_stored_in_pieces(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    assert store.put_batch(["large", "small"], [LARGE, b"s"]) == 0
    assert len(pieces_in(fake)) == 3
    assert store.get_batch(["large", "small"]) == [LARGE, b"s"]
    assert store.get_size("large") == len(LARGE)
    into, at = region(bytes(len(LARGE)))
    assert store.get_into("large", at, len(LARGE)) == len(LARGE)
    assert into.raw == LARGE
    halves = [at + 1500, at], [len(LARGE) - 1500, 1500]
    ours = store.batch_get_into_multi_buffers(["large"], [[*halves[0]]], [[*halves[1]]])
    assert ours == [len(LARGE)]
    assert into.raw == LARGE[len(LARGE) - 1500 :] + LARGE[: len(LARGE) - 1500]
    assert store.remove("large") == 0
    assert not pieces_in(fake)


def test_a_value_that_looks_like_a_manifest_is_not_mistaken_for_one(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    forged = Manifest(bytes(16), 5000).pack()
    assert (len(forged), forged[: len(MARK)]) == (MANIFEST_BYTES, MARK)
    other = bytes(MANIFEST_BYTES)
    assert store.put_batch(["forged", "other"], [forged, other]) == 0
    assert store.get_batch(["forged", "other"]) == [forged, other]
    assert len(pieces_in(fake)) == 1
    assert [store.get_size(key) for key in ("forged", "other")] == [MANIFEST_BYTES] * 2


def test_an_object_that_lacks_a_piece_is_a_miss_and_is_stored_anew(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    store.put("large", LARGE)
    lost = pieces_in(fake)[1]
    del fake.held[lost]
    assert store.get("large") == b""
    assert store.put("large", LARGE) == 0
    assert store.get("large") == LARGE
    assert len(pieces_in(fake)) == 3, "those of the value before are gone"
    puts_before = fake.asked["put_objects"]
    assert store.put("large", LARGE) == 0
    assert fake.asked["put_objects"] == puts_before, "one that is whole stays as it is"


def test_pieces_do_not_stay_where_their_object_cannot_be_stored(
    store: MooncakeDistributedStore, fake: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    second = name_key(PIECES.id, Manifest(bytes(16), len(LARGE)).names()[1])
    fake.refuse[second] = Refused(RefusedReason.OUT_OF_SPACE)
    assert store.put("large", LARGE) == -200
    assert not fake.held
    fake.refuse[key_of("large")] = Refused(RefusedReason.OUT_OF_SPACE)
    assert store.put("large", LARGE) == -200
    assert not fake.held, "nor where their manifest cannot be"
    fake.puts_between = [(opened(), key_of("large"), b"theirs")] * 4
    assert store.put("large", LARGE) == 0
    assert (store.get("large"), pieces_in(fake)) == (b"theirs", [])


def test_an_upsert_goes_on_until_its_own_value_is_stored(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    theirs = opened(), key_of("a"), b"theirs"
    fake.puts_between = [theirs] * 3
    assert store.upsert("a", b"mine") == 0
    assert store.get("a") == b"mine"
    fake.puts_between = [theirs] * puts.UPSERT_TRIES_MAX
    assert store.upsert("a", b"mine") == -703
    assert store.get("a") == b"theirs"


def test_large_objects_are_replaced_whole(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    store.put("a", LARGE)
    assert store.upsert("a", LARGE[::-1]) == 0
    assert store.get("a") == LARGE[::-1]
    assert len(pieces_in(fake)) == 3
    assert store.upsert("a", b"small") == 0
    assert store.get("a") == b"small"
    assert not pieces_in(fake)
    store.put("b", LARGE)
    assert store.remove_all() == 2
    assert not fake.held


def test_pins_are_as_the_program_wants_them(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    config = ReplicateConfig()
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("a", b"x", config) == 0
    assert fake.pins == {(key_of("a"), puts.PIN_OWNER): (puts.SOFT_PIN_S, False)}
    config.soft_pin_ttl_ms = 5000
    store.put("a", b"x", config)
    assert fake.pins[key_of("a"), puts.PIN_OWNER] == (5.0, False)
    for ttl_ms, ttl_s in ((1, limits.PAGE_TTL_MIN_S), (1 << 60, limits.PAGE_TTL_MAX_S)):
        config.soft_pin_ttl_ms = ttl_ms
        assert store.put("a", b"x", config) == 0
        assert fake.pins[key_of("a"), puts.PIN_OWNER] == (ttl_s, False)
    config.soft_pin_action = SoftPinAction.DISABLE
    store.put("a", b"x", config)
    assert not fake.pins
    config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.ENABLE, 0
    assert store.put("a", b"x", config) == 0
    assert not fake.pins, "for no time"
    config.with_hard_pin = True
    assert store.put("large", LARGE, config) == 0
    assert set(fake.pins.values()) == {(inf, True)}
    assert len(fake.pins) == 4, "an object's pieces are pinned with it"
    config.with_hard_pin, config.soft_pin_action = False, SoftPinAction.DISABLE
    store.put("large", LARGE, config)
    assert not fake.pins


def test_what_cannot_be_pinned_hard_does_not_stay(
    store: MooncakeDistributedStore, fake: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> list[bool]:
        raise OutOfSpace("pin_quota")

    monkeypatch.setattr(fake, "pin", full)
    config = ReplicateConfig()
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("soft", b"x", config) == 0
    config.with_hard_pin = True
    assert store.put("hard", b"x", config) == -200
    assert store.batch_is_exist(["soft", "hard"]) == [1, 0]


def test_replicas_are_as_many_as_usual_unless_more_are_wanted(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    config = ReplicateConfig()
    for wanted in (1, 3, limits.REPLICAS_MAX + 1):
        config.replica_num = wanted
        store.put(f"a{wanted}", b"x", config)
    assert fake.replicas == [0, 3, limits.REPLICAS_MAX]
    assert fake.ttls == [inf, inf], "objects have no time to live"


def test_bytes_of_a_damaged_manifest_are_no_object(
    store: MooncakeDistributedStore, fake: ObjectStore
) -> None:
    store.put("a", LARGE)
    fake.spoil[key_of("a")] = MissReason.CHECKSUM
    assert store.get("a") == b""
    assert store.get_size("a") == -704
