"""Loads of requests: which are drawn, and what is counted of how they fared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pd import differing, over
from benchmarks.serving_load import (
    OK,
    TOO_MANY,
    Lengths,
    Objective,
    Outcome,
    Request,
    Served,
    hear,
    requests,
)

LENGTHS = Lengths(range(10), document=30, question=5, answer=7, documents=2)
REQUEST = Request(0.0, (1,), 3)


def outcome(first_s: float, ended_s: float, *, text: str = "abc", tokens: int = 3) -> Outcome:
    return Outcome(REQUEST, OK, first_s=first_s, ended_s=ended_s, tokens=tokens, text=text)


def test_a_faster_load_is_the_same_requests_sooner() -> None:
    slow, fast = requests(7, 2.0, 50, LENGTHS), requests(7, 8.0, 50, LENGTHS)
    assert [each.prompt for each in slow] == [each.prompt for each in fast]
    assert [each.at_s / 4 for each in slow] == pytest.approx([each.at_s for each in fast])
    assert slow[-1].at_s == pytest.approx(25.0, rel=0.3), "fifty, two a second"
    assert requests(8, 2.0, 50, LENGTHS) != slow


def test_documents_are_shared_or_each_requests_own() -> None:
    shared = requests(7, 1.0, 40, LENGTHS)
    assert {len(each.prompt) for each in shared} == {35}
    assert len({each.prompt[:30] for each in shared}) == 2
    assert len({each.prompt for each in shared}) == 40
    own = requests(7, 1.0, 40, Lengths(range(10), 30, 5, 7, documents=0))
    assert len({each.prompt[:30] for each in own}) == 40


def test_what_was_answered_is_counted_apart_from_what_was_not() -> None:
    refused = Outcome(REQUEST, TOO_MANY, "staging", first_s=9.0, ended_s=9.0)
    broken = Outcome(REQUEST, OK, "ClientPayloadError", first_s=0.1, ended_s=9.0)
    cut_short = outcome(0.1, 9.0, tokens=0)
    served = Served([outcome(0.2, 0.8), outcome(0.4, 0.6), refused, broken, cut_short], 2.0, 1.0)
    assert served.refused() == [refused]
    assert served.failed() == [broken, cut_short]
    assert (served.first_s(50), served.first_s(99)) == (0.2, 0.4)
    assert served.token_s(99) == pytest.approx(0.3), "two tokens after the first, in 0.6 s"
    assert served.met(Objective(0.3, 0.31)) == 1
    assert served.met(Objective(0.4, 0.31)) == 2
    assert served.met(Objective(9.9, 0.2)) == 1
    assert Served.all_of([served, served]).seconds == 4.0


def test_a_hand_over_is_timed_where_there_was_one() -> None:
    def went(route_s: float, routes: int, *pauses_s: float) -> Outcome:
        timings = {"route_s": route_s, "install_s": 2 * route_s, "routes": routes}
        return replace(outcome(0.1, 0.9), pauses_s=list(pauses_s), timings=timings)

    lost = replace(went(9.0, 1, 9.0), reason="unavailable")
    served = Served([went(0.1, 1, 0.4, 0.1), went(0.2, 1, 0.5), went(7.0, 0), lost], 1.0, 1.0)
    assert served.handed_over_s() == pytest.approx(0.45), "the one that stayed does not count"
    assert (served.second_s(50), served.second_s(99)) == (0.4, 0.5)


def test_events_are_timed_and_the_last_one_tells_the_usage() -> None:
    found = Outcome(REQUEST, OK)
    last_s = 0.0
    for said, now_s in (
        (b'{"choices": [{"text": "a"}]}', 0.5),
        (b'{"choices": [{"text": "b"}]}', 0.75),
        (b'{"choices": [{"text": ""}]}', 1.0),
        (b'{"choices": [], "usage": {"completion_tokens": 2, "kvharbor_timings": {}}}', 1.0),
        (b"[DONE]", 1.0),
    ):
        last_s = hear(found, said, now_s, last_s)
    assert (found.text, found.first_s, found.pauses_s, found.tokens) == ("ab", 0.5, [0.25], 2)
    assert found.is_complete
    hear(found, b'{"error": {"code": "unavailable"}}', 1.0, last_s)
    assert (found.reason, found.is_complete) == ("unavailable", False)


def test_answers_are_compared_where_both_fleets_gave_one() -> None:
    lost = Outcome(REQUEST, TOO_MANY)
    first = Served([outcome(1, 2), outcome(1, 2, text="x"), lost], 1.0, 1.0)
    other = Served([outcome(1, 2), outcome(1, 2, text="y"), outcome(1, 2)], 1.0, 1.0)
    assert differing([[first], [other]]) == 1


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    def rounds(*seconds: float) -> list[Served]:
        return [Served([outcome(each, 9.0)], 1.0, 1.0) for each in seconds]

    assert over(rounds(2, 9, 2), rounds(1, 3, 4), lambda served: served.first_s(50)) == 2
