"""Which blocks of which requests are to be saved after a step: full, and not known to be there.

Pure: knows neither engine nor pool. A block is full once all its tokens are computed and hashed;
a request that is preempted loses its blocks, but not the memory of what was saved of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.engine_lookups import Held
    from kvstore.hints import Hints

NULL_BLOCK: Final = 0
"""Stands for a block outside a group's window, which nobody has."""
AGAIN_S: Final = 10.0
"""What one request saves is not saved again for another one, for so long."""


class BlockRun(NamedTuple):
    """Blocks of one group and their hashes; of a group with chains each follows the other."""

    group: int
    first: int
    """Which block of its request the first of them is."""
    parent: bytes
    """Hash of the block before the first; empty for the first block of all."""
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    hints: Hints | None = None
    """What is known of their future, if they are to be saved."""


class Load(NamedTuple):
    """What one request waits for."""

    request: str
    runs: tuple[BlockRun, ...]


class Scheduled(NamedTuple):
    """A request of a step, as far as saving concerns."""

    request: str
    hashes: Sequence[bytes]
    new_from: int
    """The first block that the step computes tokens of."""
    full_blocks: int
    """Blocks whose tokens are all computed once the step is done."""


class Saves:
    """What has been saved of each request of one scheduler. For the scheduler's thread."""

    def __init__(self, chained: Sequence[bool]) -> None:
        """`chained` tells for each group whether its blocks need those before them."""
        self._chained = tuple(chained)
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self._saved: dict[str, int] = {}
        # Ordered: a dict looks for its first entry among all that were taken out before it.
        self._planned: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        """When blocks were last planned to be saved, oldest first."""

    def __len__(self) -> int:
        return len(self._tables)

    def allot(self, request: str, blocks: Sequence[Sequence[int]]) -> None:
        """The request has these blocks from now on, and no others."""
        self._tables[request] = tuple(list(each) for each in blocks)

    def append(self, request: str, blocks: Sequence[Sequence[int]]) -> None:
        """The request has these blocks as well."""
        for table, more in zip(self._tables[request], blocks, strict=True):
            table += more

    def start_over(self, request: str, hashes: Sequence[bytes]) -> None:
        """What was thought to be in the pool is not: save all of it when it is computed."""
        self._saved.pop(request, None)
        for group in range(len(self._chained)):
            for each in hashes:
                self._planned.pop((group, each), None)

    def end(self, request: str) -> None:
        """The request has gone, and its blocks with it."""
        self._tables.pop(request, None)
        self._saved.pop(request, None)

    def plan(self, scheduled: Scheduled, held: Held | None, now_s: float) -> list[BlockRun]:
        """What to save of one request after this step."""
        stop = min(scheduled.full_blocks, len(scheduled.hashes))
        first = self._saved.get(scheduled.request, 0)
        self._saved[scheduled.request] = max(first, stop)
        tables = self._tables[scheduled.request]
        runs: list[BlockRun] = []
        windows = iter(held.windows if held else ())
        for group, table in enumerate(tables):
            if self._chained[group]:
                start = max(first, held.leading if held else 0)
                wanted = list(range(start, stop))
            else:
                # V3: those before the step's own may have left the window, and be another's.
                start, flags = max(first, scheduled.new_from), next(windows, b"")
                wanted = [i for i in range(start, stop) if flags[i : i + 1] != b"\1"]
            runs += self._runs(group, table, scheduled.hashes, wanted, now_s)
        return runs

    def _runs(
        self,
        group: int,
        table: Sequence[int],
        hashes: Sequence[bytes],
        wanted: Sequence[int],
        now_s: float,
    ) -> list[BlockRun]:
        """Stretches of neighbours among the wanted blocks that the engine has."""
        self._forget(now_s)
        runs: list[list[int]] = []
        for i in wanted:
            key = (group, hashes[i])
            if table[i] == NULL_BLOCK or key in self._planned:
                continue
            self._planned[key] = now_s
            if runs and runs[-1][-1] == i - 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        return [
            BlockRun(
                group,
                run[0],
                hashes[run[0] - 1] if run[0] else b"",
                tuple([hashes[i] for i in run]),
                tuple([table[i] for i in run]),
            )
            for run in runs
        ]

    def _forget(self, now_s: float) -> None:
        while self._planned:
            key = next(iter(self._planned))
            if now_s - self._planned[key] < AGAIN_S:
                return
            del self._planned[key]


def loads_of(
    hashes: Sequence[bytes], tables: Sequence[Sequence[int]], first: int, stop: int
) -> tuple[BlockRun, ...]:
    """What has to come for blocks [first, stop) of a request with these blocks."""
    runs: list[BlockRun] = []
    for group, table in enumerate(tables):
        places = [i for i in range(first, stop) if table[i] != NULL_BLOCK]
        if places:
            parent = hashes[places[0] - 1] if places[0] else b""
            wanted = tuple([hashes[i] for i in places])
            blocks = tuple([table[i] for i in places])
            runs.append(BlockRun(group, places[0], parent, wanted, blocks))
    return tuple(runs)
