"""Hints: absent by default, refused where a value is never right."""

from __future__ import annotations

import math

import pytest

from kvstore.errors import BadValue
from kvstore.hints import NO_HINTS, PRIORITY_MAX, SECONDS_MAX, TURN_MAX, Hints


def test_all_of_them_may_be_absent() -> None:
    NO_HINTS.check()
    assert Hints() == NO_HINTS


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("reuse_probability", wrong) for wrong in (-0.1, 1.1, math.nan, math.inf, "1", True)),
        *(("session_closed", wrong) for wrong in (0, 1, None, "yes")),
        *(("tool_call_s", wrong) for wrong in (-1.0, SECONDS_MAX * 1.1, math.nan, math.inf)),
        *(("turn", wrong) for wrong in (0, -1, TURN_MAX + 1, 1.0, True)),
        *(("priority", wrong) for wrong in (PRIORITY_MAX + 1, -PRIORITY_MAX - 1, 0.5, None, True)),
    ],
)
def test_what_is_never_right_is_named(field: str, wrong: object) -> None:
    with pytest.raises(BadValue, match=field) as raised:
        Hints(**{field: wrong}).check()  # type: ignore[arg-type]  # the field decides the type
    assert raised.value.field == field


def test_bounds_are_told_to_the_last_digit() -> None:
    with pytest.raises(BadValue, match=f"want 1 to {TURN_MAX}$"):
        Hints(turn=0).check()
    with pytest.raises(BadValue, match=r"want 0 to 86400$"):
        Hints(tool_call_s=-1.0).check()


def test_the_bounds_themselves_are_right() -> None:
    Hints(0.0, True, 0.0, 1, -PRIORITY_MAX).check()
    Hints(1.0, False, SECONDS_MAX, TURN_MAX, PRIORITY_MAX).check()


def test_hints_are_read_by_their_names() -> None:
    assert Hints.of({}) == NO_HINTS
    assert Hints.of({"tool_call_s": 20, "priority": 1}) == Hints(tool_call_s=20, priority=1)


@pytest.mark.parametrize(
    ("written", "field", "said"),
    [
        ({"tool_call_s": -1}, "tool_call_s", "want 0 to 86400"),
        ({"tool_call_s": SECONDS_MAX + 1}, "tool_call_s", "want 0 to 86400"),
        ({"session_ends": True}, "hints", "'session_ends', want one of reuse_probability, session"),
        ({5: True}, "hints", "got 5, want one of"),
        ("session_closed", "hints", "want hints by their names"),
        (None, "hints", "want hints by their names"),
    ],
)
def test_written_hints_that_are_never_right_are_named(
    written: object, field: str, said: str
) -> None:
    with pytest.raises(BadValue, match=said) as raised:
        Hints.of(written)
    assert raised.value.field == field
