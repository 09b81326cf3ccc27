"""Pages between the pool and a device: certain before they are claimed, told layer by layer."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from kvstore.client.outcomes import MissReason
from kvstore.connectors.breaker import LATE_MAX
from kvstore.connectors.engine_namespace import namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.sglang import rows
from kvstore.connectors.sglang.device_pages import DevicePages, buffers_of, is_alike_on_ranks
from kvstore.connectors.sglang.links import LATE_S, Links, Load
from kvstore.connectors.sglang.rows import Rows
from kvstore.errors import BadValue, LayoutMismatch, Unavailable
from kvstore.page import engine_key
from tests.unit.sglang_pools import FIELDS, RowStore

TOKENS, PAGE, HEADS, DIM = 32, 4, 2, 3
KEYS = ["a" * 64, "b" * 64, "c" * 64]
WAIT_S = 60.0


class MHATokenToKVPool(SimpleNamespace):
    """As SGLang calls it."""


class MLATokenToKVPool(SimpleNamespace):
    """As SGLang calls it."""


class DSATokenToKVPool(MLATokenToKVPool):
    """As SGLang calls it: latents with an indexer beside them."""


class Counter:
    """As SGLang's."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.batches: list[list[Future[None]]] = []

    def update_producer(self) -> int:
        self.batches.append([Future() for _ in range(self._layers)])
        return len(self.batches) - 1

    def complete(self, index: int, layer: int) -> None:
        self.batches[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.batches[index]:
            if not future.done():
                future.set_exception(error)

    def landed(self, index: int) -> bool:
        return all(future.exception(WAIT_S) is None for future in self.batches[index])


class Rank:
    """One rank with its device's memory; all ranks of a test share a store."""

    def __init__(
        self, store: RowStore | None = None, *, prefix: str = "0/", writes: bool = True
    ) -> None:
        self.store = store or RowStore()
        shape = (TOKENS, HEADS, DIM)
        count = TOKENS * HEADS * DIM
        made = [torch.arange(count, dtype=torch.float32).view(shape) + i * count for i in range(4)]
        self.cache = MHATokenToKVPool(
            k_buffer=made[:2], v_buffer=made[2:], k_scale_buffer=None, kv_cache_layout="nhd"
        )
        (self.namespace,) = namespaces(FIELDS)
        self.pages = DevicePages(buffers_of(self.cache), PAGE)
        self.counter = Counter(self.pages.layers)
        pool = EnginePool(lambda: self.store, [self.namespace], self.store.clock)
        self.rows = Rows(pool, self.namespace, self.store.clock, 1.0)
        self.links = Links(self.rows, self.pages, prefix, self.counter, writes=writes)

    def save(self, keys: list[str], *pages: int) -> bool:
        done = threading.Event()
        self.links.save(keys, tokens(*pages), lambda: None)
        self.links._saves.run(done.set)  # noqa: SLF001 -- to wait for it
        assert done.wait(WAIT_S)
        assert self.links.done == 1
        return self.links.take()

    def load(self, keys: list[str], *pages: int) -> bool:
        self.links.load("r", Load(tuple(keys), tokens(*pages)))
        return self.counter.landed(self.links.start(lambda: None))

    def page(self, number: int) -> list[torch.Tensor]:
        where = slice(number * PAGE, (number + 1) * PAGE)
        return [each[where].clone() for each in self.cache.k_buffer + self.cache.v_buffer]

    def close(self) -> None:
        self.links.close()


pytestmark = pytest.mark.usefixtures("leases_end_at_once")


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching 32 MiB would be most of the time that these tests take."""
    monkeypatch.setattr(rows, "STAGING_BYTES", 1 << 12)


def tokens(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_pages_come_back_bit_by_bit_to_other_places() -> None:
    rank = Rank()
    right = [rank.page(number) for number in (5, 1, 3)]
    assert rank.save(KEYS, 5, 1, 3)
    for buffer in rank.cache.k_buffer + rank.cache.v_buffer:
        buffer.zero_()
    assert rank.links.lookup("r", [*KEYS, "d" * 64]) == [1, 2, 3]
    assert rank.load(KEYS, 0, 7, 2)
    assert [same(rank.page(to), of) for to, of in zip((0, 7, 2), right, strict=True)] == [True] * 3
    assert not any(each.any() for number in (1, 3, 4, 5, 6) for each in rank.page(number))
    rank.close()


def test_a_page_that_does_not_come_fails_its_batch_and_touches_nothing() -> None:
    rank = Rank()
    rank.save(KEYS, 0, 1, 2)
    before = [rank.page(number) for number in range(8)]
    key = engine_key(rank.namespace.id, f"0/{KEYS[2]}".encode())
    rank.store.spoil[key] = MissReason.CHECKSUM
    assert not rank.load(KEYS, 5, 6, 7)
    assert all(same(rank.page(number), before[number]) for number in range(8))
    rank.close()


def test_what_is_asked_for_after_the_end_fails_at_once() -> None:
    """Nobody would tell whoever waits for it: neither the batch of a load, nor a save's turn."""
    rank = Rank()
    rank.close()
    assert not rank.load(KEYS, 5, 6, 7)
    rank.links.save(KEYS, tokens(0, 1, 2), lambda: None)
    assert rank.links.done == 1
    assert not rank.links.take()


def test_what_was_loaded_or_stored_is_not_stored_again() -> None:
    rank = Rank()
    rank.save(KEYS[:2], 0, 1)
    assert rank.save(KEYS, 0, 1, 2)
    assert rank.rows.totals["saved_rows"] == 3
    assert "known_rows" not in rank.rows.totals or not rank.rows.totals["known_rows"]
    reader = Rank(rank.store)
    assert reader.load(KEYS, 0, 1, 2)
    assert reader.save(KEYS, 0, 1, 2)
    assert "saved_rows" not in reader.rows.totals
    for each in KEYS:
        rank.store.lose(engine_key(rank.namespace.id, f"0/{each}".encode()))
    assert reader.links.lookup("r", KEYS) == []
    assert reader.save(KEYS, 0, 1, 2)
    assert reader.rows.totals["saved_rows"] == 3
    rank.close()
    reader.close()


def test_ranks_that_are_alike_have_one_writer() -> None:
    writer = Rank(prefix="all/")
    other = Rank(writer.store, prefix="all/", writes=False)
    assert other.save(KEYS, 0, 1, 2)
    assert other.links.lookup("r", KEYS) == []
    assert writer.save(KEYS, 0, 1, 2)
    assert other.links.lookup("r", KEYS) == [1, 2, 3]
    writer.close()
    other.close()


def test_a_load_that_has_not_begun_can_be_cancelled() -> None:
    rank = Rank()
    rank.links.load("r", Load(("a" * 64,), tokens(0)))
    assert rank.links.cancel("r")
    assert not rank.links.cancel("r")
    assert rank.links.start(lambda: None) == -1
    rank.close()


def test_what_a_request_was_promised_is_leased_until_its_load_has_ended() -> None:
    rank = Rank()
    rank.save(KEYS, 0, 1, 2)
    for request in ("r", "other", "r"):
        assert rank.links.lookup(request, KEYS) == [1, 2, 3]
    assert rank.store.pages_leased == 6, "of what it asked for twice the last alone"
    assert rank.load(KEYS, 5, 6, 7)
    rank.links.reset()  # waits until the load's thread is done with it
    assert rank.store.pages_leased == 3
    assert not rank.links.cancel("other")
    assert rank.store.pages_leased == 0
    rank.close()


def test_trouble_claims_nothing_and_is_told() -> None:
    rank = Rank()
    rank.save(KEYS, 0, 1, 2)
    rank.store.fail["lookup"] = Unavailable("away")
    assert rank.links.lookup("r", KEYS) == []
    assert not rank.load(KEYS, 0, 1, 2)
    assert not rank.save(["d" * 64], 3)
    rank.close()


def test_a_pool_that_is_slow_again_and_again_does_not_hold_the_scheduler_up() -> None:
    rank = Rank()
    rank.save(KEYS, 0, 1, 2)
    rank.store.took_s = 2 * LATE_S
    assert [rank.links.lookup("r", KEYS) for _ in range(LATE_MAX)] == [[1, 2, 3]] * LATE_MAX
    asked_s = rank.store.clock.now_s()
    assert rank.links.lookup("r", KEYS) == []
    assert rank.store.clock.now_s() == asked_s, "nobody was asked"
    rank.close()


def test_after_a_reset_nothing_is_known_or_under_way() -> None:
    rank = Rank()
    rank.links.save(KEYS, tokens(0, 1, 2), lambda: None)
    rank.links.reset()
    assert rank.links.done == 0
    assert rank.links.lookup("r", KEYS) == [1, 2, 3]
    assert rank.save(KEYS, 0, 1, 2)
    assert rank.rows.totals["known_rows"] == 3
    rank.close()


def test_latents_are_one_buffer_a_layer_and_the_same_on_all_ranks() -> None:
    latents = MLATokenToKVPool(kv_buffer=[torch.zeros(TOKENS, 1, DIM)] * 2)
    assert DevicePages(buffers_of(latents), PAGE).page_bytes == 2 * PAGE * DIM * 4
    assert is_alike_on_ranks(latents)
    assert not is_alike_on_ranks(Rank().cache)


def test_caches_with_more_than_keys_and_values_are_refused() -> None:
    """Their sidecars would stay behind: KV would be restored, and read with another's scales."""
    indexed = DSATokenToKVPool(kv_buffer=[torch.zeros(TOKENS, 1, DIM)])
    scaled = Rank().cache
    scaled.k_scale_buffer = [torch.zeros(TOKENS)]
    for cache in (indexed, scaled, SimpleNamespace()):
        with pytest.raises(BadValue, match="storage backend"):
            buffers_of(cache)
    with pytest.raises(LayoutMismatch):
        DevicePages([[torch.zeros(HEADS, TOKENS, DIM).transpose(0, 1)]], PAGE)


@pytest.mark.parametrize("layout", ["hnd", "vectorized_5d"])
def test_caches_whose_rows_are_pages_are_refused(layout: str) -> None:
    """The numbers of tokens would be taken for those of pages, which are others or none."""
    cache = Rank().cache
    cache.kv_cache_layout = layout
    with pytest.raises(BadValue, match=f"kv_cache_layout: .*{layout}"):
        buffers_of(cache)
