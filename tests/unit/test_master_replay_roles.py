"""Long prompts, then long answers: with roles that follow, more is served in time than with any
that stay.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from kvstore.request_trace import Trace, TraceRequest
from master import decode_places
from master.replay.engines import FleetShape
from master.replay.serving import Demand, replay_serving
from master.replay.serving_report import Slo

if TYPE_CHECKING:
    import pytest

SEED = 1
PHASE_S = 100.0
PHASES = 2
SLO = Slo(ttft_s=5.0, tpot_s=0.12)


def bursty(load: float = 1.0) -> Trace:
    dice, trace, at_s, pages = Random(SEED), Trace(), 0.0, 0
    while at_s < PHASES * PHASE_S:
        is_long = int(at_s // PHASE_S) % 2 == 0
        at_s += dice.expovariate(load * (1.0 if is_long else 2.0))
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
    assert report.good(SLO) > 1.03 * max(fixed.values()), story
    assert set(report.failed()) <= {"throttled"}, story
    assert report.failed().total() <= 0.05 * len(report.served), story
    # Two of three go one way and come back, and more; never back and forth within a phase.
    roles = [each.role for each in report.switches]
    assert {"prefill", "decode"} == set(roles), story
    assert sum(one != other for one, other in pairwise(roles)) == PHASES - 1, story
    gaps = [later.at_s - each.at_s for each, later in pairwise(report.switches)]
    assert min(gaps) >= 30.0, story


def test_no_prompt_is_computed_that_finds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers cannot generate what four have computed of the short prompts."""
    demand = Demand(bursty(1.3), SLO)
    fixed, roles = (replay_serving(demand, each) for each in (shape(4), shape(3, switches=True)))
    story = SEED, fixed.good(SLO), roles.good(SLO), fixed.failed(), roles.failed()
    for report in (fixed, roles):
        assert set(report.failed()) == {"throttled"}, story
        assert report.throttled()["decode_occupancy"] > 0, story
    monkeypatch.setattr(decode_places, "excess_s", lambda *_: 0.0)
    blind = replay_serving(demand, shape(4)), replay_serving(demand, shape(3, switches=True))
    before = blind[0].good(SLO), blind[1].good(SLO), blind[0].failed()
    assert blind[0].failed()["unknown_ticket"] > 0.1 * len(blind[0].served), before
    assert fixed.good(SLO) > 1.5 * blind[0].good(SLO), (story, before)
    assert roles.good(SLO) > 1.5 * blind[1].good(SLO), (story, before)
