"""What every eviction policy must do, and what the simple ones order by."""

from __future__ import annotations

import pytest

from kvstore.hints import NO_HINTS
from policies import registry
from policies.eviction.lru import Lru
from policies.eviction.s3_fifo import S3Fifo, S3FifoParameters
from policies.eviction.ttl_lfu import TtlLfu
from tests.unit.policy_entries import Pages, chain, evict, put

each_policy = pytest.mark.parametrize("name", registry.EVICTION)


@each_policy
def test_uses_are_counted_alike(name: str) -> None:
    policy = registry.eviction(name)
    entry = put(policy, 100.0)
    assert (entry.touches, entry.touched_s) == (1, 100.0)
    policy.touched(entry, 100.5, NO_HINTS)
    assert (entry.touches, entry.touched_s) == (1, 100.0)
    policy.touched(entry, 200.0, NO_HINTS)
    assert (entry.touches, entry.touched_s) == (2, 200.0)


@pytest.mark.parametrize("name", sorted(registry.EVICTION.keys() - {"rent"}))  # it learns ages
def test_of_two_equal_runs_the_one_used_later_stays(name: str) -> None:
    policy = registry.eviction(name)
    policy.resize(100)
    old, new = put(policy, 1000.0, "old", pages=20), put(policy, 1100.0, "new", pages=20)
    assert policy.score(old, 1200.0) < policy.score(new, 1200.0)


@each_policy
def test_nobody_is_spared_for_ever(name: str) -> None:
    policy = registry.eviction(name)
    policy.resize(100)
    entry = put(policy, 0.0, pages=20)
    for use in range(1, 50):
        policy.touched(entry, 20.0 * use, NO_HINTS)
    spared = 0
    while policy.spares(entry, 1000.0):
        spared += 1
        assert spared < 10


def test_lru_knows_the_time_of_the_last_access() -> None:
    policy = Lru()
    often = put(policy, 0.0)
    for at in range(1, 9):
        policy.touched(often, float(at), NO_HINTS)
    assert policy.score(often, 99.0) == 8.0
    assert policy.score(put(policy, 9.0), 99.0) == 9.0


def test_ttl_lfu_orders_by_uses_until_the_ttl_is_over() -> None:
    policy = TtlLfu()
    twice, once = put(policy, 0.0, "twice"), put(policy, 200.0, "once")
    policy.touched(twice, 50.0, NO_HINTS)
    assert policy.score(twice, 300.0) > policy.score(once, 300.0)
    assert policy.score(twice, 350.0) < policy.score(once, 350.0)
    evict(policy, twice, 350.0)
    assert put(policy, 400.0, "twice").touches == 3


def full_small_queue() -> tuple[S3Fifo, Pages, Pages]:
    """A pool of 100 pages: an old run of the main queue, and a new one of 20 in the small queue."""
    policy = S3Fifo()
    policy.resize(100)
    main = put(policy, 0.0, "main", pages=20)
    evict(policy, main, 1.0)
    return policy, put(policy, 20.0, "main", pages=20), put(policy, 90.0, "small", pages=20)


def test_s3_fifo_takes_from_the_small_queue_while_it_is_long() -> None:
    policy, main, small = full_small_queue()
    assert policy.score(small, 100.0) < policy.score(main, 100.0)
    policy.resize(1000)
    assert policy.score(small, 100.0) > policy.score(main, 100.0)


def test_s3_fifo_moves_what_was_used_to_the_main_queue() -> None:
    policy, main, small = full_small_queue()
    policy.touched(small, 110.0, NO_HINTS)
    assert not policy.spares(small, 115.0)
    policy.touched(small, 120.0, NO_HINTS)
    assert policy.spares(small, 130.0)
    assert not policy.spares(small, 130.0)
    assert policy.score(main, 130.0) < policy.score(small, 130.0)


def test_s3_fifo_gives_the_main_queue_one_chance_a_use() -> None:
    policy, main, _ = full_small_queue()
    for use in range(5):
        policy.touched(main, 40.0 + 20 * use, NO_HINTS)
    assert [policy.spares(main, 200.0) for _ in range(4)] == [True, True, True, False]
    assert main.heat == 200.0


def test_s3_fifo_finds_its_count_again_when_pages_left_unnoticed() -> None:
    policy, main, small = full_small_queue()
    assert policy.score(small, 100.0) < policy.score(main, 100.0)  # but it has expired meanwhile
    policy.evicted(main, chain("main", 12), 100.0)
    late = put(policy, 120.0, "late")
    assert policy.score(main, 120.0) < policy.score(late, 120.0)


def test_s3_fifo_promotes_at_the_first_use_where_told() -> None:
    policy = S3Fifo()
    policy.parameters = S3FifoParameters(promote_uses=1)
    entry = put(policy, 0.0)
    policy.touched(entry, 20.0, NO_HINTS)
    assert policy.spares(entry, 30.0)
