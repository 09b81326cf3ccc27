"""Counted byte-range locks, against a model and against another holder."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.read_locks import ReadLocks, lock_range, neighbours

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096
EXTENTS = 6


class File:
    """A file, the locks on it, and its owner's open file description."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("locked")
        path = f"/proc/self/fd/{self.fd}"
        self.locks = ReadLocks(os.open(path, os.O_RDONLY))
        self.owner = os.open(path, os.O_RDWR)

    def close(self) -> None:
        self.locks.close()
        os.close(self.owner)
        os.close(self.fd)

    def free(self) -> list[bool]:
        """Which extents the owner could overwrite."""
        found = []
        for i in range(EXTENTS):
            granted = lock_range(self.owner, fcntl.F_WRLCK, i * SIZE, SIZE)
            found.append(granted)
            if granted:
                lock_range(self.owner, fcntl.F_UNLCK, i * SIZE, SIZE)
        return found


@pytest.fixture
def file() -> Iterator[File]:
    made = File()
    yield made
    made.close()


@given(st.sets(st.integers(0, 30)))
def test_neighbours_cover_the_same_bytes_in_as_few_ranges_as_can_be(extents: set[int]) -> None:
    ranges = list(neighbours((e * SIZE for e in extents), SIZE))
    covered = [at // SIZE for start, total in ranges for at in range(start, start + total, SIZE)]
    assert covered == sorted(extents)
    assert all(a + length < b for (a, length), (b, _) in pairwise(ranges))


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, EXTENTS - 1), min_size=1, max_size=6)),
        max_size=12,
    )
)
def test_an_extent_is_held_while_any_view_of_it_lasts(steps: list[tuple[bool, list[int]]]) -> None:
    file = File()
    try:
        held: Counter[int] = Counter()
        for acquire, extents in steps:
            if acquire:
                assert all(file.locks.acquire([e * SIZE for e in extents], SIZE))
                held.update(extents)
            else:
                ends = [e for e, n in Counter(extents).items() for _ in range(min(n, held[e]))]
                file.locks.release([e * SIZE for e in ends], SIZE)
                held.subtract(ends)
            assert file.free() == [held[e] == 0 for e in range(EXTENTS)]
            assert file.locks.extents == sum(n > 0 for n in held.values())
    finally:
        file.close()


def test_what_the_owner_is_overwriting_is_refused_alone(file: File) -> None:
    assert lock_range(file.owner, fcntl.F_WRLCK, 2 * SIZE, SIZE)
    granted = file.locks.acquire([i * SIZE for i in range(5)], SIZE)
    assert granted == [True, True, False, True, True]
    lock_range(file.owner, fcntl.F_UNLCK, 2 * SIZE, SIZE)
    assert file.free() == [False, False, True, False, False, True]
    assert file.locks.acquire([2 * SIZE], SIZE) == [True]


def test_closing_waits_for_the_last_view(file: File) -> None:
    file.locks.acquire([0, SIZE], SIZE)
    file.locks.close()
    assert file.locks.acquire([0], SIZE) == [False]
    file.locks.release([0], SIZE)
    assert file.free()[:2] == [True, False]
    file.locks.release([SIZE], SIZE)
    assert all(file.free())
    file.locks.close()
