"""Policies by name, and their parameters as somebody wrote them."""

from __future__ import annotations

import pytest

from kvstore.errors import BadValue
from policies import registry
from policies.eviction.lrfu import Lrfu, LrfuParameters
from policies.parameters import Parameters, amended

NAMES = ("lrfu", "lru", "rent", "s3-fifo", "ttl-lfu")


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_name_and_a_state_of_its_own(name: str) -> None:
    assert set(registry.EVICTION) == set(NAMES)
    assert registry.eviction(name) is not registry.eviction(name)


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(BadValue, match="eviction: got 'random', want one of lrfu, lru, rent, s3"):
        registry.eviction("random")


def test_parameters_may_come_as_numbers_or_text() -> None:
    for written in (60, 60.0, "60"):
        policy = registry.eviction("lrfu", {"half_life_s": written})
        assert isinstance(policy, Lrfu)
        assert policy.parameters == LrfuParameters(half_life_s=60.0)


def test_an_unknown_parameter_lists_those_that_exist() -> None:
    with pytest.raises(BadValue, match="got 'halflife', want one of ghost_factor, half_life_s"):
        registry.eviction("lrfu", {"halflife": 60})
    with pytest.raises(BadValue, match="parameter: got 'ttl_s', want none"):
        registry.eviction("lru", {"ttl_s": 60})


@pytest.mark.parametrize("wrong", [0, -1, 1e9, "soon", None, float("nan"), [1]])
def test_values_out_of_bounds_name_the_parameter(wrong: object) -> None:
    with pytest.raises(BadValue, match=r"^half_life_s: got .*, want a number( |$)"):
        registry.eviction("lrfu", {"half_life_s": wrong})


def test_what_is_not_written_stays() -> None:
    current = LrfuParameters(half_life_s=60.0, ghost_factor=2.0)
    assert amended(current, {"ghost_factor": "3"}) == LrfuParameters(
        half_life_s=60.0, ghost_factor=3.0
    )
    assert amended(Parameters(), {}) == Parameters()
