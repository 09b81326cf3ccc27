"""Rows of removed generations: what they cover, when they go, and that they survive."""

from __future__ import annotations

import pytest

from kvstore.coordination.metadata_store import VALUE_BYTES_MAX
from kvstore.errors import ConfigError
from master.tombstones import PREFIX, SEGMENT_ROWS_MAX, Tombstones

KEY, OTHER = b"k" * 32, b"o" * 32


def stored(tombstones: Tombstones) -> dict[str, bytes | None]:
    """What would be written now; None for what would be deleted."""
    puts, deletes = tombstones.take_dirty()
    return {**dict(puts), **dict.fromkeys(deletes)}


def test_a_row_covers_its_generation_and_lower_ones_in_its_segment_only() -> None:
    tombstones = Tombstones()
    tombstones.add("s", KEY, 7)
    assert [tombstones.covers("s", KEY, g) for g in (1, 7, 8)] == [True, True, False]
    assert not tombstones.covers("other", KEY, 1)
    assert not tombstones.covers("s", OTHER, 1)


def test_the_rows_of_a_segment_are_one_value_that_every_store_takes() -> None:
    tombstones = Tombstones()
    for number in range(SEGMENT_ROWS_MAX):
        tombstones.add("s", number.to_bytes(32, "big"), 7)
    assert tombstones.has_room(0, 1)
    assert not tombstones.has_room(1, 1)
    value = stored(tombstones)[PREFIX + "s"]
    assert value is not None
    assert 2 * len(value) <= VALUE_BYTES_MAX


def test_a_row_stays_until_every_extent_is_free() -> None:
    tombstones = Tombstones()
    tombstones.add("s", KEY, 7)  # part 0
    tombstones.add("s", KEY, 9)  # part 1
    tombstones.clear("s", KEY, 9)
    assert tombstones.covers("s", KEY, 7)
    assert len(stored(tombstones)[PREFIX + "s"] or b"") == 40
    tombstones.clear("s", KEY, 7)
    assert not tombstones.covers("s", KEY, 7)
    assert stored(tombstones) == {PREFIX + "s": None}


def test_the_order_in_which_extents_come_free_does_not_matter() -> None:
    tombstones = Tombstones()
    tombstones.add("s", KEY, 9)
    tombstones.add("s", KEY, 7)
    tombstones.clear("s", KEY, 7)
    assert tombstones.covers("s", KEY, 9)
    tombstones.clear("s", KEY, 9)
    assert not len(tombstones)


def test_an_inventory_leaves_what_it_still_lists() -> None:
    tombstones = Tombstones()
    tombstones.add("s", KEY, 100)  # of a holder that was away: everything up to here
    tombstones.add("s", OTHER, 100)
    tombstones.keep_only("s", {KEY: {3, 5, 200}})
    assert [tombstones.covers("s", KEY, g) for g in (5, 6)] == [True, False]
    assert not tombstones.covers("s", OTHER, 1)
    tombstones.clear("s", KEY, 5)
    tombstones.clear("s", KEY, 3)
    assert not len(tombstones)


def test_rows_are_restored() -> None:
    tombstones = Tombstones()
    tombstones.add("s", KEY, 7)
    tombstones.add("s", KEY, 9)
    ((name, value),) = tombstones.take_dirty()[0]
    again = Tombstones()
    again.restore(name, value)
    assert list(again) == [("s", KEY, 9)]
    assert again.covers("s", KEY, 7)
    with pytest.raises(ConfigError):
        again.restore(name, value[:-1])


def test_a_segment_that_was_given_up_comes_back_empty() -> None:
    tombstones = Tombstones()
    tombstones.add("s", KEY, 7)
    tombstones.forget("s", 50)
    tombstones.clear("s", KEY, 7)
    tombstones.keep_only("s", {})
    assert tombstones.covers("s", OTHER, 50)
    assert not tombstones.covers("s", OTHER, 51)
