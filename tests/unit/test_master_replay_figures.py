"""What a replay counts, on traces small enough to count by hand."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.request_trace import NO_PARENT, Trace, TraceRequest
from master.replay.figures import Figures, replay, unreachable_share
from master.replay.pool import Setting, VirtualPool

TOKENS = 100


def trace_of(*requests: tuple[float, int, tuple[int, ...]]) -> Trace:
    trace = Trace(TOKENS)
    for at_s, tokens, pages in requests:
        trace.add(TraceRequest(at_s, tokens, pages))
    return trace


def figures_of(trace: Trace, pages: int, **changed: float) -> Figures:
    return replay(trace, VirtualPool(msgspec.structs.replace(Setting(pages), **changed), TOKENS))


def test_hits_are_tokens_of_full_leading_pages() -> None:
    trace = trace_of((0.0, 250, (0, 1, 2)), (1.0, 350, (0, 1, 3, 4)), (2.0, 300, (0, 1, 3)))
    figures = figures_of(trace, 16)
    assert (figures.requests, figures.tokens, figures.page_touches) == (3, 900, 8)
    # Page 2 is partial and never stored; the second request hits 0 and 1, the third all three.
    assert figures.hit_ratio == pytest.approx(500 / 900)
    assert figures.hit_ratio_by_tier == {"dram": figures.hit_ratio}
    assert (figures.pages_stored, figures.pages_written_by_tier) == (3, {"dram": 3})
    assert (figures.evictions, figures.ghost_hits, figures.effective_ttl_s_by_tier) == (0, 0, {})


def test_what_left_and_came_back_is_counted_with_its_age() -> None:
    one, other = tuple(range(4)), tuple(range(10, 14))
    trace = trace_of((0.0, 400, one), (60.0, 400, other), (1000.0, 400, one))
    figures = figures_of(trace, 4)
    assert figures.hit_ratio == 0.0
    assert (figures.evictions, figures.ghost_hits, figures.pages_stored) == (8, 4, 12)
    # The first four were unused for 60 s, the others for 940 s.
    assert figures.effective_ttl_s_by_tier == {"dram": pytest.approx(500.0, abs=0.1)}


def test_what_a_drive_holds_is_told_by_tier() -> None:
    chains = [tuple(range(4 * n, 4 * n + 4)) for n in range(14)]
    again = [chains[0]] * 3
    trace = trace_of(*((10.0 * n, 400, each) for n, each in enumerate([*chains, *again])))
    setting = Setting(32, lease_ttl_s=1.0, nvme_pages=64, admission="all")
    figures = replay(trace, VirtualPool(setting, TOKENS))
    assert figures.hit_ratio_by_tier == pytest.approx({"dram": 4 / 68, "nvme": 8 / 68})
    assert (figures.evictions, figures.ghost_hits, figures.promotions) == (0, 0, 4)
    assert figures.copies_evicted == 56 + 4 - 32
    on_drive = figures.pages_written_by_tier["nvme"]
    assert figures.pages_written_by_tier == {"dram": 60, "nvme": on_drive}
    assert 28 <= on_drive <= 56
    assert figures.nvme_pages_per_s == pytest.approx(on_drive / 160.0)
    assert list(figures.effective_ttl_s_by_tier) == ["dram"]
    assert figures.unreachable_share == 0.0


def test_pages_that_expire_are_no_evictions() -> None:
    trace = trace_of((0.0, 200, (0, 1)), (100.0, 100, (5,)))
    figures = figures_of(trace, 16, page_ttl_s=50.0)
    assert (figures.evictions, figures.expirations) == (0, 2)


def test_prompts_without_a_full_page_and_chains_beyond_the_pool_do_no_harm() -> None:
    trace = trace_of((0.0, 50, (0,)), (1.0, 800, tuple(range(1, 9))), (2.0, 100, (20,)))
    figures = figures_of(trace, 4)
    assert figures.pages_refused == 4
    assert figures.page_touches == 9


def test_a_trace_always_gives_the_same_figures() -> None:
    chains = [tuple(range(n % 7 * 10, n % 7 * 10 + n % 5 + 1)) for n in range(300)]
    trace = trace_of(*((float(n), TOKENS * len(c), c) for n, c in enumerate(chains)))
    figures = figures_of(trace, 16)
    assert figures == figures_of(trace, 16)
    assert figures.evictions
    assert figures.unreachable_share == 0.0


def test_unreachable_are_pages_behind_a_missing_one() -> None:
    parents = {0: NO_PARENT, 1: 0, 2: 1, 3: 2, 10: NO_PARENT, 11: 10}
    assert unreachable_share([], parents) == 0.0
    assert unreachable_share([0, 1, 2, 3, 10], parents) == 0.0
    assert unreachable_share([3, 2, 0, 10], parents) == 0.5
    assert unreachable_share([11], parents) == 1.0
