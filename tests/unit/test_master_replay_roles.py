"""Long prompts, then long answers: with roles that follow, more is served in time than with any
that stay.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from kvstore.request_trace import Trace, TraceRequest
from master.replay.engines import FleetShape
from master.replay.serving import Demand, replay_serving
from master.replay.serving_report import Slo

SEED = 1
PHASE_S = 100.0
PHASES = 2
SLO = Slo(ttft_s=5.0, tpot_s=0.12)


def bursty() -> Trace:
    dice, trace, at_s, pages = Random(SEED), Trace(), 0.0, 0
    while at_s < PHASES * PHASE_S:
        is_long = int(at_s // PHASE_S) % 2 == 0
        at_s += dice.expovariate(1.0 if is_long else 2.0)
        tokens = dice.randint(5000, 7000) if is_long else dice.randint(200, 400)
        new_tokens = dice.randint(10, 30) if is_long else dice.randint(180, 240)
        last = pages + -(-tokens // trace.page_tokens)
        trace.add(TraceRequest(at_s, tokens, tuple(range(pages, last)), new_tokens))
        pages = last
    return trace


def shape(prefills: int, *, switches: bool = False) -> FleetShape:
    return FleetShape(
        prefills, 6 - prefills, tokens_per_s=2000.0, step_s=0.05, capacity_tokens=100_000,
        pool_pages=1024, batch_max=8, switches=switches,
    )  # fmt: skip


def test_roles_that_follow_serve_more_than_any_that_stay() -> None:
    demand = Demand(bursty(), SLO)
    fixed = {split: replay_serving(demand, shape(split)).good(SLO) for split in (2, 3, 4)}
    report = replay_serving(demand, shape(3, switches=True))
    story = SEED, fixed, report.good(SLO), report.switches
    assert report.good(SLO) > 1.05 * max(fixed.values()), story
    assert set(report.failed()) <= {"throttled"}, story
    assert report.failed().total() <= 0.03 * len(report.served), story
    # Two of three go one way and come back, and more; never back and forth within a phase.
    roles = [each.role for each in report.switches]
    assert {"prefill", "decode"} == set(roles), story
    assert sum(one != other for one, other in pairwise(roles)) == PHASES - 1, story
    gaps = [later.at_s - each.at_s for each, later in pairwise(report.switches)]
    assert min(gaps) >= 30.0, story
