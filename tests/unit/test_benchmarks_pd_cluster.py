"""The cluster of the serving benchmark: what is asked of which fleets, and that it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import pd_cluster
from benchmarks.pd_cluster import faster, fleets, simulate
from kvstore.request_trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness import Figure, Report


class Heard:
    """What a benchmark reports."""

    def __init__(self) -> None:
        self.tables: dict[str, Sequence[Mapping[str, Figure]]] = {}
        self.ratios: dict[str, float] = {}

    def parameters(self, **values: Figure) -> None:
        assert values["cluster_token_bytes"] == 131_072

    def table(self, title: str, rows: Sequence[Mapping[str, Figure]]) -> None:
        self.tables[title] = rows

    def reported(self, name: str, value: float) -> None:
        self.ratios[name] = value


def trace() -> Trace:
    """Three prompts of one session, ten seconds apart."""
    made = Trace()
    for number in range(3):
        tokens = 512 * (number + 1)
        made.add(TraceRequest(10.0 * number, tokens, tuple(range(number + 1)), 11))
    return made


def test_a_faster_trace_is_the_same_requests_sooner() -> None:
    found = faster(trace(), 4)
    assert [each.at_s for each in found.requests] == [0.0, 2.5, 5.0]
    assert [each.pages for each in found.requests] == [each.pages for each in trace().requests]


def test_all_fleets_have_as_many_workers() -> None:
    for workers in (2, 4, 8, 10):
        for fleet in fleets(workers):
            shape = fleet.shape
            assert shape.prefills + shape.decodes + shape.both == workers
            assert shape.both or shape.prefills >= shape.decodes > 0


def test_what_fleets_do_with_a_trace_is_told(heard: Heard) -> None:
    table = heard.tables["cluster, modelled"]
    rows = {(row["fleet"], row["reuse"]): row for row in table}
    assert len(rows) == len(table) == 8
    lone, apart = rows["2x both, alone", "yes"], rows["1p1d", "yes"]
    assert lone["reused %"] == pytest.approx(100 * (512 + 1024) / (512 + 1024 + 1536))
    assert rows["1p1d", "no"]["reused %"] == 0
    assert lone["met both %"] == apart["met both %"] == 100
    assert lone["install p50 ms"] == 0
    # 1025 tokens of 131 072 bytes at 12.5 GB/s, and a round trip.
    assert apart["install p50 ms"] == pytest.approx(10.85, abs=0.01)
    assert heard.ratios["cluster/goodput/reuse/apart_over_together"] == 1
    overload = heard.tables["cluster, modelled: 1p1d asked for more than the trace does"]
    assert [row["asked for"] for row in overload] == ["1x", "2x", "4x"]
    assert [row["failed"] for row in overload] == [0, 0, 0]


@pytest.fixture
def heard() -> Heard:
    found = Heard()
    told: Report = found  # type: ignore[assignment]  # of a report it is told to, and no more
    simulate(told, trace(), 2)
    return found


def test_the_parameters_are_those_of_the_model() -> None:
    assert pd_cluster.WORKER.token_bytes == 2 * 32 * 8 * 128 * 2
