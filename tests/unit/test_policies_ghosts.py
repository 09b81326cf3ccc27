"""The memory of what left: bounded in pages, oldest forgotten first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.eviction.ghosts import PAGES_MIN, Ghosts
from tests.unit.policy_entries import Pages

moves = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(0, 30), st.integers(1, 256)),
        st.tuples(st.just("take"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("resize"), st.just(0), st.integers(0, 3000)),
    ),
    max_size=60,
)


def left(pages: int) -> Pages:
    """Pages with numbers of their own."""
    entry = Pages(pages=pages)
    entry.heat, entry.touches, entry.touched_s = 5.0, 7, 3.0
    return entry


@given(moves)
def test_it_remembers_the_latest_pages_that_fit(moves: list[tuple[str, int, int]]) -> None:
    ghosts, model, bound = Ghosts(), dict[bytes, int](), PAGES_MIN
    for verb, number, pages in moves:
        key = bytes([number])
        if verb == "keep":
            ghosts.keep(key, left(pages), pages)
            model.pop(key, None)
            model[key] = pages
        elif verb == "take":
            ghost, known = ghosts.take(key), model.pop(key, None)
            assert (ghost and ghost.pages) == known
        else:
            ghosts.resize(pages)
            bound = max(PAGES_MIN, pages)
        while sum(model.values()) > bound:
            del model[next(iter(model))]
        assert (len(ghosts), ghosts.pages) == (len(model), sum(model.values()))


def test_it_keeps_the_numbers() -> None:
    ghosts = Ghosts()
    ghosts.keep(b"a", left(9), 4)
    ghost = ghosts.take(b"a")
    assert ghost is not None
    assert (ghost.heat, ghost.touches, ghost.touched_s, ghost.pages) == (5.0, 7, 3.0, 4)
    assert ghosts.take(b"a") is None
