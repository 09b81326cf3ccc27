"""A rank's half of the vLLM connector: bytes out, verified bytes in, and what failures lead to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from kvstore.client.outcomes import MissReason, RefusedReason
from kvstore.connectors.engine_events import PutBlock
from kvstore.connectors.engine_namespace import EngineFields, EngineGroup, namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.engine_saves import BlockRun, Load
from kvstore.connectors.one_thread import OneThread
from kvstore.connectors.vllm import worker_side
from kvstore.connectors.vllm.blocks import GroupBlocks
from kvstore.connectors.vllm.worker_side import NOTHING_ARRIVED, Arrived, WorkerSide
from kvstore.errors import ConfigError, DeadlineExceeded, LayoutMismatch, Unavailable
from kvstore.hints import Hints
from kvstore.namespace import Attention
from kvstore.page import engine_key
from tests.fakes import ManualClock
from tests.unit.engine_store import EngineFakeStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transfer.buffer import Buffer

BLOCKS, TOKENS, HEADS, DIM = 10, 16, 2, 8
HASHES = tuple(bytes([i]) * 32 for i in range(1, 9))
FULL = EngineGroup(Attention.FULL, ("l0", "l2"), HEADS, DIM, DIM)
SLIDING = EngineGroup(Attention.SLIDING, ("l1", "l3"), HEADS, DIM, DIM, 32)
LATENT = EngineGroup(Attention.LATENT, ("l0", "l2"), 1, HEADS * 2 * DIM, 0)
FIELDS = EngineFields(
    engine="e", model="m", revision="r", tenant="t", kv_dtype="float32", compute_dtype="float32",
    quantization="", config_digest="", hash_algorithm="sha256_cbor", hash_seed="s",
    block_tokens=TOKENS, tensor_parallel=1, block_order="o", groups=(FULL,),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching 32 MiB would be most of the time that these tests take."""
    monkeypatch.setattr(worker_side, "BUFFER_BYTES", 1 << 16)


def layer_of(seed: int, heads: int = HEADS) -> torch.Tensor:
    """A layer's cache, every number another one."""
    shape = (BLOCKS, heads, TOKENS, 2 * DIM)
    count = BLOCKS * heads * TOKENS * 2 * DIM
    return (torch.arange(count, dtype=torch.float32) + seed * 100_000).view(shape)


class Rank:
    """One rank with its engine's memory; all ranks of a test share a store."""

    def __init__(
        self, fields: EngineFields, rank: int = 0, store: EngineFakeStore | None = None
    ) -> None:
        self.store = store or EngineFakeStore()
        self.namespaces = namespaces(fields)
        self.clock = ManualClock()
        self.pool = EnginePool(lambda: self.store, self.namespaces, self.clock)
        self.side = WorkerSide(self.namespaces, rank, self.pool, 1.0, 1 << 20)
        self.names = [group.layers for group in fields.groups]
        flat = [name for group in self.names for name in group]
        heads = HEADS // fields.tensor_parallel if fields.groups[0] is not LATENT else HEADS
        # All of it in one piece, as vLLM has it on CPUs.
        whole = torch.stack([layer_of(8 * rank + i, heads) for i in range(len(flat))])
        self.caches = dict(zip(flat, whole, strict=True))
        self.side.register(self.caches, self.names, BLOCKS)
        self.side.reach()
        self.wait()

    def save(self, *runs: BlockRun) -> None:
        """Save, and wait until all of it was put."""
        self.side.save(runs)
        self.wait()

    def wait(self) -> None:
        """Wait until the thread beside the engine's has nothing left to do."""
        self.side._thread.close(30.0)  # noqa: SLF001 -- the only way to wait for what is put
        self.side._thread = OneThread("saves")  # noqa: SLF001 -- and to go on afterwards

    def load(self, *runs: BlockRun) -> None:
        self.side.load([Load("r", runs)])

    def blank(self) -> None:
        for cache in self.caches.values():
            cache.zero_()

    def held(self, group: int = 0) -> set[int]:
        """Numbers of the hashes whose pages are stored."""
        ids = self.namespaces[group].id
        keys = {bytes(engine_key(ids, each)): i for i, each in enumerate(HASHES)}
        return {keys[key] for key, _ in self.store.held if key in keys}


