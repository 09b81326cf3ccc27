"""What the pool learns of sessions by itself, and how good that is where the truth is known."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from kvstore.hints import NO_HINTS, Hints
from policies import predictor as module
from policies.predictor import USUAL_PROBABILITY, Predictor, PredictorParameters
from tests.unit.policy_entries import chain

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTINUES = (0.2, 0.4, 0.6, 0.8)
"""Truth of the made-up sessions: probability of another turn after the 1st, 2nd, 3rd and later."""


def probability(predictor: Predictor, keys: bytes, now_s: float, hints: Hints = NO_HINTS) -> float:
    """What it believes of this request."""
    found = predictor.completed(hints, keys, now_s).reuse_probability
    assert found is not None
    return found


def sessions(seed: int, count: int) -> Iterator[tuple[float, bytes, float, bool]]:
    """Requests of sessions in order of time: time, keys, true probability, and what came of it."""
    random = Random(seed)
    requests: list[tuple[float, bytes, float, bool]] = []
    for number in range(count):
        at_s, pages, turn, goes_on = random.uniform(0.0, 7200.0), random.randint(1, 20), 0, True
        while goes_on:
            chance = CONTINUES[min(turn, 3)]
            goes_on = random.random() < chance
            requests.append((at_s, chain(f"{number}-", pages), chance, goes_on))
            at_s += random.uniform(15.0, 240.0)
            pages += random.randint(1, 5)
            turn += 1
    return iter(sorted(requests))


def area_under_roc(judged: list[tuple[float, bool]]) -> float:
    """Probability that a chain that was continued was rated above one that was not."""
    yes = [rated for rated, continued in judged if continued]
    no = [rated for rated, continued in judged if not continued]
    wins = sum((a > b) + (a == b) / 2 for a in yes for b in no)
    return wins / (len(yes) * len(no))


def test_it_learns_sessions_that_nobody_names() -> None:
    predictor = Predictor()
    rated: list[tuple[float, bool]] = []
    best: list[tuple[float, bool]] = []
    by_truth: defaultdict[float, list[float]] = defaultdict(list)
    for at_s, keys, truth, goes_on in sessions(seed=1, count=2000):
        believed = probability(predictor, keys, at_s)
        if at_s > 1800.0:
            rated.append((believed, goes_on))
            best.append((truth, goes_on))
            by_truth[truth].append(believed)
    assert area_under_roc(best) < area_under_roc(rated) + 0.03
    assert area_under_roc(rated) > 0.7
    for truth, believed_all in by_truth.items():
        assert fmean(believed_all) == pytest.approx(truth, abs=0.1)


def test_it_knows_nothing_at_first() -> None:
    assert probability(Predictor(), chain("a", 3), 0.0) == pytest.approx(USUAL_PROBABILITY)


def test_what_the_caller_says_stands() -> None:
    predictor = Predictor()
    said = Hints(reuse_probability=0.9, turn=7)
    assert predictor.completed(said, chain("a", 3), 0.0) == said
    closed = predictor.completed(Hints(session_closed=True), chain("b", 3), 0.0)
    assert closed.session_closed


def test_the_accesses_of_one_request_are_one() -> None:
    predictor, other = Predictor(), Predictor()
    for number in range(50):
        keys = chain(str(number), 3)
        first = probability(predictor, keys, 100.0 * number)
        assert probability(predictor, keys, 100.0 * number + 5.0) == first
        assert probability(other, keys, 100.0 * number) == first


def test_the_same_chain_again_later_is_another_use() -> None:
    predictor, keys = Predictor(), chain("prompt", 3)
    believed = [probability(predictor, keys, 60.0 * number) for number in range(40)]
    assert believed[-1] > 0.8 > believed[0]


def test_a_turn_may_be_told() -> None:
    predictor = Predictor()
    for number in range(200):  # sessions of which the pool sees the second turns only
        probability(predictor, chain(str(number), 3), float(number), Hints(turn=2))
        probability(predictor, chain(str(number), 4), number + 500.0, Hints(turn=3))
    second = probability(predictor, chain("x", 3), 900.0, Hints(turn=2))
    assert second > 0.6
    assert second > 2 * probability(predictor, chain("y", 4), 900.0, Hints(turn=3))


def test_after_the_horizon_a_chain_is_forgotten() -> None:
    predictor = Predictor()
    predictor.parameters = PredictorParameters(horizon_s=100.0)
    probability(predictor, chain("a", 3), 0.0)
    probability(predictor, chain("b", 3), 50.0)
    probability(predictor, chain("c", 3), 120.0)
    assert len(predictor) == 2


def test_the_chains_that_are_watched_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHAINS_MAX", 10)
    predictor = Predictor()
    for number in range(50):
        probability(predictor, chain(str(number)), 0.1 * number)
        assert len(predictor) <= 10


def test_a_request_without_full_pages_is_no_chain() -> None:
    predictor = Predictor()
    for number in range(5):
        probability(predictor, b"", 60.0 * number)
    assert len(predictor) == 0
