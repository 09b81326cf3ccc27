"""SGLang's third tier: pages go and come back bit by bit, or not at all."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kvstore.client.outcomes import MissReason, RefusedReason
from kvstore.connectors.breaker import PAUSE_MIN_S
from kvstore.connectors.engine_namespace import namespaces
from kvstore.connectors.sglang import rows
from kvstore.connectors.sglang.pages import KV
from kvstore.errors import BadValue, Unavailable
from tests.unit.sglang_pools import (
    DIM,
    FIELDS,
    LAYERS,
    PAGE,
    LatentPool,
    MHATokenToKVPoolHost,
    Rank,
    RowStore,
    StatePool,
    config_of,
    transfer,
)

KEYS = [bytes([i]).hex() * 32 for i in range(1, 9)]


pytestmark = pytest.mark.usefixtures("leases_end_at_once")


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching 32 MiB would be most of the time that these tests take; two pages fit this."""
    monkeypatch.setattr(rows, "STAGING_BYTES", 2 * LAYERS * PAGE * DIM * 4)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_pages_come_back_bit_by_bit_to_other_places(layout: str) -> None:
    rank = Rank(pool=LatentPool(layout))
    assert rank.tier.save(KV, KEYS[:3], indices(0, 1, 2)) == [True] * 3
    kept = rank.kv.kv_buffer.clone()
    rank.kv.kv_buffer.zero_()
    assert rank.tier.leading(KEYS) == 3
    assert rank.tier.load(KV, KEYS[:3], indices(7, 5, 6)) == [True] * 3
    moved = rank.kv.kv_buffer.clone()
    rank.kv.kv_buffer.copy_(kept)
    saved = [rank.kv.page(page).clone() for page in (0, 1, 2)]
    rank.kv.kv_buffer.copy_(moved)
    for page, right in zip((7, 5, 6), saved, strict=True):
        assert torch.equal(rank.kv.page(page), right)
    assert not any(rank.kv.page(page).any() for page in range(5))


def test_what_was_leased_is_given_back_when_it_was_read() -> None:
    rank = Rank()
    rank.tier.save(KV, KEYS[:4], indices(0, 1, 2, 3))
    assert rank.tier.leading(KEYS) == 4
    assert rank.store.pages_leased == 4
    rank.tier.load(KV, KEYS[:2], indices(4, 5))
    assert rank.store.pages_leased == 4, "others of that lookup may still be read"
    rank.store.spoil[rank.key(KEYS[2])] = MissReason.CHECKSUM
    rank.tier.load(KV, KEYS[2:4], indices(6, 7))
    assert rank.store.pages_leased == 0, "whether it came or not"


def test_flat_pages_come_back_and_have_rows_of_their_own() -> None:
    rank = Rank(is_flat=True)
    pages = [rank.kv.page(number).flatten() for number in (4, 2)]
    assert rank.tier.save_flat(KEYS[:2], pages) == [True, True]
    into = [rank.kv.get_dummy_flat_data_page() for _ in range(3)]
    assert rank.tier.load_flat(KEYS[:3], into) == [True, True, False]
    assert [torch.equal(*pair) for pair in zip(pages, into, strict=False)] == [True, True]
    assert not into[2].any()
    with pytest.raises(BadValue, match="96 bytes"):
        rank.tier.load_flat(KEYS[:1], [torch.zeros(1)])


def test_what_does_not_come_leaves_the_engines_memory_alone() -> None:
    rank = Rank()
    rank.tier.save(KV, KEYS[:3], indices(0, 1, 2))
    rank.store.spoil[rank.key(KEYS[1])] = MissReason.CHECKSUM
    rank.kv.kv_buffer.zero_()
    assert rank.tier.load(KV, KEYS[:3], indices(4, 5, 6)) == [True, False, True]
    assert not rank.kv.page(5).any()
    assert rank.tier.rows.totals["failed_load_rows"] == 1


def test_a_rank_has_its_own_share_unless_all_have_the_same() -> None:
    store = RowStore()
    first = Rank(store, config_of(0, 2), MHATokenToKVPoolHost())
    other = Rank(store, config_of(1, 2), MHATokenToKVPoolHost(seed=1))
    first.tier.save(KV, KEYS[:2], indices(0, 1))
    assert [first.tier.leading(KEYS), other.tier.leading(KEYS)] == [2, 0]
    other.tier.save(KV, KEYS[:1], indices(0))
    assert other.tier.load(KV, KEYS[:1], indices(3)) == [True]
    assert torch.equal(other.kv.page(3), other.kv.page(0))
    latent = Rank(store, config_of(0, 2, is_mla=True))
    reader = Rank(store, config_of(1, 2, is_mla=True), LatentPool(seed=1))
    latent.tier.save(KV, KEYS[:1], indices(0))
    assert reader.tier.load(KV, KEYS[:1], indices(0)) == [True]
    assert torch.equal(reader.kv.page(0), latent.kv.page(0))


def test_heads_beside_a_latent_are_each_ranks_own() -> None:
    """SGLang has one rank store what it takes for the same on all: better a miss than another's."""
    store = RowStore()
    ranks = [Rank(store, config_of(rank, 2, is_mla=True)) for rank in range(2)]
    for rank in ranks:
        rank.tier.add(MHATokenToKVPoolHost(), "draft")
        rank.tier.add(StatePool(), "mamba")
    for name in ("draft", "mamba"):
        moved = transfer(name, KEYS[:1])
        assert ranks[0].tier.save(name, moved.keys, moved.host_indices) == [True]
        assert ranks[1].tier.load(name, moved.keys, moved.host_indices) == [False]


