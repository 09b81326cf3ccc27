"""Made-up chats: always the same, and shaped like what they stand for."""

from __future__ import annotations

from statistics import median

from benchmarks.sessions import chat_trace


def test_a_seed_gives_one_trace() -> None:
    assert chat_trace(1, 200.0, 1.0).requests == chat_trace(1, 200.0, 1.0).requests
    assert chat_trace(1, 200.0, 1.0).requests != chat_trace(2, 200.0, 1.0).requests


def test_sessions_come_at_the_rate_asked_for_and_return() -> None:
    trace = chat_trace(1, 2000.0, 1.0)
    assert 1.2 < len(trace.requests) / 2000.0 < 3.0
    assert trace.seconds < 2000.0
    assert 300 < median(request.new_tokens for request in trace.requests) < 400
    touched = sum(len(trace.full_pages(request)) for request in trace.requests)
    fresh = len({page for request in trace.requests for page in trace.full_pages(request)})
    # Between a quarter and two thirds of the pages of all prompts were there before.
    assert 0.25 < 1 - fresh / touched < 0.67


def test_pages_are_cut_as_asked() -> None:
    trace = chat_trace(1, 100.0, 1.0, page_tokens=64)
    for request in trace.requests:
        assert len(request.pages) == -(-request.tokens // 64)
