"""The page-by-page pool: it does what its policy says, tails first, the running request's safe."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from benchmarks.exact import ExactPool, exact_hit_ratio
from benchmarks.optimum import session_hints
from benchmarks.sessions import chat_trace
from master.replay.figures import replay
from master.replay.pool import Setting, VirtualPool
from policies import registry
from policies.eviction.lru import Lru

if TYPE_CHECKING:
    from kvstore.request_trace import Trace
    from policies.eviction.protocol import Entry


def serve(pool: ExactPool, *chains: tuple[int, ...]) -> list[int]:
    return [pool.serve(chain, float(at_s)) for at_s, chain in enumerate(chains)]


def test_the_oldest_tail_goes_first() -> None:
    pool = ExactPool(4, Lru())
    assert serve(pool, (0, 1, 2), (10,), (20,), (0, 1, 2), (0, 1)) == [0, 0, 0, 2, 2]
    assert pool.evictions == 2


def test_the_pages_of_the_running_request_are_safe() -> None:
    pool = ExactPool(3, Lru())
    assert serve(pool, (0, 1), (10,), (0, 1, 2), (0, 1, 2)) == [0, 0, 2, 3]


def test_a_chain_beyond_the_capacity_is_kept_as_far_as_it_goes() -> None:
    pool = ExactPool(2, Lru())
    assert serve(pool, (0, 1, 2), (0, 1, 2), (0,), (5, 6, 7)) == [0, 2, 1, 0]


class Fickle(Lru):
    """Least recently used until 10 s, most recently used from then on."""

    def score(self, entry: Entry, now_s: float) -> float:
        return entry.heat if now_s < 10.0 else -entry.heat


def test_scores_are_those_of_the_moment() -> None:
    pool = ExactPool(2, Fickle())
    assert serve(pool, (0,), (1,), (2,), (1,)) == [0, 0, 0, 1]
    assert pool.serve((3,), 10.0) == 0  # the more recently used 1 goes
    assert pool.serve((2,), 11.0) == 1


class Sparing(Lru):
    """Moves page 0 to the end of the order once."""

    def spares(self, entry: Entry, now_s: float) -> bool:
        if entry.touched_s or entry.heat:
            return False
        entry.heat = now_s + 0.5
        return True


def test_a_spared_page_stays() -> None:
    pool = ExactPool(2, Sparing())
    assert serve(pool, (0,), (1,), (2,), (0,)) == [0, 0, 0, 1]


def lru_hit_ratio(trace: Trace, capacity: int) -> float:
    """The same by an ordered dict, tails noted before heads."""
    held: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for request in trace.requests:
        chain = trace.full_pages(request)
        hits = next((i for i, page in enumerate(chain) if page not in held), len(chain))
        hit_tokens += hits * trace.page_tokens
        for page in reversed(chain):
            held[page] = None
            held.move_to_end(page)
        while len(held) > capacity:
            held.popitem(last=False)
    return hit_tokens / trace.tokens


@pytest.mark.parametrize("pages", [500, 2000])
def test_lru_is_what_an_ordered_dict_gives(pages: int) -> None:
    trace = chat_trace(1, 600.0, 1.0)
    assert exact_hit_ratio(trace, pages, Lru()) == pytest.approx(lru_hit_ratio(trace, pages))


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_the_pool_itself_is_near(policy: str) -> None:
    trace = chat_trace(1, 300.0, 1.5)
    exact = exact_hit_ratio(trace, 1000, registry.eviction(policy))
    deployed = replay(trace, VirtualPool(Setting(1000, policy), trace.page_tokens))
    assert deployed.evictions > 1000
    assert deployed.hit_ratio == pytest.approx(exact, abs=0.01)


def test_hints_reach_the_policy() -> None:
    trace = chat_trace(1, 600.0, 1.5)
    hints = session_hints(trace, 1.0, seed=1)
    blind = exact_hit_ratio(trace, 1000, registry.eviction("lrfu"))
    assert exact_hit_ratio(trace, 1000, registry.eviction("lrfu"), hints=hints) > blind
