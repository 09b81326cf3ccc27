"""Pins asked for in batches, and what is answered for all of them."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.client.calls import Calls
from kvstore.client.steps import drive
from kvstore.errors import MalformedMessage, OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.page import PageChain
from kvstore.wire.messages.pins import (
    ListPins,
    PagesPinned,
    PagesUnpinned,
    PinList,
    PinPages,
    PinRow,
    UnpinPages,
)
from tests.fakes import ManualClock
from tests.unit.client_scripts import Script, opened

SPACE = opened()
FULL = limits.BATCH_PAGES_MAX
LONG = PageChain(bytes(range(1, 33)) * (FULL + 2))
FIRST, REST = LONG.packed[: FULL * KEY_BYTES], LONG.packed[FULL * KEY_BYTES :]
CALLS = Calls(ManualClock(), 10.0)


def test_a_long_chain_is_pinned_batch_by_batch() -> None:
    script = Script().will(PagesPinned(b"\1" * FULL), PagesPinned(b"\1\0"))
    steps = CALLS.pin_steps(SPACE, LONG, "o", 60.0, None, hard=True)
    assert drive(steps, script) == [True] * (FULL + 1) + [False]
    namespace = SPACE.namespace.id
    assert script.asked == [PinPages(namespace, keys, "o", True, 60.0) for keys in (FIRST, REST)]


def test_a_refusal_is_the_callers() -> None:
    script = Script().will(PagesPinned(b"\1" * FULL), OutOfSpace("pin_quota"))
    with pytest.raises(OutOfSpace, match="pin_quota"):
        drive(CALLS.pin_steps(SPACE, LONG, "o", 60.0, None, hard=True), script)


def test_an_answer_about_other_pages_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="1 flags for 2 pages"):
        drive(
            CALLS.pin_steps(SPACE, PageChain(REST), "o", 60.0, None, hard=False),
            Script().will(PagesPinned(b"\1")),
        )


def test_pins_are_taken_back_by_page_or_all_at_once() -> None:
    script = Script().will(PagesUnpinned(FULL), PagesUnpinned(1), PagesUnpinned(7))
    assert drive(CALLS.unpin_steps(SPACE, LONG, "o", None), script) == FULL + 1
    assert drive(CALLS.unpin_steps(SPACE, None, "o", None), script) == 7
    assert drive(CALLS.unpin_steps(SPACE, PageChain(b""), "o", None), script) == 0
    namespace = SPACE.namespace.id
    assert script.asked == [UnpinPages(namespace, keys, "o") for keys in (FIRST, REST, b"")]


def test_pins_are_listed_as_the_master_says() -> None:
    row = PinRow(SPACE.namespace.id, "tests", "model", "o", True, 5.0, 2, 8192)
    script = Script().will(PinList((row,)))
    assert drive(CALLS.list_pins_steps(None), script) == (row,)
    assert script.asked == [ListPins()]
