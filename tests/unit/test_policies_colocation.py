"""When one worker runs a whole request, and why."""

from __future__ import annotations

import pytest

from kvstore.errors import BadValue
from policies import registry
from policies.routing.protocol import Alone, Case


@pytest.mark.parametrize(("case", "reason"), [
    (Case(256), None),
    (Case(255), Alone.BREAK_EVEN),
    (Case(10_000, failed_hand_overs=1), None),
    (Case(10_000, failed_hand_overs=2), Alone.FAILED),
    (Case(10_000, others=0), Alone.NO_OTHERS),
    (Case(1, failed_hand_overs=2), Alone.FAILED),
    (Case(1, failed_hand_overs=2, others=0), Alone.NO_OTHERS),
])  # fmt: skip
def test_the_first_reason_that_holds_is_named(case: Case, reason: Alone | None) -> None:
    assert registry.colocation("break_even").alone(case) is reason


def test_where_it_breaks_even_can_be_set() -> None:
    policy = registry.colocation("break_even", {"tokens": 1000, "failures": 1})
    assert policy.alone(Case(999)) is Alone.BREAK_EVEN
    assert policy.alone(Case(1000)) is None
    assert policy.alone(Case(1000, failed_hand_overs=1)) is Alone.FAILED
    assert registry.colocation("break_even", {"tokens": 0}).alone(Case(0)) is None


@pytest.mark.parametrize("case", [Case(1), Case(10_000), Case(1, 2, 0), Case(10_000, 0, 0)])
def test_always_and_never_ask_for_no_reason(case: Case) -> None:
    assert registry.colocation("always").alone(case) is Alone.ALWAYS
    assert registry.colocation("never").alone(case) is None


def test_unknown_names_and_parameters_are_named() -> None:
    with pytest.raises(
        BadValue, match="colocation: got 'best', want one of always, break_even, never"
    ):
        registry.colocation("best")
    with pytest.raises(BadValue, match="failures: got 0, want a whole number >= 1"):
        registry.colocation("break_even", {"failures": 0})
