"""The offline optimum: right by hand, and never below what an online policy reaches."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.exact import exact_hit_ratio
from benchmarks.optimum import offline_optimum, session_ends, session_hints
from benchmarks.sessions import chat_trace
from kvstore.request_trace import Trace, TraceRequest
from policies.eviction.lru import Lru

TOKENS = 10


def trace_of(*chains: tuple[int, ...]) -> Trace:
    trace = Trace(TOKENS)
    for at_s, chain in enumerate(chains):
        trace.add(TraceRequest(float(at_s), TOKENS * len(chain), chain))
    return trace


def best_by_trying(chains: list[tuple[int, ...]], capacity: int) -> int:
    """Most hits, over every choice of which prefixes are held after each request."""
    reached = {frozenset[int](): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            hit = next((i for i, page in enumerate(chain) if page not in held), len(chain))
            pool = sorted(held | set(chain))
            for count in range(min(capacity, len(pool)) + 1):
                for kept in map(frozenset, combinations(pool, count)):
                    after[kept] = max(after.get(kept, 0), hits + hit)
        reached = after
    return max(reached.values())


def test_what_is_used_soonest_stays() -> None:
    trace = trace_of((0,), (1,), (0,), (1,), (0,))
    # With one page: 0 stays through the single uses of 1.
    assert offline_optimum(trace, 1) == pytest.approx(2 / 5)
    assert offline_optimum(trace, 2) == pytest.approx(3 / 5)
    assert exact_hit_ratio(trace, 1, Lru()) == 0.0


def test_a_page_counts_with_all_before_it_only() -> None:
    trace = trace_of((0, 1, 2), (0, 3), (0, 1, 2))
    assert offline_optimum(trace, 3) == pytest.approx((1 + 3) / 8)
    assert offline_optimum(trace, 2) == pytest.approx((1 + 2) / 8)


def test_partial_pages_count_where_wanted() -> None:
    trace = Trace(TOKENS)
    for at_s in (0.0, 1.0):
        trace.add(TraceRequest(at_s, 15, (0, 1)))
    assert offline_optimum(trace, 8) == pytest.approx(10 / 30)
    assert offline_optimum(trace, 8, partial=True) == pytest.approx(15 / 30)


# Node n of a small tree has the chain of its ancestors: 0 -> 1, 2; 1 -> 3, 4; and another root 5.
CHAINS = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4), (5,))


@given(st.lists(st.sampled_from(CHAINS), min_size=1, max_size=7), st.integers(1, 3))
def test_no_choice_of_what_to_keep_is_better(chains: list[tuple[int, ...]], capacity: int) -> None:
    hits = offline_optimum(trace_of(*chains), capacity) * sum(map(len, chains))
    assert round(hits) == best_by_trying(chains, capacity)


def test_no_policy_is_better_on_chats() -> None:
    trace = chat_trace(random.Random(3).randrange(100), 600.0, 1.0)
    for pages in (100, 1000, 3000):
        assert offline_optimum(trace, pages) >= exact_hit_ratio(trace, pages, Lru())
    assert offline_optimum(trace, 1 << 30) == pytest.approx(exact_hit_ratio(trace, 1 << 30, Lru()))


def test_hints_say_whether_half_of_the_pages_come_back_as_often_rightly_as_asked() -> None:
    trace = trace_of((0, 1, 2), (0, 1, 3), (0, 4, 5), ())
    chances = [hint.reuse_probability for hint in session_hints(trace, 1.0, seed=1)]
    assert chances == [1.0, 0.0, 0.0, None]
    ends = [hint.session_closed for hint in session_ends(trace, 1.0, seed=1)]
    assert ends == [False, True, True, False]
    trace = chat_trace(1, 600.0, 1.0)
    true, drawn = session_hints(trace, 1.0, seed=1), session_hints(trace, 0.8, seed=1)
    pairs = [
        (bool(a.reuse_probability), b.reuse_probability)
        for a, b in zip(true, drawn, strict=True)
        if a.reuse_probability is not None
    ]
    rightly = sum((chance == 0.8) == comes_back for comes_back, chance in pairs) / len(pairs)
    assert rightly == pytest.approx(0.8, abs=0.04)
