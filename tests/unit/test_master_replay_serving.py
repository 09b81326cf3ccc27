"""What modelled workers make of requests, on fleets slow enough to count by hand."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from kvstore.request_trace import Trace, TraceRequest
from master.replay.engines import FleetShape
from master.replay.serving import Demand, replay_serving
from master.replay.serving_report import Served, ServingReport, Slo, percentile

PAGE = 100
PAIR = FleetShape(
    1, 1, tokens_per_s=1000.0, chunk_tokens=100, step_s=0.02, capacity_tokens=10_000,
    pool_pages=64, token_bytes=1000, link_bytes_per_s=1e6, rtt_s=0.0,
)  # fmt: skip
"""A prompt of 100 tokens: 0.1 s to compute, 0.1 s to pull."""
LONE = msgspec.structs.replace(PAIR, prefills=0, decodes=0, both=1)
ALONE = {"colocation": "always"}


def trace_of(*requests: tuple[float, int, tuple[int, ...], int]) -> Trace:
    trace = Trace(PAGE)
    for request in requests:
        trace.add(TraceRequest(*request))
    return trace


def moments(served: Served) -> tuple[float, float]:
    return round(served.first_s, 6), round(served.done_s, 6)


def served_by(
    shape: FleetShape, *requests: tuple[float, int, tuple[int, ...], int], **changed: object
) -> ServingReport:
    return replay_serving(Demand(trace_of(*requests)), shape, changed)


def test_a_prompt_is_computed_pulled_and_gone_on_with_in_steps() -> None:
    (served,) = served_by(PAIR, (1.0, 250, (0, 1, 2), 11)).served
    # 0.25 s of prefill; 251 tokens over the link; ten more tokens.
    assert moments(served) == (1.25, 1.701)
    assert served.ttft_s == pytest.approx(0.25)
    assert served.tpot_s == pytest.approx(0.0451)
    assert (served.routes, served.moved_bytes, served.alone) == (1, 251_000, "")


def test_what_the_pool_has_is_not_computed_again() -> None:
    requests = (0.0, 250, (0, 1, 2), 1), (10.0, 250, (0, 1, 3), 1)
    again = served_by(PAIR, *requests).served[1]
    assert again.reused_tokens == 200
    assert again.ttft_s == pytest.approx(0.05)
    assert again.done_s == again.first_s  # one token: nobody goes on
    report = replay_serving(Demand(trace_of(*requests), reuse=False), PAIR)
    assert [each.reused_tokens for each in report.served] == [0, 0]
    assert report.served[1].ttft_s == pytest.approx(0.25)


def test_a_prefix_on_another_host_is_pulled_first() -> None:
    two = msgspec.structs.replace(PAIR, prefills=2)
    requests = (
        (0.0, 250, (0, 1, 2), 1),
        (1.1, 1000, tuple(range(10, 20)), 1),
        (1.2, 250, (0, 1, 3), 1),
    )
    last = served_by(two, *requests, prefill_routing="least_queued").served[2]
    # The first worker is busy until 2.1: the other one pulls 0.2 s and computes 0.05 s.
    assert last.ttft_s == pytest.approx(0.25)
    assert last.moved_bytes == 200_000


def test_layers_are_pulled_while_they_are_computed() -> None:
    shape = msgspec.structs.replace(PAIR, layerwise=True)
    (served,) = served_by(shape, (0.0, 250, (0, 1, 2), 11)).served
    assert moments(served) == (0.25, 0.451)


def test_hand_overs_take_turns_at_a_port() -> None:
    two = msgspec.structs.replace(PAIR, prefills=2)
    one, other = served_by(two, (0.0, 100, (0,), 2), (0.0, 100, (1,), 2)).served
    # Both are computed at 0.1 and have 101 tokens to move to the one decode worker.
    assert sorted([one.done_s, other.done_s]) == pytest.approx([0.1 + 0.101 + 0.02, 0.302 + 0.02])


def test_steps_take_longer_with_each_answer_and_each_token_that_is_read() -> None:
    shape = msgspec.structs.replace(LONE, step_row_s=0.01, step_token_s=0.0001)
    (served,) = served_by(shape, (0.0, 100, (0,), 3), **ALONE).served
    # Two steps of 0.02 + 0.01, reading 101 and 102 tokens.
    assert moments(served) == (0.1, 0.1803)


def test_a_worker_of_both_roles_computes_chunks_between_steps() -> None:
    one, other = served_by(LONE, (0.0, 100, (0,), 4), (0.11, 200, (1, 2), 2), **ALONE).served
    # A step from 0.1 on; then a chunk and a step, twice; then one step of the other's.
    assert moments(one) == (0.1, 0.36)
    assert moments(other) == (0.36, 0.38)
    assert (one.alone, one.routes, one.moved_bytes) == ("always", 0, 0)


def test_who_is_throttled_comes_again_while_patient() -> None:
    small = msgspec.structs.replace(PAIR, capacity_tokens=150)
    requests = (5.0, 100, (0,), 2), (5.0, 100, (1,), 2)
    report = served_by(small, *requests)
    assert (report.failed(), report.throttled()) == ({"throttled": 1}, {"decode_occupancy": 1})
    assert (report.served[1].first_s, report.served[1].tpot_s) == (inf, inf)
    report = replay_serving(Demand(trace_of(*requests), patience_s=5.0), small)
    assert report.failed() == {}
    assert {each.reason for each in report.served[1].throttles} == {"decode_occupancy"}
    # The credit of the first is free again at 5.221; the second is asked for soon after.
    assert 5.221 < report.served[1].first_s < 7.0


def test_what_never_fits_is_said_so() -> None:
    report = served_by(PAIR, (5.0, 10_000, tuple(range(100)), 2), staging_bytes=10**6)
    assert report.failed() == {"bad_value": 1}
    assert report.served[0].ttft_s == inf


def test_pages_that_found_no_room_are_computed_again_by_who_goes_on() -> None:
    shape = msgspec.structs.replace(PAIR, pool_pages=4)
    (served,) = served_by(
        shape, (0.0, 1000, tuple(range(10)), 2), staging_bytes=10**6
    ).served  # fmt: skip
    # Of eight pages four lie there already; four and a token are pulled, two are computed,
    # one step. The put gave up after the 0.05 s to which waits are rounded.
    assert served.first_s == pytest.approx(1.0, abs=0.051)
    assert served.done_s - served.first_s == pytest.approx(0.401 + 0.2 + 0.02, abs=0.01)


def test_what_no_decode_worker_has_room_for_is_asked_for_later() -> None:
    # There is credit for the third, but no worker has so much of it.
    shape = msgspec.structs.replace(PAIR, decodes=2, capacity_tokens=1000)
    requests = [(0.0, 100, (page,), new_tokens) for page, new_tokens in enumerate((460, 460, 380))]
    demand = Demand(trace_of(*requests), patience_s=60.0)
    report = replay_serving(demand, shape, {"staging_s": 2.0})
    assert [each.failure for each in report.served] == ["", "", ""]
    assert {each.reason for each in report.served[2].throttles} == {"decode_occupancy"}
    assert "tickets_expired" not in report.counters


def test_what_finds_no_place_in_a_batch_in_time_is_asked_for_later() -> None:
    shape = msgspec.structs.replace(PAIR, batch_max=1)
    requests = (0.0, 100, (0,), 1000), (0.0, 100, (1,), 2)
    report = replay_serving(Demand(trace_of(*requests), patience_s=60.0), shape)
    assert report.failed() == {}
    assert {each.reason for each in report.served[1].throttles} == {"decode_occupancy"}
    one, other = report.served
    assert other.tpot_s < 1.0  # its prompt was computed when its turn was near
    assert one.done_s < other.done_s < one.done_s + 10


def test_a_report_counts_who_was_in_time() -> None:
    report = served_by(PAIR, (0.0, 250, (0, 1, 2), 11), (1.0, 100, (3,), 2))
    assert [report.good(Slo(0.25, 0.05)), report.good(Slo(0.2, 0.2))] == [1, 1]
    assert report.good(Slo(1.0, 0.2)) == 2
    assert report.goodput_per_s(Slo(1.0, 0.2)) == pytest.approx(2 / report.seconds)
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.75, 1.0)] == [
        1,
        2,
        3,
        4,
    ]
    assert percentile([], 0.5) == 0.0


def test_the_same_requests_and_fleet_give_the_same_report() -> None:
    requests = [(n * 0.03, 150 + n, (n, n + 100), 5 + n) for n in range(20)]
    shape = msgspec.structs.replace(PAIR, prefills=2, decodes=2, capacity_tokens=800)
    reports = [replay_serving(Demand(trace_of(*requests), patience_s=9.0), shape) for _ in range(2)]
    assert msgspec.to_builtins(reports[0].served) == msgspec.to_builtins(reports[1].served)
    assert reports[0].throttled()
