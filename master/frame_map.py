"""Which frames of a segment belong to no chunk: a buddy allocator of 1, 2 and 4 frames.

A frame is a quarter of a full chunk (kvstore.segment). Pieces are aligned to their length, and
two free neighbours of one piece become that piece again. Must not know size classes or extents.
"""

from __future__ import annotations

from typing import Final

from kvstore.segment import FRAMES_PER_CHUNK

LENGTHS: Final = (1, 2, 4)
assert LENGTHS[-1] == FRAMES_PER_CHUNK


class FrameMap:
    """Free pieces by length; every frame is in at most one of them."""

    __slots__ = ("_frames", "_free", "withheld")

    def __init__(self, frames: int) -> None:
        """Start with all `frames` free; a multiple of the largest piece."""
        assert frames % FRAMES_PER_CHUNK == 0, frames
        self._frames = frames
        self.withheld: set[int] = set()
        """Frames that are out of use."""
        # Dicts as ordered sets; the pieces of the lowest frames are taken first.
        self._free: dict[int, dict[int, None]] = {length: {} for length in LENGTHS}
        self._free[FRAMES_PER_CHUNK] = dict.fromkeys(
            range(frames - FRAMES_PER_CHUNK, -1, -FRAMES_PER_CHUNK)
        )

    def has(self, length: int) -> bool:
        """Whether `take(length)` would give a piece."""
        return any(self._free[held] for held in LENGTHS if held >= length)

    def take(self, length: int) -> int | None:
        """First frame of a piece of `length`, cut from the smallest that does; None if none."""
        for held in LENGTHS:
            if held >= length and self._free[held]:
                first, _ = self._free[held].popitem()
                self._give_rest(first, held, first, length)
                return first
        return None

    def take_at(self, first: int, length: int) -> bool:
        """Take exactly this piece; False when some of it is taken already."""
        for held in LENGTHS:
            start = first // held * held
            if held >= length and start in self._free[held]:
                del self._free[held][start]
                self._give_rest(start, held, first, length)
                return True
        return False

    def _give_rest(self, start: int, held: int, first: int, length: int) -> None:
        """Keep what is left of piece (start, held) after (first, length) was cut out of it."""
        while held > length:
            held //= 2
            inner = first // held * held
            self._free[held][start + held if inner == start else start] = None
            start = inner

    def give(self, first: int, length: int) -> None:
        """Give a piece back, joined with free neighbours."""
        while length < FRAMES_PER_CHUNK:
            buddy = first ^ length
            if buddy not in self._free[length]:
                break
            del self._free[length][buddy]
            first = min(first, buddy)
            length *= 2
        assert first not in self._free[length], (first, length)
        self._free[length][first] = None

    def free_pieces(self) -> list[tuple[int, int]]:
        """(first frame, length) of every free piece, in order of frames."""
        return sorted((first, length) for length in LENGTHS for first in self._free[length])

    @property
    def withheld_chunks(self) -> list[int]:
        """Numbers of the whole chunks that are out of use."""
        if not self.withheld:
            return []
        firsts = range(0, self._frames, FRAMES_PER_CHUNK)
        return [first // FRAMES_PER_CHUNK for first in firsts if self._is_withheld(first)]

    def withhold(self, number: int) -> bool:
        """Take what is free of a whole chunk out of use; whether all of it is by now."""
        first = number * FRAMES_PER_CHUNK
        for frame in range(first, first + FRAMES_PER_CHUNK):
            if frame not in self.withheld and self.take_at(frame, 1):
                self.withheld.add(frame)
        return self._is_withheld(first)

    def restore(self) -> None:
        """Use everything again."""
        for frame in self.withheld:
            self.give(frame, 1)
        self.withheld.clear()

    def _is_withheld(self, first: int) -> bool:
        return self.withheld.issuperset(range(first, first + FRAMES_PER_CHUNK))
