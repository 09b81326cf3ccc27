"""What makes a drill fail."""

from __future__ import annotations

import msgspec
import pytest

from workers.drills.load import Asked, Question, Target
from workers.drills.report import Outcome, Report, report

WISH = Question("prompt", 4, 0.0, 1.0, 0)
WELL = Outcome(1.5, "it was killed")


def asked(**what: object) -> Asked:
    """An answer, complete and right but for what is said."""
    given = {"text": "right", "is_finished": True, "prefills": 1, "routes": 1} | what
    return msgspec.structs.replace(Asked(WISH, Target("gateway", "tiny"), 0.0), **given)


def judged(*answers: Asked, outcome: Outcome = WELL, leftovers: tuple[str, ...] = ()) -> Report:
    return report("drill", answers, outcome, leftovers, lambda model, _: f"right of {model}"[:5])


def test_right_answers_are_as_they_have_to_be() -> None:
    found = judged(asked(refusals=2), asked(routes=2, stall_s=0.5), asked(prefills=2))
    assert found.is_good
    assert (found.answers, found.refusals, found.moved, found.silence_s) == (3, 2, 2, 0.5)
    assert list(found.lines())[-1] == "as it has to be"


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (asked(text="wrong"), "1 answers are wrong"),
        (asked(text="righ"), "1 answers are wrong"),
        (asked(text="wr", is_finished=False), "1 answers are wrong"),
        (asked(text="ri", is_finished=False, trouble="503: no"), "1 answers failed: 503: no"),
    ],
)
def test_a_wrong_or_failed_answer_fails_the_drill(answer: Asked, failure: str) -> None:
    found = judged(asked(), answer)
    assert not found.is_good
    assert list(found.failures()) == [failure]
    assert f"FAILED {failure}" in found.lines()


def test_what_is_left_over_fails_the_drill() -> None:
    assert list(judged(asked(), leftovers=("1 pins",)).failures()) == ["left over: 1 pins"]


def test_what_a_scenario_missed_fails_the_drill() -> None:
    missed = Outcome(1.5, "it was killed", (), ("no packet was lost",))
    assert not judged(asked(), outcome=missed).is_good


def test_no_answer_at_all_fails_the_drill() -> None:
    assert not judged(asked(is_finished=False, text="")).is_good


def test_each_answer_is_held_against_its_own_model() -> None:
    models: list[str] = []

    def alone(model: str, _: Question) -> str:
        models.append(model)
        return model

    answers = [asked(text=each, target=Target("gateway", each)) for each in ("tiny", "tiny-2")]
    crossed = asked(text="tiny", target=Target("gateway", "tiny-2"))
    assert report("drill", [*answers, crossed], WELL, (), alone).wrong == 1
    assert models == ["tiny", "tiny-2", "tiny-2"]
