"""More requests than a fleet can compute: the rest is refused at once, and nobody waits in vain."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest

from kvstore.request_trace import Trace, TraceRequest
from master.replay.engines import FleetShape
from master.replay.serving import Demand, replay_serving
from master.replay.serving_report import ServingReport, Slo, percentile

SEED = 1
SECONDS = 60.0
SLO = Slo(ttft_s=5.0, tpot_s=0.12)
SHAPE = FleetShape(
    2, 2, tokens_per_s=2000.0, step_s=0.05, capacity_tokens=200_000, pool_pages=2048, batch_max=16,
)  # fmt: skip
PER_S = 2 * 2000.0 / 3500
"""Prompts of 1000 to 6000 tokens that it computes."""


def trace_of(load: float) -> Trace:
    dice, trace, at_s, pages = Random(SEED), Trace(), 0.0, 0
    while (at_s := at_s + dice.expovariate(load * PER_S)) < SECONDS:
        tokens = dice.randint(1000, 6000)
        last = pages + -(-tokens // trace.page_tokens)
        trace.add(TraceRequest(at_s, tokens, tuple(range(pages, last)), dice.randint(20, 60)))
        pages = last
    return trace


def ttfts(report: ServingReport) -> list[float]:
    return [each.ttft_s for each in report.served if each.ttft_s < inf]


@pytest.mark.parametrize("load", [1.0, 2.0, 4.0])
def test_overload_is_refused_early_and_what_is_admitted_is_served(load: float) -> None:
    report = replay_serving(Demand(trace_of(load), SLO), SHAPE)
    story = SEED, load, report.throttled(), report.failed(), report.good(SLO)
    assert set(report.failed()) <= {"throttled"}, story  # nobody who was admitted starves
    assert set(report.throttled()) <= {"ttft"}, story
    assert percentile(ttfts(report), 0.99) <= 1.2 * SLO.ttft_s, story
    # Of what the fleet can compute in that time, at least four fifths are in time.
    assert report.good(SLO) >= 0.8 * min(SECONDS * PER_S, len(report.served)), story
    if load > 1:
        # The longest prompts are refused no more often than all are.
        long = [each for each in report.served if each.request.tokens > 5000]
        refused = sum(each.failure == "throttled" for each in long)
        assert refused / len(long) <= report.failed()["throttled"] / len(report.served) + 0.15, (
            story
        )


def test_without_that_all_are_late() -> None:
    endless = Slo(ttft_s=1e6)
    report = replay_serving(Demand(trace_of(4.0), endless), SHAPE)
    assert report.good(SLO) < 0.2 * SECONDS * PER_S, (SEED, report.good(SLO))


def test_a_speed_that_is_less_than_said_is_made_up_for() -> None:
    # Between two chunks of 64 tokens, 0.032 s, there is a step of 0.05 s of what runs.
    shape = msgspec.structs.replace(SHAPE, prefills=0, decodes=0, both=2, chunk_tokens=64)
    demand = Demand(trace_of(2.0), SLO)
    loose = replay_serving(demand, shape, {"colocation": "never", "first_token_over": 1e9})
    tight = replay_serving(demand, shape, {"colocation": "never"})
    story = SEED, percentile(ttfts(loose), 0.9), percentile(ttfts(tight), 0.9), tight.counters
    assert tight.counters["admission_tightened"] >= 3, story
    assert percentile(ttfts(tight), 0.9) < percentile(ttfts(loose), 0.9), story
    assert tight.good(SLO) > loose.good(SLO), story
