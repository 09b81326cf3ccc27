"""How large an extent pages are planned in that lately came out smaller once encoded."""

from __future__ import annotations

from master.stored_sizes import SIZES_MAX, SIZES_WINDOW, StoredSizes

PAGE = 4096


def test_what_was_long_ago_is_forgotten() -> None:
    sizes = StoredSizes()
    assert sizes.size_class(1, 0, 10 * PAGE) == 10 * PAGE
    sizes.note(1, 0, 9 * PAGE)
    for _ in range(SIZES_WINDOW):
        assert sizes.size_class(1, 0, 10 * PAGE) == 9 * PAGE
        sizes.note(1, 0, PAGE + 1)
    for _ in range(SIZES_WINDOW):
        sizes.note(1, 0, PAGE + 1)
    assert sizes.size_class(1, 0, 10 * PAGE) == 2 * PAGE
    assert sizes.size_class(1, 1, 10 * PAGE) == 10 * PAGE
    sizes.note(2, 0, 11 * PAGE)
    assert sizes.size_class(2, 0, 10 * PAGE) == 10 * PAGE, "it is stored as it is then"


def test_the_table_of_sizes_has_a_bound() -> None:
    sizes = StoredSizes()
    for namespace in range(SIZES_MAX + 1):
        sizes.note(namespace, 0, PAGE)
    assert sizes.size_class(0, 0, 2 * PAGE) == 2 * PAGE
    assert sizes.size_class(SIZES_MAX, 0, 2 * PAGE) == PAGE