def run(group: int, first: int, blocks: tuple[int, ...]) -> BlockRun:
    parent = HASHES[first - 1] if first else b""
    return BlockRun(group, first, parent, HASHES[first : first + len(blocks)], blocks)


def same(one: torch.Tensor, other: torch.Tensor, to: int, of: int) -> bool:
    return torch.equal(one[to], other[of])


def test_a_rank_tells_what_it_has_put_where_somebody_wants_to_know() -> None:
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 7)))
    assert rank.side.put_blocks() == []
    rank.side.tells_puts = True
    rank.store.refuse[engine_key(rank.namespaces[0].id, HASHES[3])] = RefusedReason.OUT_OF_SPACE
    rank.save(run(0, 0, (3, 7, 1, 2)))
    assert rank.side.put_blocks() == [PutBlock(0, HASHES[i]) for i in range(3)]
    rank.store.fail["put_parts"] = Unavailable("away")
    rank.save(run(0, 4, (5,)))
    assert rank.side.put_blocks() == []
    rank.side.close()


def test_loads_wait_for_their_turn_and_those_of_ended_requests_are_not_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_side, "LOAD_BYTES_PER_STEP", 1)
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 7, 1)))
    rank.blank()
    places = {"a": 9, "b": 2, "c": 4}
    rank.side.load([Load(name, (run(0, 0, (block,)),)) for name, block in places.items()])
    rank.side.abandon({"a", "never loaded"})  # too late: it has come
    assert rank.side.arrived() == Arrived(frozenset("a"), frozenset(), frozenset())
    rank.side.abandon({"b"})
    assert rank.side.arrived() == Arrived(frozenset("b"), frozenset(), frozenset())
    rank.side.load([])
    assert rank.side.arrived() == Arrived(frozenset("c"), frozenset(), frozenset())
    for cache in rank.caches.values():
        assert [bool(cache[block].any()) for block in places.values()] == [True, False, True]
    rank.side.close()


def test_blocks_come_back_bit_by_bit_to_other_places() -> None:
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 7, 1)))
    kept = {name: cache.clone() for name, cache in rank.caches.items()}
    rank.blank()
    rank.load(run(0, 0, (9, 2, 4)))
    for name, cache in rank.caches.items():
        assert [same(cache, kept[name], *pair) for pair in ((9, 3), (2, 7), (4, 1))] == [True] * 3
        assert not cache[[0, 1, 3, 5, 6, 7, 8]].any()
    arrived = rank.side.arrived()
    assert arrived == Arrived(frozenset({"r"}), frozenset(), frozenset())
    assert rank.side.arrived() == NOTHING_ARRIVED
    rank.wait()
    assert rank.store.leased
    assert rank.store.pages_leased == 0
    rank.side.close()
    assert rank.store.closed


def test_a_pool_that_was_not_reached_yet_is_looked_for_by_the_first_save() -> None:
    rank = Rank(FIELDS)
    rank.pool = EnginePool(lambda: rank.store, rank.namespaces, rank.clock)
    rank.side = WorkerSide(rank.namespaces, 0, rank.pool, 1.0, 1 << 20)
    rank.side.register(rank.caches, rank.names, BLOCKS)
    rank.save(run(0, 0, (3,)))
    assert rank.side.counts["dropped_pages"] == 1
    rank.save(run(0, 0, (3,)))
    assert rank.held() == {0}
    rank.side.close()


def test_a_saved_block_may_be_reused_at_once() -> None:
    rank = Rank(FIELDS)
    before = rank.caches["l0"][3].clone()
    rank.side.save([run(0, 0, (3,))])
    rank.blank()
    rank.save()
    rank.load(run(0, 0, (5,)))
    assert torch.equal(rank.caches["l0"][5], before)
    rank.side.close()


def test_pages_with_a_window_need_no_parent() -> None:
    rank = Rank(msgspec.structs.replace(FIELDS, groups=(FULL, SLIDING)))
    rank.save(run(0, 2, (3, 4)), run(1, 2, (3, 4)))
    assert rank.held(0) == set()
    assert rank.held(1) == {2, 3}
    assert rank.side.counts["refused_pages"] == 2
    rank.side.close()


