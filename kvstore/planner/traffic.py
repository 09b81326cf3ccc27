"""What comes in: how many requests, how long, and how much of them the pool has already."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.planner import checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.request_trace import Trace

PEAK_S: Final = 60.0
"""The busiest such stretch of a trace is its peak."""


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of prompts, or of answers."""

    mean: float
    p99: float


class Traffic(msgspec.Struct, frozen=True):
    """Requests as they come. Everything is sized for the peak."""

    requests_per_s: float
    peak_per_s: float
    input: Lengths
    output: Lengths
    reused: float
    """Share of the prompts' tokens whose KV is in the pool when they come."""


def lengths(field: str, mean: float, p99: float | None) -> Lengths:
    """As given; without a percentile all are alike. BadValue if it is below the mean."""
    mean = checks.positive(field, mean)
    p99 = mean if p99 is None else checks.positive(f"{field}_p99", p99)
    if p99 < mean:
        raise BadValue(f"{field}_p99", p99, f"at least the mean, {mean:g}")
    return Lengths(mean, p99)


def given(
    rate: float, peak: float | None, prompts: Lengths, answers: Lengths, reused: float
) -> Traffic:
    """Traffic as somebody describes it; rates in requests a second, the peak that rate if None."""
    rate = checks.positive("rate", rate)
    peak = rate if peak is None else checks.positive("peak_rate", peak)
    if peak < rate:
        raise BadValue("peak_rate", peak, f"at least the rate, {rate:g}")
    return Traffic(rate, peak, prompts, answers, checks.share("reuse", reused))


def of_trace(trace: Trace) -> Traffic:
    """Traffic as it was recorded.

    Reuse is what a pool that forgets nothing would have served: of each prompt, the full pages
    that came before as the same chain. BadValue where a rate or a length cannot be told.
    """
    if not trace.seconds:
        raise BadValue("timestamp", 0, "requests over a longer time, or --rate without a trace")
    rate = len(trace.requests) / trace.seconds
    prompts = _recorded("input_length", [request.tokens for request in trace.requests])
    answers = _recorded("output_length", [request.new_tokens for request in trace.requests])
    return Traffic(rate, max(rate, _peak(trace)), prompts, answers, reused_share(trace))


def reused_share(trace: Trace) -> float:
    """Of all tokens of prompts, those in full pages that an earlier request had, too."""
    seen: set[int] = set()
    found = 0
    for request in trace.requests:
        pages = trace.full_pages(request)
        # A page has one parent in the whole trace, so whoever knows it knows those before it.
        found += sum(page in seen for page in pages)
        seen.update(pages)
    # The last token is computed even where all of its prompt is known: from it the answer begins.
    return min(found * trace.page_tokens / max(1, trace.tokens), 1 - 1 / max(2, trace.tokens))


def _peak(trace: Trace) -> float:
    minutes = Counter(int(request.at_s / PEAK_S) for request in trace.requests)
    # The last one is cut off: what came in it came in less than its time.
    return max(minutes.values()) / PEAK_S


def _recorded(field: str, tokens: Sequence[int]) -> Lengths:
    # In whole tokens, so that whoever does the sums again gets the same bytes.
    mean = ceil(sum(tokens) / len(tokens))
    if not mean:
        raise BadValue(field, 0, "at least one request of the trace with tokens")
    # Of few requests the mean may be above the nearest rank.
    nearest = sorted(tokens)[ceil(len(tokens) * 0.99) - 1]
    return Lengths(mean, max(mean, nearest))
