"""What is started for the drills that were named."""

from __future__ import annotations

from argparse import Namespace

import pytest

from kvstore.errors import BadValue
from workers.drills.__main__ import shape_of
from workers.drills.deployment import Shape


def given(*drill: str, **what: int) -> Namespace:
    return Namespace(drill=drill, **{"prefills": 1, "decodes": 2, "clients": 4, **what})


def test_a_deployment_is_what_all_drills_take_together() -> None:
    assert shape_of(given("prefill-dead")) == Shape(1, 2, masters=1, hosts=1)
    assert shape_of(given("master-dead")) == Shape(1, 2, masters=2, hosts=1)
    both = given("packet-loss", "master-dead", decodes=3)
    assert shape_of(both) == Shape(1, 3, masters=2, hosts=2)


@pytest.mark.parametrize(
    ("field", "value", "least"), [("decodes", 1, 2), ("prefills", 0, 1), ("clients", 0, 1)]
)
def test_too_few_of_something_are_refused(field: str, value: int, least: int) -> None:
    with pytest.raises(BadValue, match=f"--{field}: got {value}, want at least {least}"):
        shape_of(given("prefill-dead", "decode-half-dead", **{field: value}))
