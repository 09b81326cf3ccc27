"""Traffic as it is described, and as a trace recorded it."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

from kvstore.errors import BadValue
from kvstore.planner.traffic import Lengths, given, lengths, of_trace, reused_share
from kvstore.request_trace import Trace, parse_trace

TEN = Lengths(10.0, 10.0)


def trace(*rows: tuple[int, int, int, list[int]]) -> Trace:
    """Requests of (milliseconds, input, output, pages of 10 tokens)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    return parse_trace(lines, "made up", page_tokens=10)


def test_rates_and_lengths_are_those_of_the_trace() -> None:
    found = of_trace(trace((0, 20, 4, [0, 1]), (60_000, 40, 2, [2, 3, 4, 5]), (90_000, 0, 0, [])))
    assert found.requests_per_s == pytest.approx(3 / 90)
    assert found.input == Lengths(20.0, 40.0)
    assert found.output == Lengths(2.0, 4.0)


def test_means_are_whole_tokens() -> None:
    found = of_trace(trace((0, 10, 1, [0]), (1000, 11, 2, [1])))
    assert (found.input, found.output) == (Lengths(11, 11), Lengths(2, 2))


def test_the_peak_is_the_busiest_minute() -> None:
    rows = [(at, 10, 1, [number]) for number, at in enumerate([0, *[60_000] * 30, 600_000])]
    assert of_trace(trace(*rows)).peak_per_s == 30 / 60


def test_the_peak_of_a_short_trace_is_its_rate() -> None:
    found = of_trace(trace((0, 10, 1, [0]), (1000, 10, 1, [1])))
    assert found.peak_per_s == found.requests_per_s == 2.0


def test_reuse_is_what_a_pool_that_forgets_nothing_would_have_served() -> None:
    # The second finds one of its two full pages; nobody finds the third's partial page.
    assert reused_share(trace((0, 20, 1, [0, 1]), (1, 25, 1, [0, 2, 3]), (2, 5, 1, [4]))) == 0.2
    assert reused_share(trace((0, 20, 1, [0, 1]), (1, 20, 1, [2, 3]))) == 0


def test_something_of_a_trace_is_always_computed() -> None:
    rows = [(at, 10, 1, [0]) for at in range(3)]
    assert reused_share(trace(*rows)) == pytest.approx(2 / 3)
    assert reused_share(trace((0, 0, 1, []))) == 0


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([(0, 10, 1, [0])], "timestamp"),
        ([(0, 0, 1, []), (9, 0, 1, [])], "input_length"),
        ([(0, 9, 0, []), (9, 9, 0, [])], "output_length"),
    ],
)
def test_a_trace_that_tells_too_little_is_refused(
    rows: list[tuple[int, int, int, list[int]]], field: str
) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got 0, want "):
        of_trace(trace(*rows))


def test_without_percentile_and_peak_all_are_alike() -> None:
    assert lengths("input", 800, None) == Lengths(800, 800)
    assert given(4, None, TEN, TEN, 0).peak_per_s == 4


@pytest.mark.parametrize("value", [0, 1e-10, -1, nan, inf, -inf, 2.0**41])
def test_what_is_no_positive_number_is_named(value: float) -> None:
    with pytest.raises(BadValue, match=r"^input: got"):
        lengths("input", value, None)
    with pytest.raises(BadValue, match=r"^input_p99: got"):
        lengths("input", 800, value)
    with pytest.raises(BadValue, match=r"^rate: got"):
        given(value, None, TEN, TEN, 0)
    with pytest.raises(BadValue, match=r"^peak_rate: got"):
        given(1, value, TEN, TEN, 0)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, nan, inf, True])
def test_a_share_is_below_one(value: float) -> None:
    with pytest.raises(BadValue, match=r"^reuse: got .*, want a number from 0 to below 1"):
        given(1, None, TEN, TEN, value)


def test_a_percentile_or_peak_below_the_mean_is_refused() -> None:
    with pytest.raises(BadValue, match=r"^input_p99: got 5, want at least the mean, 10"):
        lengths("input", 10, 5)
    with pytest.raises(BadValue, match=r"^peak_rate: got 1, want at least the rate, 2"):
        given(2, 1, TEN, TEN, 0)
