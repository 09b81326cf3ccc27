"""Which pages are striped, and by which code."""

from __future__ import annotations

from math import inf, nan

import pytest

from kvstore.errors import BadValue
from policies import registry
from policies.erasure.protocol import Code, Resting


def test_off_takes_nothing() -> None:
    policy = registry.erasure("off")
    assert policy.code is None
    assert not policy.takes(Resting(1e9, inf))


def test_the_usual_code_survives_what_three_replicas_do_at_half_their_bytes() -> None:
    assert registry.erasure("reed-solomon").code == Code(4, 2)


@pytest.mark.parametrize(("idle_s", "left_s", "takes"), [
    (300.0, 300.0, True), (299.0, 1e9, False), (1e9, 299.0, False), (300.0, inf, True),
])  # fmt: skip
def test_pages_are_taken_that_rest_and_are_going_to(
    idle_s: float, left_s: float, *, takes: bool
) -> None:
    assert registry.erasure("reed-solomon").takes(Resting(idle_s, left_s)) is takes


@pytest.mark.parametrize("wrong", [
    {"k": 0}, {"k": 17}, {"m": 0}, {"m": 5}, {"k": 2.5}, {"x": 1}, {"left_s": -1},
    {"left_s": nan}, {"cold_after_s": "nan"},
])  # fmt: skip
def test_values_out_of_bounds_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(BadValue, match=next(iter(wrong))):
        registry.erasure("reed-solomon", wrong)