def test_blocks_that_do_not_come_are_told_by_number_where_that_is_enough() -> None:
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 4, 5)))
    rank.store.spoil[engine_key(rank.namespaces[0].id, HASHES[1])] = MissReason.CHECKSUM
    rank.blank()
    rank.load(run(0, 0, (3, 4, 5)))
    arrived = rank.side.arrived()
    assert arrived == Arrived(frozenset({"r"}), frozenset(), frozenset({4}))
    assert not rank.caches["l0"][4].any()
    assert rank.caches["l0"][5].any()
    rank.side.close()


def test_a_request_of_several_groups_fails_as_a_whole() -> None:
    rank = Rank(msgspec.structs.replace(FIELDS, groups=(FULL, SLIDING)))
    rank.save(run(0, 0, (3, 4)))
    rank.load(run(0, 0, (3, 4)), run(1, 0, (3, 4)))
    ours = frozenset({"r"})
    assert rank.side.arrived() == Arrived(ours, ours, frozenset())
    rank.side.close()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)])
def test_what_is_refused_has_failed_as_a_whole(groups: tuple[EngineGroup, ...]) -> None:
    rank = Rank(msgspec.structs.replace(FIELDS, groups=groups))
    rank.save(run(0, 0, (3, 4)))
    rank.side.refuse([Load("r", (run(0, 0, (3, 4)),))])
    arrived = rank.side.arrived()
    assert arrived.finished == {"r"}
    assert arrived.bad_blocks == ({3, 4} if len(groups) == 1 else set())
    assert arrived.failed == (set() if len(groups) == 1 else {"r"})
    rank.side.close()


def test_a_rank_that_has_other_kv_than_its_scheduler_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = Rank(msgspec.structs.replace(FIELDS, groups=(FULL, SLIDING)))
    ids = [bytes(each.id) for each in rank.namespaces]
    assert rank.side.is_of_one_mind(tuple(ids))
    assert not caplog.records
    for others in (ids[::-1], ids[:1], [*ids, ids[0]]):
        assert not rank.side.is_of_one_mind(others)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    rank.side.close()


def test_what_was_evicted_meanwhile_is_missing() -> None:
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 4, 5)))
    rank.store.lose(engine_key(rank.namespaces[0].id, HASHES[1]))
    rank.load(run(0, 0, (3, 4, 5)))
    assert rank.side.arrived().bad_blocks == {4, 5}
    rank.side.close()


def test_pages_that_are_mapped_are_copied_from_where_they_lie() -> None:
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 7)))
    want = rank.caches["l2"][7].clone()
    rank.blank()
    rank.store.fail["read"] = Unavailable("nobody may ask")
    rank.load(run(0, 0, (9, 2)))
    assert rank.side.arrived().bad_blocks == frozenset()
    assert torch.equal(rank.caches["l2"][2], want)
    rank.side.close()


@pytest.mark.parametrize("can_map", [False, True])
def test_other_pages_come_through_a_buffer(can_map: bool) -> None:
    """From another host, or into layers of a device's memory, which lie apart."""
    rank = Rank(FIELDS)
    rank.store.can_map = can_map
    if can_map:
        rank.caches = {name: cache.clone() for name, cache in rank.caches.items()}
        rank.side = WorkerSide(rank.namespaces, 0, rank.pool, 1.0, 1 << 20)
        rank.side.register(rank.caches, rank.names, BLOCKS)
    rank.save(run(0, 0, (3, 7)))
    want = rank.caches["l2"][7].clone()
    rank.blank()
    rank.load(run(0, 0, (9, 2)))
    assert rank.side.arrived().bad_blocks == frozenset()
    assert torch.equal(rank.caches["l2"][2], want)
    rank.side.close()


@pytest.mark.parametrize("call", ["match_prefix", "views"])
def test_trouble_with_the_pool_is_a_miss_of_all(call: str) -> None:
    rank = Rank(FIELDS)
    rank.save(run(0, 0, (3, 4)))
    rank.store.fail[call] = Unavailable("gone")
    rank.load(run(0, 0, (3, 4)))
    assert rank.side.arrived().bad_blocks == {3, 4}
    assert rank.side.counts["failed_load_pages"] == 2
    rank.side.close()


