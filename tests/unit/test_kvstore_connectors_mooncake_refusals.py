"""An operator reads why objects are not stored, and is not flooded with it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kvstore.client.outcomes import Refused, RefusedReason
from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.refusals import EVERY_S, ORDINARY, Refusals
from kvstore.namespace import opaque
from kvstore.page import name_key
from tests.fakes import ManualClock
from tests.unit.object_store import installed, set_up

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "kvharbor"):
        yield caplog


def test_a_code_for_no_room_comes_with_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    """As of a pool of one chunk, in which the object's name finds no room beside its bytes."""
    fake = installed(monkeypatch)
    heads = opaque("tests", "mooncake", keeps_names=True)
    with set_up(fake) as store:
        fake.refuse[name_key(heads.id, b"one")] = Refused(RefusedReason.OUT_OF_SPACE)
        assert store.put("one", b"12345") == Code.NO_AVAILABLE_HANDLE
    (line,) = told.messages
    assert "objects not stored: 1 (out_of_space), the last 'one' of 5 bytes" in line
    assert "chunks of their own of up to 64 MiB" in line


def test_each_reason_is_told_of_at_once_and_then_once_a_while(
    told: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    refusals = Refusals(clock)
    for _ in range(3):
        for reason in (RefusedReason.BUSY, RefusedReason.TRANSPORT):
            refusals.add(b"some", 5, reason)
    assert ["busy" in told.messages[0], "transport" in told.messages[1]] == [True, True]
    clock.advance(EVERY_S - 1)
    refusals.add(b"\xff" * 1000, 5, RefusedReason.BUSY)
    assert len(told.messages) == 2
    clock.advance(1)
    refusals.add(b"\xff" * 1000, 5, RefusedReason.BUSY)
    assert len(told.messages) == 3
    assert "objects not stored: 4 (busy)" in told.messages[2]
    assert len(told.messages[2]) < 250


def test_what_somebody_else_puts_just_now_is_no_news(told: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(ManualClock())
    for reason in RefusedReason:
        refusals.add(b"some", 5, reason)
    assert len(told.messages) == len(RefusedReason) - len(ORDINARY)
