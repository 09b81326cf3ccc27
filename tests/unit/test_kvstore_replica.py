"""What the table of an extent's life allows, and the arithmetic of generations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.ids import Epoch, epoch_of, generation_of
from kvstore.replica import EXTENT_TRANSITIONS, ExtentEvent, ExtentState


def test_every_state_is_reached_and_left() -> None:
    assert {before for before, _ in EXTENT_TRANSITIONS} == set(ExtentState)
    assert set(EXTENT_TRANSITIONS.values()) == set(ExtentState)
    assert {event for _, event in EXTENT_TRANSITIONS} == set(ExtentEvent)


def test_nothing_becomes_readable_but_by_a_seal_or_a_proof() -> None:
    ways = {
        event for (_, event), after in EXTENT_TRANSITIONS.items() if after == ExtentState.SEALED
    }
    assert ways == {ExtentEvent.SEALED, ExtentEvent.ADOPTED}


def test_nothing_becomes_free_without_the_workers_word() -> None:
    ways = {event for (_, event), after in EXTENT_TRANSITIONS.items() if after == ExtentState.FREE}
    assert ways == {ExtentEvent.FREED, ExtentEvent.FENCED}


@given(st.integers(1, (1 << 31) - 1), st.integers(1, (1 << 32) - 1))
def test_generations_keep_epoch_and_order(epoch: int, counter: int) -> None:
    generation = generation_of(Epoch(epoch), counter)
    assert epoch_of(generation) == epoch
    assert generation < 1 << 64
    assert generation_of(Epoch(epoch + 1), 1) > generation


@pytest.mark.parametrize("counter", [0, -1, 1 << 32])
def test_a_counter_that_would_spill_into_the_epoch_is_our_bug(counter: int) -> None:
    with pytest.raises(AssertionError):
        generation_of(Epoch(1), counter)