def test_saves_are_left_out_while_the_pool_is_away() -> None:
    rank = Rank(FIELDS)
    rank.store.fail["match_prefix"] = Unavailable("gone")
    rank.load(run(0, 0, (3,)))
    rank.save(run(0, 0, (3, 4)))
    assert rank.held() == set()
    assert rank.side.counts["failed_save_pages"] == 2
    rank.side.close()


def test_saves_are_left_out_under_pressure() -> None:
    rank = Rank(FIELDS)
    rank.side = WorkerSide(rank.namespaces, 0, rank.pool, 1.0, 0)  # one buffer
    rank.side.register(rank.caches, rank.names, BLOCKS)
    first = rank.side._take()  # noqa: SLF001 -- a save that stands still
    assert first is not None
    rank.side.save([run(0, 0, (3, 4))])
    assert rank.side.counts["dropped_pages"] == 2
    rank.side.close()


def test_a_pool_that_is_lost_takes_no_buffer_away_while_blocks_are_copied_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V5: the other thread closes it at any moment, and the engine's own must not fail by that."""
    rank, really = Rank(FIELDS), GroupBlocks.gather

    def gather(group: GroupBlocks, blocks: Sequence[int], memory: memoryview) -> None:
        with pytest.raises(DeadlineExceeded):
            rank.store.buffers[0].close(0.0)
        really(group, blocks, memory)

    monkeypatch.setattr(GroupBlocks, "gather", gather)
    rank.save(run(0, 0, (3,)))
    assert rank.side.counts["failed_save_pages"] == 1
    rank.side.close()


def test_a_buffer_that_was_just_closed_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, really = Rank(FIELDS), WorkerSide._take  # noqa: SLF001 -- the moment is behind it

    def take(side: WorkerSide) -> Buffer | None:
        buffer = really(side)
        assert buffer is not None
        buffer.close()
        return buffer

    monkeypatch.setattr(WorkerSide, "_take", take)
    rank.save(run(0, 0, (3, 4)))
    assert rank.side.counts["dropped_pages"] == 2
    rank.side.close()


def test_each_rank_saves_and_loads_its_own_part() -> None:
    fields = msgspec.structs.replace(FIELDS, tensor_parallel=2)
    one = Rank(fields, 0)
    two = Rank(fields, 1, one.store)
    one.save(run(0, 0, (3,)))
    one.load(run(0, 0, (5,)))
    assert one.side.arrived().bad_blocks == {5}  # the other part is not there yet
    two.save(run(0, 0, (3,)))
    for rank in (one, two):
        before = rank.caches["l0"][3].clone()
        rank.load(run(0, 0, (5,)))
        assert not rank.side.arrived().bad_blocks
        assert torch.equal(rank.caches["l0"][5], before)
        rank.side.close()


def test_a_latent_is_saved_by_one_rank_and_loaded_by_all() -> None:
    fields = msgspec.structs.replace(FIELDS, groups=(LATENT,), tensor_parallel=2)
    one = Rank(fields, 0)
    two = Rank(fields, 1, one.store)
    two.save(run(0, 0, (3,)))
    assert two.held() == set()
    one.save(run(0, 0, (3,)))
    two.load(run(0, 0, (5,)))
    assert torch.equal(two.caches["l0"][5], one.caches["l0"][3])
    for rank in (one, two):
        rank.side.close()


def test_what_is_known_of_a_chain_goes_with_each_of_its_puts() -> None:
    rank = Rank(msgspec.structs.replace(FIELDS, groups=(FULL, SLIDING)))
    hints = Hints(session_closed=True)
    rank.save(*(run(group, 0, (3, 4))._replace(hints=hints) for group in (0, 1)))
    assert [each[2] for each in rank.store.heard] == [hints] * 3  # a chain, and two of a window
    rank.side.close()


def test_memory_that_is_not_the_layouts_is_refused() -> None:
    rank = Rank(FIELDS)
    side = WorkerSide(rank.namespaces, 0, rank.pool, 1.0, 0)
    with pytest.raises(ConfigError, match="'l9'"):
        side.register(rank.caches, [("l0", "l9")], BLOCKS)
    with pytest.raises(LayoutMismatch, match="blocks of"):
        side.register(rank.caches, [("l0",)], BLOCKS)
    rank.side.close()
