"""The memory of what left: exact to the page, bounded, oldest forgotten first."""

from __future__ import annotations

from kvstore.ids import KEY_BYTES
from policies.eviction.ghosts import GHOSTS_MAX, PAGES_MIN, Ghosts
from tests.unit.policy_entries import Pages, chain


def left(ghosts: Ghosts, keys: bytes, touches: int = 7) -> None:
    """These pages leave."""
    entry = Pages(keys)
    entry.heat, entry.touches, entry.touched_s = 5.0, touches, 3.0
    ghosts.keep(keys, entry)


def test_the_rest_of_what_left_together_stays_remembered() -> None:
    ghosts = Ghosts()
    keys = chain("a", 9)
    left(ghosts, keys)
    first = ghosts.take(keys[: 2 * KEY_BYTES])
    branch = ghosts.take(keys[2 * KEY_BYTES : 5 * KEY_BYTES] + chain("b", 3))
    assert (first and first.pages, branch and branch.pages) == (2, 3)
    assert ghosts.pages == 4
    rest = ghosts.take(keys[5 * KEY_BYTES :])
    assert rest is not None
    assert (rest.pages, rest.heat, rest.touches, rest.touched_s) == (4, 5.0, 7, 3.0)
    assert (len(ghosts), ghosts.pages) == (0, 0)
    assert ghosts.take(keys) is None


def test_the_oldest_are_forgotten_first() -> None:
    ghosts = Ghosts()
    for number in range(6):
        left(ghosts, chain(str(number), 256))
        assert ghosts.pages <= PAGES_MIN
    assert ghosts.take(chain("1", 256)) is None
    assert ghosts.take(chain("2", 256)) is not None


def test_their_bound_follows_the_pool() -> None:
    ghosts = Ghosts()
    ghosts.resize(2 * PAGES_MIN)
    for number in range(8):
        left(ghosts, chain(str(number), 256))
    assert (len(ghosts), ghosts.pages) == (8, 2 * PAGES_MIN)
    ghosts.resize(0)
    assert (len(ghosts), ghosts.pages) == (4, PAGES_MIN)


def test_pages_that_leave_twice_count_once() -> None:
    ghosts = Ghosts()
    left(ghosts, chain("a", 9), 1)
    left(ghosts, chain("a", 4), 2)
    assert (len(ghosts), ghosts.pages) == (1, 4)


def test_single_pages_are_bounded_too() -> None:
    ghosts = Ghosts()
    ghosts.resize(GHOSTS_MAX * 4)
    for number in range(GHOSTS_MAX + 5):
        left(ghosts, number.to_bytes(KEY_BYTES, "little"))
    assert len(ghosts) == ghosts.pages == GHOSTS_MAX
