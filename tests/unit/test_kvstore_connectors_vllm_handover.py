"""What engines say to each other of a prompt, by way of a proxy."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.connectors.engine_lookups import DEADLINE_S, NOTHING_PROMISED, SOON_S, Promised
from kvstore.connectors.engine_namespace import namespaces
from kvstore.connectors.vllm.handover import (
    HERE,
    NAMESPACES,
    THERE,
    TOKENS,
    Handover,
    parsed,
    promised_to,
    told_on,
)
from kvstore.errors import BadValue
from tests.unit.scheduler_rig import FIELDS, Request, Rig
from tests.unit.scheduler_rig import TOKENS as BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = namespaces(FIELDS)
IDS = tuple([bytes(each.id) for each in GROUPS])
GOOD: dict[str, object] = dict(Handover(IDS, 3 * BLOCK).params())


def test_what_one_engine_says_the_other_hears() -> None:
    first = Request(num_tokens=3 * BLOCK + 5, kv_transfer_params={HERE: True})
    told = told_on(first, GROUPS)
    assert told == GOOD | {THERE: True, HERE: False}
    second = Request(kv_transfer_params=told)
    assert promised_to(second, GROUPS, 7.0) == Promised(3, 7.0)
    assert told_on(second, GROUPS) is None


def test_the_last_token_was_not_computed() -> None:
    told = told_on(Request(num_tokens=3 * BLOCK, kv_transfer_params={HERE: True}), GROUPS)
    assert told is not None
    assert told[TOKENS] == 2 * BLOCK


def test_who_asks_for_nothing_is_told_and_promised_nothing() -> None:
    cases: list[dict[str, object] | None] = [None, {}, {HERE: False, THERE: False}]
    for params in cases:
        request = Request(kv_transfer_params=params)
        assert told_on(request, GROUPS) is None
        assert promised_to(request, GROUPS, 7.0) == NOTHING_PROMISED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (NAMESPACES, None),
        (NAMESPACES, []),
        (NAMESPACES, "00"),
        (NAMESPACES, ["no hex"]),
        (NAMESPACES, [3]),
        (TOKENS, None),
        (TOKENS, -1),
        (TOKENS, 1.5),
        (TOKENS, True),
        (TOKENS, "16"),
    ],
)
def test_what_is_none_of_ours_is_refused_by_name(
    field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadValue, match=field):
        parsed(GOOD | {field: value})
    # In the engine it is a line of the log: a raise there would end it.
    request = Request(kv_transfer_params=GOOD | {field: value})
    assert promised_to(request, GROUPS, 7.0) == NOTHING_PROMISED
    assert field in caplog.text


def test_an_engine_with_other_kv_promises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    other = Handover((IDS[0], b"o" * 32), 3 * BLOCK).params()
    assert promised_to(Request(kv_transfer_params=other), GROUPS, 7.0) == NOTHING_PROMISED
    assert "kvharbor doctor engine" in caplog.text


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    with closing(made.side):
        yield made


def test_a_prompt_of_another_engine_is_waited_for_while_its_blocks_come(rig: Rig) -> None:
    request = Request(kv_transfer_params=Handover(IDS, 3 * BLOCK).params())
    rig.come(request)
    rig.clock.advance(2 * DEADLINE_S)
    assert rig.side.matched_tokens(request, 0) is None
    for group in (0, 1):
        rig.hold(group, 0, 1, 2)
    rig.clock.advance(2 * SOON_S)
    assert rig.side.matched_tokens(request, 0) is None  # asked anew
    rig.answered()
    assert rig.side.matched_tokens(request, 0) == 3 * BLOCK


def test_an_engine_says_what_the_next_one_is_to_be_told(rig: Rig) -> None:
    asked = Request("asked", num_tokens=3 * BLOCK + 1, kv_transfer_params={HERE: True})
    for request in (asked, Request("not")):
        rig.come(request)
    told = rig.side.finished("asked")
    assert told is not None
    assert parsed(told).tokens == 3 * BLOCK
    assert rig.side.finished("not") is None
    assert rig.side.finished("asked") is None  # which is not there any more
