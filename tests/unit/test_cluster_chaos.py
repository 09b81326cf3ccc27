"""What makes a run of chaos a failure, and that its faults come evenly."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.cluster.chaos import CALL_SLACK_S, Result
from tests.cluster.history import Findings
from tests.cluster.nemesis import FAULTS, HOST_FAULTS, deck

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.cluster.nemesis import Fault

DEADLINE_S = 10.0


def result(
    findings: Findings | None = None, lost: int = 0, evicted: int = 0, lacking: int = 0
) -> Result:
    kinds = Counter(list(FAULTS))
    return Result(60.0, kinds, findings or Findings(), 7, lost, evicted, DEADLINE_S, lacking)


def test_a_good_run() -> None:
    findings = Findings(reads=5, misses=3, longest_s=DEADLINE_S)
    findings.errors["unavailable"] += 1
    assert result(findings).verdicts() == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (result(Findings(wrong=1)), "wrong bytes"),
        (result(lost=1), "lost"),
        (result(evicted=1), "evicted"),
        (result(lacking=1), "lack replicas"),
        (result(Findings(longest_s=DEADLINE_S + CALL_SLACK_S + 0.1)), "more than 13.0 s"),
    ],
)
def test_a_bad_run(bad: Result, why: str) -> None:
    (verdict,) = bad.verdicts()
    assert why in verdict


def test_the_report_says_what_was_found() -> None:
    findings = Findings(reads=5, wrong=1, stories=["page k: a story"])
    lines = list(result(findings, lost=3).report())
    assert "pages read and verified 5, misses 0" in lines
    assert "pages that had to be there 10, lost 3" in lines
    assert "page k: a story" in lines
    assert all(any(kind in line for line in lines) for kind in FAULTS)


@pytest.mark.parametrize("faults", [FAULTS, HOST_FAULTS], ids=["etcd", "hosts"])
def test_each_deck_has_every_fault_once_in_an_order_of_the_seed(
    faults: Mapping[str, Fault],
) -> None:
    draw = Random(3)
    first, second = deck(draw, faults), deck(draw, faults)
    assert sorted(first) == sorted(second) == sorted(faults)
    assert first != second
    assert first == deck(Random(3), faults)
