"""Free pieces against a plain set of frames."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from master.frame_map import LENGTHS, FrameMap

FRAMES = 32


class FrameMapMachine(RuleBasedStateMachine):
    """Takes and gives pieces; knows which frames are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.map = FrameMap(FRAMES)
        self.taken: list[tuple[int, int]] = []
        self.out: set[int] = set()

    def free_frames(self) -> set[int]:
        """Frames in no piece that was taken, and in use."""
        taken = {f for first, n in self.taken for f in range(first, first + n)}
        return set(range(FRAMES)) - taken - self.out

    @rule(length=st.sampled_from(LENGTHS))
    def take(self, length: int) -> None:
        """A piece comes, aligned and free, exactly if there is one."""
        free = self.free_frames()
        fits = [f for f in range(0, FRAMES, length) if free.issuperset(range(f, f + length))]
        assert self.map.has(length) == bool(fits)
        first = self.map.take(length)
        if first is None:
            assert not fits
        else:
            assert first in fits
            self.taken.append((first, length))

    @rule(length=st.sampled_from(LENGTHS), place=st.integers(0, FRAMES - 1))
    def take_at(self, length: int, place: int) -> None:
        """A given piece can be had exactly if it is free."""
        first = place // length * length
        can = self.free_frames().issuperset(range(first, first + length))
        assert self.map.take_at(first, length) == can
        if can:
            self.taken.append((first, length))

    @precondition(lambda self: self.taken)
    @rule(index=st.integers(0, 1000))
    def give(self, index: int) -> None:
        """Give a piece back."""
        self.map.give(*self.taken.pop(index % len(self.taken)))

    @rule(number=st.integers(0, FRAMES // 4 - 1))
    def withhold(self, number: int) -> None:
        """What is free of a chunk goes; the rest can follow."""
        chunk = set(range(4 * number, 4 * number + 4))
        self.out |= chunk & self.free_frames()
        assert self.map.withhold(number) == (chunk <= self.out)
        assert (number in self.map.withheld_chunks) == (chunk <= self.out)

    @rule()
    def restore(self) -> None:
        """All of it can be had again."""
        self.map.restore()
        self.out.clear()

    @invariant()
    def free_pieces_are_the_rest(self) -> None:
        """What is free is exactly what was not taken, in pieces that could not be joined."""
        pieces = self.map.free_pieces()
        frames = [frame for first, n in pieces for frame in range(first, first + n)]
        assert sorted(frames) == sorted(self.free_frames())
        for first, length in pieces:
            assert first % length == 0
            assert length == LENGTHS[-1] or (first ^ length, length) not in pieces


TestFrameMap = FrameMapMachine.TestCase


def test_everything_given_back_is_whole_again() -> None:
    frames = FrameMap(8)
    pieces = [
        (first, length) for length in (1, 2, 1, 4) if (first := frames.take(length)) is not None
    ]
    assert not frames.free_pieces()
    for first, length in pieces:
        frames.give(first, length)
    assert frames.free_pieces() == [(0, 4), (4, 4)]