def test_states_of_another_type_are_other_rows_however_many_bytes_they_have() -> None:
    store, dtypes = RowStore(), (torch.bfloat16, torch.float16)
    ranks = [Rank(store) for _ in dtypes]
    for rank, dtype in zip(ranks, dtypes, strict=True):
        rank.tier.add(StatePool(temporal_dtype=dtype), "mamba")
    moved = transfer("mamba", KEYS[:1])
    assert ranks[0].tier.save("mamba", moved.keys, moved.host_indices) == [True]
    loaded = [rank.tier.load("mamba", moved.keys, moved.host_indices) for rank in ranks]
    assert loaded == [[True], [False]]


def test_a_prefix_is_restorable_only_with_all_that_it_needs() -> None:
    rank = Rank()
    rank.tier.add(LatentPool(seed=1), "indexer")
    rank.tier.add(StatePool(), "mamba")
    rank.tier.save(KV, KEYS[:5], indices(0, 1, 2, 3, 4))
    rank.tier.save("indexer", KEYS[:4], indices(0, 1, 2, 3))
    for page in (1, 3):
        rank.tier.save("mamba", KEYS[page : page + 1], torch.tensor([page]))
    needs = [transfer("indexer", KEYS), transfer("mamba", KEYS[-1:], "trailing_pages")]
    found = rank.tier.restorable(KEYS, needs)
    assert found is not None
    assert found.lengths == [2, 4]
    assert found.longest == {"kv": 5, "indexer": 4, "mamba": 4}
    beside = transfer("indexer", KEYS, "block_groups")
    assert rank.tier.restorable(KEYS, [beside]) == ([1, 2, 3, 4, 5], {"kv": 5})


def test_trouble_is_a_miss_and_says_nothing_of_what_is_there() -> None:
    rank = Rank()
    rank.tier.save(KV, KEYS[:2], indices(0, 1))
    rank.store.fail["lookup"] = Unavailable("away")
    assert rank.tier.leading(KEYS) == 0
    assert rank.tier.restorable(KEYS, []) is None
    assert rank.tier.save(KV, KEYS[2:4], indices(2, 3)) == [False, False]
    assert rank.tier.load(KV, KEYS[:2], indices(0, 1)) == [False, False]
    rank.store.fail.clear()
    assert rank.tier.leading(KEYS) == 0  # for it is left alone for a while
    rank.clock.advance(PAUSE_MIN_S)
    assert rank.tier.leading(KEYS) == 2
    assert rank.tier.rows.totals["circuit_opened"] == 1
    assert rank.tier.rows.totals["failed_save_rows"] == 2


def test_a_page_without_room_is_told_and_others_are_stored() -> None:
    rank = Rank()
    rank.store.refuse[rank.key(KEYS[1])] = RefusedReason.OUT_OF_SPACE
    assert rank.tier.save(KV, KEYS[:3], indices(0, 1, 2)) == [True, False, True]
    assert rank.tier.save(KV, KEYS[:1], indices(0)) == [True]
    totals = rank.tier.rows.totals
    assert [totals[n] for n in ("saved_rows", "refused_rows", "known_rows")] == [2, 1, 1]


def test_another_engine_finds_nothing() -> None:
    store = RowStore()
    Rank(store).tier.save(KV, KEYS, indices(*range(8)))
    for field, value in (
        ("model", "n"), ("revision", "s"), ("kv_dtype", "bfloat16"), ("block_order", "p"),
        ("engine", "sglang 0.6.0"), ("tensor_parallel", 2), ("rows", {"pool": "q"}),
    ):  # fmt: skip
        other = Rank(store, fields=msgspec.structs.replace(FIELDS, **{field: value}))
        assert other.tier.leading(KEYS) == 0, field
        assert namespaces(FIELDS) != (other.namespace,)
    assert Rank(store).tier.leading(KEYS) == 8


def test_clearing_takes_out_all_of_these_engines_and_nothing_else() -> None:
    store = RowStore()
    one, same = Rank(store), Rank(store)
    other = Rank(store, fields=msgspec.structs.replace(FIELDS, model="n"))
    one.tier.save(KV, KEYS[:2], indices(0, 1))
    same.tier.save(KV, KEYS[2:3], indices(2))
    other.tier.save(KV, KEYS[:2], indices(0, 1))
    assert one.tier.rows.clear() == 3
    assert [one.tier.leading(KEYS), other.tier.leading(KEYS)] == [0, 2]


def test_moves_are_told_once_with_their_speed() -> None:
    rank = Rank()
    rank.store.took_s = 0.5
    rank.tier.save(KV, KEYS[:2], indices(0, 1))
    (move,) = rank.tier.rows.take_moves("written")
    assert move == (2, 2 * rank.tier.page_bytes / 0.5)
    assert rank.tier.rows.take_moves("written") == []
    assert rank.tier.rows.take_moves("read") == []


def test_memory_that_cannot_be_named_is_refused() -> None:
    with pytest.raises(BadValue, match=r"layout of kv pages.*page_first_direct"):
        Rank(pool=LatentPool("page_strange"))
    logical = LatentPool()
    del logical.kv_buffer
    with pytest.raises(BadValue, match="LatentPool"):
        Rank(pool=logical)
    rank = Rank()
    with pytest.raises(BadValue, match="host_indices"):
        rank.tier.load(KV, KEYS[:2], indices(0))


def test_after_the_end_everything_is_a_miss() -> None:
    rank = Rank()
    rank.tier.save(KV, KEYS[:1], indices(0))
    rank.tier.rows.close()
    assert rank.store.closed
    assert rank.tier.leading(KEYS) == 0
    assert rank.tier.save(KV, KEYS[:1], indices(0)) == [False]
