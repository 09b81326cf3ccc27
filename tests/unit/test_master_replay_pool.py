"""The pool of a replay: exactly so many pages, the running request's own are safe, time moves."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.errors import BadValue, CallerError, ConfigError
from kvstore.hints import Hints
from master.replay.pool import PUT_WAIT_S, Setting, VirtualPool
from policies.eviction.lrfu import LrfuParameters

TOKENS = 512


def pool_of(pages: int, **changed: float) -> VirtualPool:
    return VirtualPool(msgspec.structs.replace(Setting(pages), **changed), TOKENS)


def serve(pool: VirtualPool, pages: list[int]) -> int:
    """A request; its hits. Whatever is missing is stored."""
    hits = pool.match(pages).total()
    if hits < len(pages):
        stored = pool.put(pages[hits:], pages[hits - 1] if hits else None)
        assert stored == len(pages) - hits
    pool.master.check_invariants()
    return hits


def left(pool: VirtualPool) -> list[int]:
    """Pages of the copies that left, in order."""
    return [page for _, page in pool.freed]


def test_every_page_up_to_the_capacity_is_held_and_not_one_more() -> None:
    pool = pool_of(100)
    serve(pool, list(range(60)))
    serve(pool, list(range(100, 140)))
    assert len(pool.held["dram"]) == 100
    assert not pool.freed
    pool.advance(1.0)
    serve(pool, list(range(200, 203)))
    assert len(pool.held["dram"]) == 100
    assert len(pool.freed) == 3
    assert sorted(pool.held["dram"].values()) == sorted(
        {*range(60), *range(100, 140), *range(200, 203)}.difference(left(pool))
    )


def test_tails_of_the_oldest_go_and_what_the_running_request_has_stays() -> None:
    pool = pool_of(16)
    serve(pool, list(range(8)))
    pool.advance(1000.0)
    serve(pool, list(range(20, 28)))
    pool.advance(1001.0)
    assert serve(pool, [*range(20, 28), 28, 29, 30]) == 8
    assert sorted(left(pool)) == [5, 6, 7]
    assert pool.match(range(20, 31)).total() == 11
    assert pool.match(range(8)) == {"dram": 5}


def test_a_chain_longer_than_the_pool_is_stored_as_far_as_it_goes() -> None:
    pool = pool_of(16)
    assert pool.put(range(40), None) == 16
    assert len(pool.held["dram"]) == 16
    assert pool.match(range(40)).total() <= 16
    assert pool.now_s >= PUT_WAIT_S


def test_a_leased_page_stays_until_its_lease_has_ended() -> None:
    pool = pool_of(16, lease_ttl_s=5.0)
    serve(pool, list(range(16)))
    pool.match(range(16))
    assert pool.put([100], None) == 0
    pool.advance(6.0)
    assert pool.put([100], None) == 1
    assert left(pool) == [15]


def test_pages_that_nobody_uses_go_after_their_ttl() -> None:
    pool = pool_of(16, page_ttl_s=60.0)
    serve(pool, [0, 1])
    pool.advance(59.0)
    serve(pool, [0])
    pool.advance(70.0)
    assert left(pool) == [1]
    pool.advance(130.0)
    assert left(pool) == [1, 0]


def test_lower_watermarks_keep_room_free() -> None:
    pool = pool_of(100, watermark_high=0.9, watermark_low=0.8, watermark_demote=0.7)
    serve(pool, list(range(95)))
    pool.advance(1.0)
    assert len(pool.held["dram"]) == 80


def test_two_chains_share_what_is_equal() -> None:
    pool = pool_of(16)
    serve(pool, [0, 1, 2])
    assert serve(pool, [0, 1, 3]) == 2
    assert sorted(pool.held["dram"].values()) == [0, 1, 2, 3]
    assert pool.written == {"dram": 4}


def test_every_worker_holds_so_much() -> None:
    pool = VirtualPool(Setting(16, workers=3), TOKENS, {"replicas": 1})
    assert pool.put(range(48), None) == 48
    assert {segment: len(pages) for segment, pages in pool.held.items()} == {
        "dram": 16, "dram-1": 16, "dram-2": 16,
    }  # fmt: skip
    assert pool.match(range(48)) == {"dram": 48}
    assert {s.host for s in pool.master.core.segments.values()} == {"host-0", "host-1", "host-2"}


def test_pages_are_copied_from_worker_to_worker() -> None:
    setting = Setting(64, workers=2, watermark_high=0.9, watermark_low=0.8, move_s=0.1)
    pool = VirtualPool(setting, TOKENS, {"replicas": 2})
    pool.put(range(16), None)
    pool.advance(pool.now_s + 2.0)
    assert [sorted(pages.values()) for pages in pool.held.values()] == [list(range(16))] * 2


def test_an_engine_is_on_the_host_of_a_worker() -> None:
    pool = VirtualPool(Setting(64, workers=2), TOKENS, {"placement": "local_first"})
    engine = pool.engine(1)
    assert pool.engine(1) == engine
    pool.put(range(16), None, writer=engine)
    assert len(pool.held["dram-1"]) == 16
    found = list(pool.located(range(20), reader=engine))
    assert [run.count for located in found for run in located.runs] == [16]
    assert pool.master.core.sessions[engine].host == "host-1"


def tiered(**changed: float | str) -> VirtualPool:
    """A pool with a drive that takes everything, and leases."""
    setting = Setting(32, lease_ttl_s=1.0, nvme_pages=64, admission="all")
    return VirtualPool(msgspec.structs.replace(setting, **changed), TOKENS)


def serve_chains(pool: VirtualPool, chains: range) -> None:
    """Requests of four pages, ten seconds apart; the n-th begins at page 4 n."""
    for number in chains:
        serve(pool, list(range(4 * number, 4 * number + 4)))
        pool.advance(pool.now_s + 10.0)


def test_what_memory_has_no_room_for_lies_on_the_drive() -> None:
    pool = tiered()
    serve_chains(pool, range(14))
    assert len(pool.held["dram"]) == 32
    assert len(pool.held["nvme"]) >= 56 - 32
    assert all(pool.holds(page) for page in range(56))
    assert pool.match(range(4)) == {"nvme": 4}
    assert pool.written == {"dram": 56, "nvme": len(pool.held["nvme"])}


def test_an_empty_drive_takes_by_default_what_memory_has_no_room_for() -> None:
    pool = tiered(admission=Setting(4).admission)
    serve_chains(pool, range(14))
    assert all(pool.holds(page) for page in range(56))


def test_of_both_tiers_together_no_more_stays_than_they_hold() -> None:
    pool = tiered()
    serve_chains(pool, range(60))
    assert len(pool.held["dram"]) <= 32
    assert 56 <= len(pool.held["nvme"]) <= 64
    assert any(tier == "nvme" for tier, _ in pool.freed)
    assert not pool.holds(0)


def test_pages_are_brought_up_when_they_are_leased_a_second_time() -> None:
    pool = tiered()
    serve_chains(pool, range(14))
    for tier in ("nvme", "nvme", "dram"):
        assert pool.match(range(4)) == {tier: 4}
        pool.advance(pool.now_s + 10.0)
    assert pool.match(range(4)) == {"dram": 4}
    pool.master.check_invariants()


def test_a_move_takes_its_time_and_pages_that_it_is_late_for_are_lost() -> None:
    pool, late = tiered(), tiered(move_s=1.0)
    for each in (pool, late):
        for number in range(14):
            serve(each, list(range(4 * number, 4 * number + 4)))
            each.advance(each.now_s + 0.2)
        each.advance(each.now_s + 5.0)
        each.master.check_invariants()
    assert all(map(pool.holds, range(56)))
    assert 32 < sum(map(late.holds, range(56))) < 56


def test_hints_of_a_request_reach_the_policy_of_the_drive() -> None:
    pool = tiered(admission="learned:probability=0.5")
    for number in range(20):
        hints = Hints(reuse_probability=0.9 if number % 2 else 0.1)
        assert pool.put(range(4 * number, 4 * number + 4), None, hints) == 4
        pool.advance(pool.now_s + 10.0)
    assert {page // 4 % 2 for page in pool.held["nvme"].values()} == {1}


@pytest.mark.parametrize("changed", [{"nvme_pages": 6}, {"nvme_pages": -4}, {"move_s": 2.0}])
def test_a_drive_that_cannot_be_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(BadValue, match=next(iter(changed))):
        tiered(**changed)


@pytest.mark.parametrize("pages", [0, -4, 3, 1001])
def test_a_capacity_that_no_segment_has_is_refused(pages: int) -> None:
    with pytest.raises(BadValue, match="capacity_pages"):
        pool_of(pages)


@pytest.mark.parametrize("changed", [{"lease_ttl_s": -1.0}, {"watermark_low": 1.0}])
def test_tunables_out_of_bounds_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        pool_of(16, **changed)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), 1e9])
def test_a_ttl_out_of_bounds_is_refused(ttl_s: float) -> None:
    with pytest.raises(BadValue, match="page_ttl_s"):
        pool_of(16, page_ttl_s=ttl_s)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(BadValue, match="nonsense"):
        VirtualPool(Setting(16, "nonsense"), TOKENS)


def test_parameters_of_a_policy_are_written_behind_its_name() -> None:
    pool = VirtualPool(Setting(16, "lrfu:half_life_s=60:ghost_factor=8"), TOKENS)
    policy = pool.master.core.eviction.policy
    assert policy.parameters == LrfuParameters(half_life_s=60, ghost_factor=8)


@pytest.mark.parametrize(
    ("policy", "named"),
    [("lrfu:half_life_s", "policy"), ("lrfu:half=1", "half"), ("lrfu:half_life_s=-1", "half_life")],
)
def test_a_parameter_that_does_not_exist_or_fit_is_refused(policy: str, named: str) -> None:
    with pytest.raises(CallerError, match=named):
        VirtualPool(Setting(16, policy), TOKENS)
