"""Which of several equally good replicas to read: that of a worker which has lately been fast.

Measured by this client alone, of its own reads. Pure but for the random numbers handed in; knows
no transports and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from kvstore.wire.messages.common import SegmentRef

NOMINAL_S: Final = 200e-6
NOMINAL_BYTES_PER_S: Final = 2e9
"""What a read would take of a worker of slowness 1. Right enough for comparisons: see `took`."""
WEIGHT: Final = 1 / 4
"""Of the latest read: a worker that began to be slow is noticed within a few."""
SLOWNESS_MAX: Final = 32.0
"""Of one read. It counts for a stall as well, and is forgotten after seven good reads."""
ALIKE: Final = 1.5
"""Workers whose slowness differs by less than this factor are told apart by chance."""
LOOK_AGAIN: Final = 64
"""A worker that was passed over so often in a row is read from once, however slow it was."""
WORKERS_MAX: Final = 4096


class WorkerLoads:
    """How slow workers have been, by tier. Threads may share it: a lost count does no harm."""

    def __init__(self, random: Random) -> None:
        """Know nothing of anybody."""
        self._random = random
        self._slowness: dict[tuple[str, str], float] = {}
        self._passed_over: dict[tuple[str, str], int] = {}

    def took(self, segment: SegmentRef, size_bytes: int, seconds: float) -> None:
        """Note a read that brought `size_bytes`.

        Slowness is the time that a read took over the time that it should take, which is a
        constant and a time for each byte. So reads of all sizes go into one average, and neither
        many small nor a few large ones decide alone. It is not measured against the best rate
        ever seen, which one lucky read would set for good.
        """
        nominal_s = NOMINAL_S + size_bytes / NOMINAL_BYTES_PER_S
        self._note(segment, min(seconds / nominal_s, SLOWNESS_MAX))

    def failed(self, segment: SegmentRef) -> None:
        """Note a read that its worker did not answer."""
        self._note(segment, SLOWNESS_MAX)

    def order(self, alike: Sequence[SegmentRef]) -> list[int]:
        """Positions of the segments, the one to read first, then those to fail over to.

        Who was never read from comes first, then who was passed over for long. Else the faster of
        two that are drawn: where every client took the fastest of all, they would meet there.
        """
        keys = [(segment.worker, segment.tier) for segment in alike]
        drawn = list(range(len(keys)))
        self._random.shuffle(drawn)
        first = self._first(keys, drawn)
        for key in keys:
            self._passed_over[key] = self._passed_over.get(key, 0) + 1
        self._passed_over[keys[first]] = 0
        drawn.remove(first)
        return [first, *sorted(drawn, key=lambda i: self._slowness.get(keys[i], 0.0))]

    def _first(self, keys: Sequence[tuple[str, str]], drawn: Sequence[int]) -> int:
        slowness = self._slowness  # the one dictionary, though it may be replaced meanwhile
        unknown = next((i for i in drawn if keys[i] not in slowness), None)
        if unknown is not None:
            return unknown
        waiting = max(drawn, key=lambda i: self._passed_over.get(keys[i], 0))
        if self._passed_over.get(keys[waiting], 0) >= LOOK_AGAIN:
            return waiting
        one, other = drawn[:2]
        is_slower = slowness[keys[one]] > ALIKE * slowness[keys[other]]
        return other if is_slower else one

    def _note(self, segment: SegmentRef, slowness: float) -> None:
        key = segment.worker, segment.tier
        if key not in self._slowness and len(self._slowness) >= WORKERS_MAX:
            self._slowness, self._passed_over = {}, {}
        before = self._slowness.get(key, slowness)
        self._slowness[key] = before + WEIGHT * (slowness - before)
