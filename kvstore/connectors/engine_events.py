"""Which blocks an engine tells routers of: those that all ranks have put into the pool.

Pure: knows neither engine nor pool. What is told of a block is the caller's; it is kept from the
step that plans to save it until the last rank has put it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")
PLANNED_MAX: Final = 1 << 16
"""Blocks on their way; those that were planned before them are told of by nobody."""


class PutBlock(NamedTuple):
    """A block that one rank has put, or has found to be there."""

    group: int
    block_hash: bytes


class _Planned(Generic[T]):
    """A block on its way."""

    __slots__ = ("told", "waits_for")

    def __init__(self, told: T, waits_for: int) -> None:
        self.told = told
        self.waits_for = waits_for


class Announcements(Generic[T]):
    """What one engine's scheduler is to tell. Not thread-safe."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks` has, for each cache group, how many ranks put its blocks."""
        self._ranks = tuple(ranks)
        # Ordered: a dict looks for its first entry among all that were taken out before it.
        self._planned: OrderedDict[PutBlock, _Planned[T]] = OrderedDict()
        self._ready: list[T] = []

    def __len__(self) -> int:
        return len(self._planned)

    def plan(self, block: PutBlock, told: T) -> None:
        """A block is to be saved by all ranks of its group."""
        self._planned.pop(block, None)
        self._planned[block] = _Planned(told, self._ranks[block.group])
        if len(self._planned) > PLANNED_MAX:
            self._planned.popitem(last=False)

    def put(self, blocks: Iterable[PutBlock]) -> None:
        """Ranks have put these; a block is ready once as many have as its group has."""
        for block in blocks:
            planned = self._planned.get(block)
            if planned is None:
                continue
            planned.waits_for -= 1
            if not planned.waits_for:
                self._ready.append(planned.told)
                del self._planned[block]

    def take(self) -> list[T]:
        """What is to be told now, and was not before."""
        ready, self._ready = self._ready, []
        return ready
